"""Whatever is called in whatever order, a job makes only legal moves and the rows agree with each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvq.worker.errors import LeaseLost
from kvq.worker.jobs import LEGAL_MOVES, TERMINAL_STATES, ClaimedJob, JobError, JobState
from kvq.worker.store import Store
from tests.factories import new_job, new_worker, outcome_of

Sql = Callable[..., list[Any]]

MAX_CRASHES = 2
NUM_WORKERS = 2
# Places in the list of jobs, taken modulo its length.
PICKS = st.lists(st.integers(0, 20), min_size=1, max_size=4)


@dataclass(slots=True)
class Expected:
    """What the model believes of one job."""

    state: JobState = JobState.QUEUED
    owner: str | None = None
    attempt: int = 0
    claim_id: int | None = None
    crashes: int = 0
    cancel_requested: bool = False


@pytest.fixture
def _moves_log(sql: Sql, store_url: str) -> None:
    """A trigger that writes down every change of state, however it comes about."""
    sql("CREATE TABLE moves_log (seq bigint, old_state text, new_state text)")
    if store_url.startswith("sqlite"):
        sql(
            "CREATE TRIGGER log_moves AFTER UPDATE OF state ON jobs BEGIN"
            " INSERT INTO moves_log VALUES (old.seq, old.state, new.state); END"
        )
    else:
        sql(
            "CREATE FUNCTION log_move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO moves_log VALUES (old.seq, old.state, new.state); RETURN new; END $$"
        )
        sql("CREATE TRIGGER log_moves AFTER UPDATE OF state ON jobs FOR EACH ROW EXECUTE FUNCTION log_move()")


class AnySequence(RuleBasedStateMachine):
    """The store beside a model of it. Workers keep what they claimed even after they are buried, as zombies do."""

    def __init__(self, store: Store, sql: Sql) -> None:
        super().__init__()
        self.store, self.sql = store, sql

    @initialize()
    def empty(self) -> None:
        self.sql("DELETE FROM batches")
        self.sql("DELETE FROM jobs")
        self.sql("DELETE FROM workers")
        self.store.create_batch(batch_id="b")
        self.expected: dict[str, Expected] = {}
        self.seq_by_id: dict[str, int] = {}
        self.workers = [new_worker(self.store) for _ in range(NUM_WORKERS)]
        self.held: list[tuple[str, ClaimedJob]] = []
        self.insert(3, False)

    @rule(count=st.integers(1, 3), refused=st.booleans())
    def insert(self, count: int, refused: bool) -> None:
        error = JobError(code="invalid_json", message="no") if refused else None
        jobs = [new_job(number, error=error, celery={"n": number}) for number in range(count)]
        self.store.insert_jobs(jobs * 2, batch_id="b")
        for job in jobs:
            self.expected[job.job_id] = Expected(state=JobState.FAILED if refused else JobState.QUEUED)
            self.seq_by_id[job.job_id] = self.sql("SELECT seq FROM jobs WHERE job_id = :id", id=job.job_id)[0][0]

    @rule(which=st.integers(0, NUM_WORKERS - 1), picks=PICKS)
    def claim(self, which: int, picks: list[int]) -> None:
        worker_id = self.workers[which]
        job_ids = self._picked(picks)
        claimed = self.store.claim(worker_id, [self.seq_by_id[job_id] for job_id in job_ids])
        free = [job_id for job_id in job_ids if self.expected[job_id].state is JobState.QUEUED]
        assert [job.job_id for job in claimed] == free
        for job in claimed:
            known = self.expected[job.job_id]
            known.state, known.owner, known.attempt = JobState.RUNNING, worker_id, known.attempt + 1
            assert all(job.claim_id != earlier.claim_id for _, earlier in self.held), "no two claims are the same"
            known.claim_id = job.claim_id
            assert (job.attempt, job.crashes) == (known.attempt, known.crashes)
            self.held.append((worker_id, job))

    @precondition(lambda self: self.held)
    @rule(back=st.integers(1, 6), state=st.sampled_from(sorted(TERMINAL_STATES)), stale=st.booleans())
    def finish(self, back: int, state: JobState, stale: bool) -> None:
        """Anything ever claimed, by whoever claimed it: live, or released, reaped, finished already (stale)."""
        chosen = [held for held in self.held if self._holds(*held) is not stale]
        if not chosen:
            return
        worker_id, job = chosen[-back % len(chosen)]
        report = self.store.finish(worker_id, [outcome_of(job, state=state)] * 2)
        known = self.expected[job.job_id]
        assert report.accepted == (frozenset() if stale else frozenset({job.seq}))
        assert report.fenced == (frozenset({job.seq}) if stale else frozenset())
        if not stale:
            known.state = state

    @rule(which=st.integers(0, NUM_WORKERS - 1))
    def release(self, which: int) -> None:
        held = self._running(self.workers[which])
        assert self.store.release(self.workers[which]) == len(held)
        for known in held:
            self._give_back(known)

    @rule(which=st.integers(0, NUM_WORKERS - 1), retires=st.booleans())
    def replace_worker(self, which: int, retires: bool) -> None:
        """A worker ends, in good order or not, and another starts in its place."""
        held = self._running(self.workers[which])
        if retires:
            self.store.retire_worker(self.workers[which])
            for known in held:
                self._give_back(known)
        else:
            assert self.store.bury_worker(self.workers[which])
            self._crash(held)
        assert not self.store.heartbeat(self.workers[which])
        if self.seq_by_id:
            with pytest.raises(LeaseLost):
                self.store.claim(self.workers[which], list(self.seq_by_id.values()))
        self.workers[which] = new_worker(self.store)

    @rule(picks=PICKS, whole_batch=st.booleans())
    def cancel(self, picks: list[int], whole_batch: bool) -> None:
        job_ids = list(self.expected) if whole_batch else self._picked(picks)
        changed = 0
        for job_id in job_ids:
            known = self.expected[job_id]
            if known.state is JobState.QUEUED:
                known.state, changed = JobState.CANCELLED, changed + 1
            elif known.state is JobState.RUNNING and not known.cancel_requested:
                known.cancel_requested, changed = True, changed + 1
        done = self.store.cancel_batch("b") if whole_batch else self.store.cancel_jobs(job_ids)
        assert done == changed

    @rule(picks=PICKS)
    def expire(self, picks: list[int]) -> None:
        job_ids = self._picked(picks)
        waiting = [job_id for job_id in job_ids if self.expected[job_id].state is JobState.QUEUED]
        for job_id in waiting:
            self.sql("UPDATE jobs SET deadline = '2020-01-01 00:00:00.000' WHERE job_id = :id", id=job_id)
            self.expected[job_id].state = JobState.EXPIRED
        assert self.store.expire_due() == len(waiting)

    @rule(picks=PICKS)
    def retry(self, picks: list[int]) -> None:
        job_ids = self._picked(picks)
        again = [
            self.expected[job_id]
            for job_id in job_ids
            if self.expected[job_id].state in TERMINAL_STATES - {JobState.SUCCEEDED}
        ]
        assert self.store.retry_jobs(job_ids) == len(again)
        for known in again:
            known.state, known.owner = JobState.QUEUED, None
            known.crashes, known.cancel_requested = 0, False

    @invariant()
    def rows_are_as_expected(self) -> None:
        rows = self.sql("SELECT job_id, state, owner, attempt, crashes, cancel_requested FROM jobs")
        found = {
            row.job_id: (row.state, row.owner, row.attempt, row.crashes, bool(row.cancel_requested)) for row in rows
        }
        assert found == {
            job_id: (known.state, known.owner, known.attempt, known.crashes, known.cancel_requested)
            for job_id, known in self.expected.items()
        }

    def teardown(self) -> None:
        assert self.store.check_integrity() == []

    def _picked(self, picks: list[int]) -> list[str]:
        job_ids = list(self.expected)
        return list(dict.fromkeys(job_ids[pick % len(job_ids)] for pick in picks))

    def _holds(self, worker_id: str, job: ClaimedJob) -> bool:
        known = self.expected[job.job_id]
        return (known.state, known.owner, known.claim_id) == (JobState.RUNNING, worker_id, job.claim_id)

    def _running(self, worker_id: str) -> list[Expected]:
        return [
            known for known in self.expected.values() if known.state is JobState.RUNNING and known.owner == worker_id
        ]

    def _give_back(self, known: Expected) -> None:
        known.attempt -= 1
        known.state = JobState.CANCELLED if known.cancel_requested else JobState.QUEUED
        if known.cancel_requested:
            known.attempt += 1  # ended, not given back: the attempt counts
        else:
            known.owner = None

    def _crash(self, held: list[Expected]) -> None:
        for known in held:
            known.crashes += 1
            if known.cancel_requested:
                known.state = JobState.CANCELLED
            elif known.crashes >= MAX_CRASHES:
                known.state = JobState.DEAD
            else:
                known.state, known.owner = JobState.QUEUED, None
        report = self.store.reap(lease_s=3600, max_crashes=MAX_CRASHES)
        assert report.requeued + report.dead + report.cancelled + report.expired == len(held)


@pytest.mark.usefixtures("_moves_log")
def test_any_sequence_of_calls_makes_only_legal_moves(store: Store, sql: Sql) -> None:
    run_state_machine_as_test(
        lambda: AnySequence(store, sql),
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    made = {(row.old_state, row.new_state) for row in sql("SELECT DISTINCT old_state, new_state FROM moves_log")}
    assert made <= {(old.value, new.value) for old, news in LEGAL_MOVES.items() for new in news}
    assert len(made) > 6, "the walks did not get far"
