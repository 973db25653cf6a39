"""``kvq worker`` as a process: it serves what ``kvq submit`` enqueued, and stops when told."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cli.conftest import Kvq, start
from tests.waiting import wait_until


def test_a_worker_without_a_broker_serves_what_was_submitted_and_stops_when_told(
    kvq: Kvq, tmp_path: Path, tiny_model_folder: Path
) -> None:
    Path("a.jsonl").write_text('{"prompt": "Hello", "max_tokens": 4}\n' * 5, encoding="utf-8")
    worker = start("worker", "--no-broker", "--model", tiny_model_folder, "--kv-cache-memory", "32MiB", folder=tmp_path)
    try:
        ran = kvq("submit", "a.jsonl", "--wait")
        assert ran.code == 0, ran.err
        assert "5 succeeded" in ran.err
        wait_until(lambda: str(worker.pid) in kvq("status").out, what="the worker to be listed")
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=60)
        assert worker.returncode == 0, log
        assert "no worker is running" in kvq("status").err
    finally:
        worker.kill()


def test_a_worker_that_cannot_load_its_model_ends_with_an_error(tmp_path: Path) -> None:
    worker = start("worker", "--no-broker", "--model", "/no/such/model", folder=tmp_path)
    _, log = worker.communicate(timeout=60)
    assert worker.returncode in (1, 2), log
    assert "/no/such/model" in log
