"""A worker that is told to stop stops, at whatever moment of its life, within its timeout and two seconds."""

from __future__ import annotations

import os
import signal

import pytest

from kvq.worker.store import Store
from tests.system.conftest import WorkerMaker
from tests.system.processes import START_TIMEOUT_S
from tests.waiting import wait_until

# What the machine may add to what the worker is allowed, which is 1.5 s after the drain's time.
SLACK_S = 60.0
HOSTED = pytest.mark.parametrize("options", [[], ["--no-broker"]], ids=["celery", "embedded"])


@HOSTED
def test_a_worker_told_to_stop_at_any_moment_after_its_start_ends_with_success(
    options: list[str], redis_url: str, sqlite_url: str, start_worker: WorkerMaker
) -> None:
    broker = {} if options else {"broker": redis_url}
    with Store.open(sqlite_url) as store:
        # Moments of its life in processor time, which a busy machine does not change; it is ready after some 3 s.
        due_s = {start_worker(*options, db=sqlite_url, **broker): moment_s for moment_s in (0.0, 0.7, 1.4, 2.1)}
        for worker, moment_s in due_s.items():
            wait_until(
                lambda worker=worker, moment_s=moment_s: (  # type: ignore[misc]
                    _processor_s(worker.pid) >= moment_s or "engine ready" in worker.log
                ),
                timeout_s=START_TIMEOUT_S,
            )
            worker.send(signal.SIGTERM)
        for worker, moment_s in due_s.items():
            code = worker.wait(SLACK_S)
            # Before Python runs any of our code the system ends it.
            assert code in ((0, -signal.SIGTERM) if moment_s < 0.5 else (0,)), f"{moment_s}: {code}\n{worker.log}"
        assert store.live_workers() == []


def _processor_s(pid: int) -> float:
    """Processor time of a process so far; a large number once it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
