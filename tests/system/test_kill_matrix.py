"""``kill -9`` at every failpoint, on every database: after a restart all is as if nothing had happened."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvq.migrations import migrate
from kvq.worker.audit import audit
from kvq.worker.config import Settings
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.system.calm import body, calm_answers, dummy_model, job
from tests.system.forked import fork
from tests.system.processes import START_TIMEOUT_S, Worker
from tests.system.rows import query
from tests.waiting import wait_until

# Of each kind: those that come as a batch through SQL, and those that come by Celery.
NUM_JOBS = 8
# The second step, so that there are results in memory, and rows that run.
FAILPOINTS = [
    "after_pop",
    "after_inbox",
    "after_claim",
    "mid_step:2",
    "before_commit",
    "after_commit",
    "after_backend",
    "during_drain",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_model(tmp_path_factory.mktemp("model") / "dummy")


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str | None]:
    return calm_answers(model, tmp_path_factory.mktemp("calm"), range(2 * NUM_JOBS))


class Fleet:
    """Processes of one test, one after another on the same database and broker."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._folder = folder
        self._settings = settings
        self._workers: list[Worker] = []

    def start(self, *command: str, failpoints: str = "") -> Worker:
        """``kvq worker``, or another command."""
        folder = self._folder / f"process-{len(self._workers)}"
        worker = Worker(folder, self._settings, command=command or ("worker",), failpoints=failpoints, start=fork)
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()


@pytest.fixture
def fleet_on(tmp_path: Path, model: Path, redis_url: str) -> Iterator[Callable[[str], Fleet]]:
    fleets = []

    def make(db: str) -> Fleet:
        settings: dict[str, object] = {"db": db, "broker": redis_url, "model": model, "device": "cpu"}
        fleets.append(Fleet(tmp_path, {**settings, "kv_cache_memory": "8MiB", "max_num_seqs": 4}))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.end()


def send(redis_url: str) -> None:
    with celery_client(redis_url) as client:
        for number in range(NUM_JOBS, 2 * NUM_JOBS):
            client.send_task("kvq.generate", kwargs=body(number), queue="kvq", task_id=f"job-{number}")


def submit(url: str) -> None:
    with Store.open(url) as store:
        store.create_batch(batch_id="batch")
        store.insert_jobs([job(f"job-{number}", number) for number in range(NUM_JOBS)], batch_id="batch")


def let_time_pass(redis_url: str, sql: Callable[..., list[Any]]) -> None:
    """Make what a dead worker had popped, or was about to tell, old enough to be taken over: half a minute."""
    sql("UPDATE outbox SET next_at = created_at")
    keys = QueueKeys(queue="kvq")
    with redis.Redis.from_url(redis_url) as client:
        for tag in client.zrange(keys.unacked_index, 0, -1):
            client.zadd(keys.unacked_index, {tag: time.time() - 60})


def assert_all_is_as_in_peace(url: str, redis_url: str, worker: Worker, calm: dict[int, str | None]) -> None:
    """Wait for the last job, stop the worker, and hold everything against a run without a kill."""

    def counts(condition: str) -> int:
        assert worker.exit_code is None, worker.log
        return int(query(url, f"SELECT count(*) FROM {condition}")[0][0])

    ended = "jobs WHERE state NOT IN ('queued', 'running')"
    wait_until(lambda: counts(ended) == 2 * NUM_JOBS, timeout_s=START_TIMEOUT_S, what="every job to end")
    wait_until(lambda: counts("outbox") == 0, timeout_s=60, what="the outbox to be drained")
    assert worker.stop() == 0, worker.log
    with Store.open(url) as store:
        checks = audit(store, Settings(db=url, broker=redis_url))
    assert [problem for check in checks for problem in check.problems] == []
    assert [check.note for check in checks if check.note] == []
    rows = query(url, "SELECT j.custom_id, j.state, r.text FROM jobs j JOIN results r ON r.seq = j.seq")
    assert sorted(rows) == sorted((f"job-{number}", "succeeded", text) for number, text in calm.items())
    assert query(url, "SELECT count(*) FROM job_attempts WHERE outcome = 'succeeded'") == [(2 * NUM_JOBS,)]


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_a_kill_there_and_a_restart_end_every_job_once_with_the_answer_it_would_have_had(
    failpoint: str,
    store_url: str,
    redis_url: str,
    sql: Callable[..., list[Any]],
    fleet_on: Callable[[str], Fleet],
    calm: dict[int, str | None],
) -> None:
    fleet = fleet_on(store_url)
    submit(store_url)
    send(redis_url)
    worker = fleet.start(failpoints=failpoint)
    if failpoint == "during_drain":
        worker.wait_ready().send(signal.SIGTERM)
    worker.wait_killed()
    let_time_pass(redis_url, sql)
    assert_all_is_as_in_peace(store_url, redis_url, fleet.start(), calm)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_kill_during_migrate_leaves_no_table_and_a_restart_runs_what_had_been_sent(
    database: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    redis_url: str,
    fleet_on: Callable[[str], Fleet],
    calm: dict[int, str | None],
) -> None:
    # A worker makes its own SQLite file; a PostgreSQL database is upgraded by a command.
    on_sqlite = database == "sqlite"
    url = f"sqlite:///{tmp_path / 'new.db'}" if on_sqlite else request.getfixturevalue("pg_empty_url")
    command = ["worker"] if on_sqlite else ["db", "upgrade"]
    fleet = fleet_on(url)
    send(redis_url)
    fleet.start(*command, failpoints="during_migrate").wait_killed()
    assert migrate.current(url) is None
    again = fleet.start(*command)
    if on_sqlite:
        again.wait_ready()
    else:
        assert again.wait() == 0, again.log
    submit(url)
    assert_all_is_as_in_peace(url, redis_url, again if on_sqlite else fleet.start(), calm)
