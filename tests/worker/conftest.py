"""A tiny engine, loaded once, services around it, and intakes beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from kvq.engine.engine import Engine
from kvq.worker.privacy import Keyring, Privacy
from kvq.worker.service import WorkerService
from kvq.worker.service_options import ServiceOptions
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.factories import new_worker
from tests.models import engine_config, tiny_model
from tests.worker.intakes import Doors
from tests.worker.private_stores import OpenStore


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


@pytest.fixture
def open_store(store_url: str) -> Iterator[OpenStore]:
    """Opens the test's database under the keys and wishes that are given."""
    opened: list[Store] = []

    def make(*keys: bytes, **changes: Any) -> Store:
        privacy = Privacy(keyring=Keyring(keys) if keys else None, **changes)
        opened.append(Store.open(store_url, privacy=privacy))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def worker_id(store: Store) -> str:
    return new_worker(store)


@pytest.fixture
def client(redis_url: str) -> Iterator[Celery]:
    with celery_client(redis_url) as app:
        yield app


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        yield connection


@pytest.fixture
def doors(redis_url: str, store: Store) -> Iterator[Doors]:
    made = Doors(redis_url, store)
    yield made
    assert not made.faults
