"""What whole-system tests share: a model, settings, and workers that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_model
from tests.system.processes import Worker

WorkerMaker = Callable[..., Worker]


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start_worker(tmp_path: Path, tiny_model_folder: Path) -> Iterator[WorkerMaker]:
    """Starts workers on the tiny model; ``start_worker(db=..., broker=...)``."""
    workers: list[Worker] = []

    def start(*options: str, failpoints: str = "", **settings: Any) -> Worker:
        defaults = {"model": tiny_model_folder, "device": "cpu", "kv_cache_memory": "64MiB", "max_num_seqs": 8}
        folder = tmp_path / f"worker-{len(workers)}"
        worker = Worker(folder, {**defaults, **settings}, *options, failpoints=failpoints)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.kill()
