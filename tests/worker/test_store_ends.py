"""How jobs end in the store, on both databases: finished once, fenced, cancelled, expired; and retried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvq.worker.jobs import JobMetrics, JobState
from kvq.worker.store import Store
from tests.factories import (
    FAR_AHEAD,
    LONG_AGO,
    claim_all,
    failure_of,
    new_batch,
    new_job,
    new_worker,
    outcome_of,
    state_of,
)

Sql = Callable[..., list[Any]]


# Finish


def test_a_finished_job_has_its_result_and_its_metrics(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1)])
    (job,) = claim_all(store, worker_id)
    metrics = JobMetrics(
        prompt_tokens=100,
        cached_tokens=64,
        computed_tokens=36,
        completion_tokens=9,
        queue_ms=1.5,
        ttft_ms=2.5,
        tpot_ms=3.5,
        e2e_ms=4.5,
        prefill_ms=5.5,
        decode_ms=6.5,
        preemptions=2,
        seed=11,
    )
    store.finish(worker_id, [outcome_of(job, text="hello", response={"id": "r"}, metrics=metrics)])
    row = store.job(job.job_id)
    assert row is not None
    assert (row.state, row.text, row.finish_reason) == (JobState.SUCCEEDED, "hello", "stop")
    assert (row.response, row.error, row.model) == ({"id": "r"}, None, "tiny")
    assert (row.metrics, row.attempts, row.worker_id) == (metrics, 1, worker_id)
    assert row.started_at is not None
    assert row.finished_at is not None
    assert row.created_at <= row.started_at <= row.finished_at


def test_times_the_worker_does_not_know_are_measured_by_the_database(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1)])
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [failure_of(job)])
    row = store.job(job.job_id)
    assert row is not None
    assert row.metrics.queue_ms is not None
    assert row.metrics.e2e_ms is not None
    assert 0 <= row.metrics.queue_ms <= row.metrics.e2e_ms < 60_000


def test_finishing_twice_gives_one_result(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1), new_job(2)])
    first, second = claim_all(store, worker_id)
    assert store.finish(worker_id, [outcome_of(first)]).accepted == {first.seq}
    report = store.finish(worker_id, [outcome_of(first, text="other"), outcome_of(second), failure_of(second)])
    assert (report.accepted, report.fenced) == ({second.seq}, {first.seq})
    rows = [store.job(job.job_id) for job in (first, second)]
    assert [row.text for row in rows if row] == ["row-1", "row-2"]
    assert store.check_integrity() == []


def test_a_stale_workers_finish_is_fenced(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1)])
    (stale,) = claim_all(store, worker_id)
    store.bury_worker(worker_id)
    store.reap(lease_s=60)
    assert store.finish(worker_id, [outcome_of(stale)]).fenced == {stale.seq}
    other = new_worker(store)
    (fresh,) = claim_all(store, other)
    assert (fresh.attempt, fresh.crashes) == (2, 1)
    assert store.finish(worker_id, [outcome_of(stale, text="stale")]).fenced == {stale.seq}
    assert store.finish(other, [outcome_of(fresh, text="fresh")]).accepted == {fresh.seq}
    row = store.job(fresh.job_id)
    assert row is not None
    assert (row.text, row.attempts, row.worker_id) == ("fresh", 2, other)


def test_the_fence_is_the_claim_and_the_attempt_as_well_as_the_owner(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1)])
    (job,) = claim_all(store, worker_id)
    for attempt in (0, 2):
        assert store.finish(worker_id, [outcome_of(job, attempt=attempt)]).fenced == {job.seq}
        assert store.finish(worker_id, [outcome_of(job, claim_id=job.claim_id + attempt - 1)]).fenced == {job.seq}
    assert store.finish(new_worker(store), [outcome_of(job)]).fenced == {job.seq}
    assert store.finish(worker_id, [outcome_of(job, attempt=2), outcome_of(job)]).accepted == {job.seq}


def test_a_job_nobody_knows_is_fenced_and_nothing_to_finish_is_fine(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1)])
    (job,) = claim_all(store, worker_id)
    assert store.finish(worker_id, [outcome_of(job, seq=job.seq + 999)]).fenced == {job.seq + 999}
    assert store.finish(worker_id, []).accepted == frozenset()


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.DEAD])
def test_a_job_that_did_not_succeed_always_has_an_error(store: Store, worker_id: str, state: JobState) -> None:
    store.insert_jobs([new_job(1)])
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job, state=state, response=None, text="partial")])
    row = store.job(job.job_id)
    assert row is not None
    assert row.state is state
    assert row.error is not None
    assert row.error.code == state.value
    assert row.text == "partial"


# Cancel, expire, retry


def test_cancelling_ends_waiting_jobs_at_once_and_asks_for_the_running_ones(store: Store, worker_id: str) -> None:
    batch_id = new_batch(store, [new_job(number) for number in range(1, 6)])
    seqs = [job.seq for job in store.peek("kvq", limit=10)]
    running, finished = store.claim(worker_id, seqs[:2])
    store.finish(worker_id, [outcome_of(finished)])
    assert store.cancel_batch(batch_id) == 4
    assert store.cancel_requests(worker_id) == [(running.seq, running.job_id)]
    progress = store.batch_progress(batch_id)
    assert (progress.succeeded, progress.running, progress.cancelled, progress.queued) == (1, 1, 3, 0)
    assert store.cancel_batch(batch_id) == 0
    row = store.job(running.job_id)
    assert row is not None
    assert row.state is JobState.RUNNING
    store.finish(worker_id, [outcome_of(running, state=JobState.CANCELLED)])
    assert store.cancel_requests(worker_id) == []
    assert store.batch_progress(batch_id).finished
    assert store.check_integrity() == []


def test_cancelling_says_why_and_counts_a_large_batch(store: Store) -> None:
    jobs = [new_job(number) for number in range(1, 2_304)]
    batch_id = new_batch(store, jobs)
    assert store.cancel_batch(batch_id) == 2_303
    row = store.job(jobs[-1].job_id)
    assert row is not None
    assert row.error is not None
    assert row.error.code == "cancelled"
    assert store.check_integrity() == []


def test_cancelling_by_id_touches_only_those(store: Store) -> None:
    jobs = [new_job(number) for number in range(1, 4)]
    store.insert_jobs(jobs)
    assert store.cancel_jobs([jobs[1].job_id, "nobody"]) == 1
    assert [state_of(store, job.job_id) for job in jobs] == [JobState.QUEUED, JobState.CANCELLED, JobState.QUEUED]


def test_a_waiting_job_past_its_deadline_expires(store: Store, worker_id: str, sql: Sql) -> None:
    late, running = new_job(1, deadline=LONG_AGO), new_job(2, deadline=FAR_AHEAD)
    store.insert_jobs([late, running, new_job(3, deadline=FAR_AHEAD), new_job(4)])
    store.claim(worker_id, [job.seq for job in store.peek("kvq", limit=1)])
    sql("UPDATE jobs SET deadline = :t WHERE job_id = :id", t="2020-01-01 00:00:00.000", id=running.job_id)
    assert store.expire_due() == 1
    assert store.expire_due() == 0
    assert state_of(store, late.job_id) is JobState.EXPIRED
    assert state_of(store, running.job_id) is JobState.RUNNING
    assert store.check_integrity() == []


def test_a_retried_job_starts_over_with_its_crashes_forgiven(store: Store, worker_id: str, sql: Sql) -> None:
    batch_id = new_batch(store, [new_job(number) for number in (1, 2, 3)])
    failed, succeeded, cancelled = claim_all(store, worker_id)
    store.finish(worker_id, [failure_of(failed), outcome_of(succeeded)])
    store.finish(worker_id, [outcome_of(cancelled, state=JobState.CANCELLED)])
    sql("UPDATE jobs SET crashes = 2 WHERE seq = :seq", seq=failed.seq)
    assert store.retry_batch(batch_id) == 1
    (again,) = claim_all(store, worker_id)
    assert (again.seq, again.attempt, again.crashes) == (failed.seq, 2, 0)
    assert store.finish(worker_id, [outcome_of(failed)]).fenced == {failed.seq}
    assert store.finish(worker_id, [outcome_of(again)]).accepted == {failed.seq}
    assert store.retry_jobs([succeeded.job_id, cancelled.job_id]) == 1
    assert state_of(store, cancelled.job_id) is JobState.QUEUED
    assert state_of(store, succeeded.job_id) is JobState.SUCCEEDED
    assert store.check_integrity() == []
