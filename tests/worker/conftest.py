"""A tiny engine, loaded once, and services around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvq.engine.engine import Engine
from kvq.worker.service import WorkerService
from kvq.worker.service_options import ServiceOptions
from kvq.worker.store import Store
from tests.models import engine_config, tiny_model


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def engine(tiny_model_folder: Path) -> Engine:
    """One engine for all tests of the session; each leaves it empty."""
    return Engine.load(engine_config(tiny_model_folder, max_num_seqs=16))


ServiceMaker = Callable[..., WorkerService]


@pytest.fixture
def make_service(store: Store, engine: Engine) -> Iterator[ServiceMaker]:
    """Makes services on the store; those that were started are drained at the end."""
    services: list[WorkerService] = []

    def make(*, deliver: Any = None, **options: Any) -> WorkerService:
        service = WorkerService(store, lambda: engine, options=ServiceOptions(model="tiny", **options), deliver=deliver)
        services.append(service)
        return service

    yield make
    for service in services:
        service.drain(0)
    assert not engine.has_unfinished_requests
    engine.check_integrity()
