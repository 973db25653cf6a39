"""The outbox: told at least once, by one worker at a time, with a pause after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvq.worker.jobs import JobError, JobState
from kvq.worker.store import Store
from tests.factories import claim_all, failure_of, new_job, new_worker, outcome_of

Sql = Callable[..., list[Any]]


@pytest.fixture
def make_due(sql: Sql) -> Callable[[], None]:
    """Lets every pause and hold run out."""
    return lambda: sql("UPDATE outbox SET next_at = '2020-01-01 00:00:00.000'") and None


def finished(store: Store, *, number: int = 1) -> tuple[str, str]:
    """A job that came by Celery and is finished: (worker id, job id)."""
    worker_id = new_worker(store)
    job = new_job(number, celery={"reply_to": "q", "id": number})
    store.insert_jobs([job])
    store.finish(worker_id, [outcome_of(claimed) for claimed in claim_all(store, worker_id)])
    return worker_id, job.job_id


def test_a_live_worker_may_leave_what_it_cannot_tell_to_others(store: Store) -> None:
    worker_id, job_id = finished(store)
    other_id, _ = finished(store, number=2)
    teller = new_worker(store)
    assert store.outbox_pending(10, worker_id=teller) == []
    assert store.outbox_leave(worker_id) == 1
    assert store.outbox_leave(worker_id) == 0
    assert [row.job_id for row in store.outbox_pending(10, worker_id=teller)] == [job_id]
    assert store.outbox_leave(other_id) == 1


def test_only_jobs_that_came_by_celery_are_announced(store: Store) -> None:
    worker_id = new_worker(store)
    store.insert_jobs([new_job(1), new_job(2, celery={"reply_to": "q"})])
    plain, announced = claim_all(store, worker_id)
    assert store.outbox_pending(10) == []
    store.finish(worker_id, [outcome_of(plain), outcome_of(announced)])
    (row,) = store.outbox_pending(10)
    assert (row.kind, row.job_id) == ("celery", announced.job_id)
    assert row.payload == {
        "celery": {"reply_to": "q"},
        "state": "succeeded",
        "attempt": 1,
        "response": {"id": announced.job_id, "choices": []},
        "error": None,
    }


def test_every_end_of_a_celery_job_is_announced_once_with_its_reason(store: Store, sql: Sql) -> None:
    worker_id = new_worker(store)
    jobs = [new_job(number, celery={"n": number}) for number in range(1, 6)]
    refused = new_job(6, celery={"n": 6}, error=JobError(code="invalid_json", message="no"))
    store.insert_jobs([*jobs, refused])
    seqs = [job.seq for job in store.peek("kvq", limit=10)]
    failed, _running = store.claim(worker_id, seqs[:2])
    store.finish(worker_id, [failure_of(failed)])
    store.finish(worker_id, [failure_of(failed)])
    store.cancel_jobs([jobs[2].job_id])
    sql("UPDATE jobs SET deadline = '2020-01-01 00:00:00.000' WHERE job_id = :id", id=jobs[3].job_id)
    store.expire_due()
    store.bury_worker(worker_id)
    store.reap(lease_s=60, max_crashes=1)
    told = {row.payload["celery"]["n"]: row.payload for row in store.outbox_pending(10)}
    assert {number: payload["error"]["code"] for number, payload in told.items()} == {
        1: "engine_error",
        2: "worker_lost",
        3: "cancelled",
        4: "expired",
        6: "invalid_json",
    }
    assert told[2]["state"] == JobState.DEAD
    assert store.check_integrity() == []


def test_a_row_taken_is_not_given_to_another_until_the_hold_runs_out(
    store: Store, make_due: Callable[[], None]
) -> None:
    finished(store)
    (row,) = store.outbox_pending(10)
    assert store.outbox_pending(10) == []
    make_due()
    assert store.outbox_pending(10) == [row]
    store.outbox_done([row.id])
    store.outbox_done([])
    make_due()
    assert store.outbox_pending(10) == []


def test_a_row_that_could_not_be_told_waits_longer_every_time(
    store: Store, sql: Sql, make_due: Callable[[], None], store_url: str
) -> None:
    finished(store)
    pauses = []
    for _ in range(3):
        make_due()
        (row,) = store.outbox_pending(10)
        store.outbox_failed(row.id, "redis is away \x00")
        assert store.outbox_pending(10) == []
        pause = "julianday(next_at) - julianday('now')" if store_url.startswith("sqlite") else "next_at - now()"
        pauses.append(sql(f"SELECT {pause} FROM outbox")[0][0])
    assert pauses == sorted(pauses)
    assert sql("SELECT tries, last_error FROM outbox") == [(3, "redis is away \ufffd")]
    store.outbox_failed(999_999, "nobody")


def test_rows_come_oldest_first_and_no_more_than_asked_for(store: Store) -> None:
    job_ids = [finished(store, number=number)[1] for number in (1, 2, 3)]
    assert [row.job_id for row in store.outbox_pending(2)] == job_ids[:2]
    assert [row.job_id for row in store.outbox_pending(2)] == job_ids[2:]


def test_a_worker_tells_its_own_and_those_of_workers_that_are_gone(store: Store) -> None:
    mine, my_job = finished(store, number=1)
    other, other_job = finished(store, number=2)
    cancelled = new_job(3, celery={})
    store.insert_jobs([cancelled])
    store.cancel_jobs([cancelled.job_id])
    assert [row.job_id for row in store.outbox_pending(10, worker_id=mine)] == [my_job, cancelled.job_id]
    store.bury_worker(other)
    assert [row.job_id for row in store.outbox_pending(10, worker_id=mine)] == [other_job]


@pytest.mark.parametrize("end", ["declared dead", "silent", "retired"])
def test_what_a_worker_held_when_it_ended_is_due_at_once(store: Store, end: str) -> None:
    ended, job_id = finished(store)
    other = new_worker(store)
    assert [row.job_id for row in store.outbox_pending(10, worker_id=ended)] == [job_id]
    assert store.outbox_pending(10, worker_id=other) == []
    if end == "declared dead":
        store.bury_worker(ended)
    elif end == "silent":
        store.reap(lease_s=-1.0)
    else:
        store.retire_worker(ended)
    assert [row.job_id for row in store.outbox_pending(10, worker_id=other)] == [job_id]


def test_a_job_told_by_other_means_is_forgotten_by_its_id(store: Store) -> None:
    _, first = finished(store, number=1)
    _, second = finished(store, number=2)
    store.outbox_done_for([first])
    store.outbox_done_for([])
    assert [row.job_id for row in store.outbox_pending(10)] == [second]


def test_retrying_a_job_takes_back_what_was_not_yet_told(store: Store) -> None:
    worker_id = new_worker(store)
    store.insert_jobs([new_job(1, celery={})])
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [failure_of(job)])
    store.retry_jobs([job.job_id])
    assert store.outbox_pending(10) == []
    assert store.check_integrity() == []
