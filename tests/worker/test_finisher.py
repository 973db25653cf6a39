"""The finisher: outcomes are written together, kept while the database is away, and told once written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvq.migrations import migrate
from kvq.worker.finisher import Finisher
from kvq.worker.jobs import JobOutcome, JobState
from kvq.worker.store import Store
from tests.factories import claim_all, new_batch, new_job, new_worker, outcome_of
from tests.servers import PostgresServer
from tests.waiting import wait_until


class Ear:
    """Hears what a finisher tells."""

    def __init__(self, store: Store, worker_id: str, interval_s: float = 0.01) -> None:
        self.committed: list[list[JobOutcome]] = []
        self.fenced: list[JobOutcome] = []
        self.faults: list[Exception] = []
        self.finisher = Finisher(
            store,
            identity=lambda: worker_id,
            on_committed=self._on_committed,
            on_fenced=self.fenced.extend,
            on_fault=self.faults.append,
            interval_s=interval_s,
        )

    def _on_committed(self, outcomes: Sequence[JobOutcome]) -> None:
        self.committed.append(list(outcomes))


def test_outcomes_that_come_together_are_committed_together_and_in_order(store: Store) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(store, [new_job(i) for i in range(20)])
    jobs = claim_all(store, worker_id)
    ear = Ear(store, worker_id, interval_s=0.2)
    for job in jobs:
        ear.finisher.add(outcome_of(job))
    ear.finisher.start()
    assert ear.finisher.flush(10)
    assert ear.finisher.stop()
    assert [[outcome.seq for outcome in part] for part in ear.committed] == [[job.seq for job in jobs]]
    assert store.batch_progress(batch_id).succeeded == 20
    assert not ear.faults


def test_the_result_of_a_job_that_was_reaped_is_refused_and_reported(store: Store) -> None:
    worker_id, other = new_worker(store), new_worker(store)
    new_batch(store, [new_job(1), new_job(2)])
    mine, lost = claim_all(store, worker_id)
    store.release(worker_id, [lost.seq])
    store.claim(other, [lost.seq])
    ear = Ear(store, worker_id)
    ear.finisher.start()
    ear.finisher.add(outcome_of(mine))
    ear.finisher.add(outcome_of(lost))
    assert ear.finisher.stop()
    assert [outcome.seq for outcome in ear.fenced] == [lost.seq]
    assert [outcome.seq for part in ear.committed for outcome in part] == [mine.seq]
    row = store.job(lost.job_id)
    assert row is not None
    assert row.state is JobState.RUNNING


def test_a_result_that_the_database_cannot_hold_fails_its_job_and_not_its_neighbours(
    store: Store, sql: Callable[..., list[Any]]
) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(store, [new_job(i) for i in range(3)])
    jobs = claim_all(store, worker_id)
    ear = Ear(store, worker_id, interval_s=0.2)
    sql("CREATE UNIQUE INDEX no_answer_twice ON results (text)")
    for job, text in zip(jobs, ["same", "same", "other"], strict=True):
        ear.finisher.add(outcome_of(job, text=text))
    ear.finisher.start()
    assert ear.finisher.flush(10)
    assert ear.finisher.stop()
    ends = [(row.state, row.text, row.error and row.error.code) for row in store.iter_results(batch_id)]
    assert ends == [("succeeded", "same", None), ("failed", None, "result_unstorable"), ("succeeded", "other", None)]
    assert not ear.fenced
    assert not ear.faults


def test_a_database_that_takes_no_writes_is_waited_for(store: Store, sql: Callable[..., list[Any]]) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(store, [new_job(i) for i in range(3)])
    jobs = claim_all(store, worker_id)
    ear = Ear(store, worker_id)
    sql("ALTER TABLE results RENAME TO results_away")
    ear.finisher.start()
    for job in jobs:
        ear.finisher.add(outcome_of(job))
    assert not ear.finisher.flush(0.5)
    sql("ALTER TABLE results_away RENAME TO results")
    assert ear.finisher.flush(30)
    assert ear.finisher.stop()
    assert store.batch_progress(batch_id).succeeded == 3
    assert not ear.fenced
    assert not ear.faults


def test_stopping_commits_what_is_pending(store: Store) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(store, [new_job(i) for i in range(3)])
    ear = Ear(store, worker_id, interval_s=60)
    ear.finisher.start()
    for job in claim_all(store, worker_id):
        ear.finisher.add(outcome_of(job))
    assert ear.finisher.stop()
    assert store.batch_progress(batch_id).finished
    assert ear.finisher.num_pending == 0


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    migrate.upgrade(server.url)
    yield server
    server.remove()


def test_outcomes_survive_the_database_going_away(own_postgres: PostgresServer) -> None:
    with Store.open(own_postgres.url) as store:
        worker_id = new_worker(store)
        batch_id = new_batch(store, [new_job(i) for i in range(5)])
        jobs = claim_all(store, worker_id)
        ear = Ear(store, worker_id)
        ear.finisher.start()
        own_postgres.kill()
        for job in jobs:
            ear.finisher.add(outcome_of(job))
        assert not ear.finisher.flush(0.5)
        assert ear.committed == []
        own_postgres.start()
        assert ear.finisher.flush(30)
        assert store.batch_progress(batch_id).succeeded == 5
        wait_until(lambda: sum(map(len, ear.committed)) == 5)
        assert ear.finisher.stop()
        assert not ear.fenced
        assert not ear.faults
