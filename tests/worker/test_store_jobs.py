"""Jobs in the store, on both databases, until they end: inserted, looked at, claimed, given back."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from kvq.worker.errors import LeaseLost
from kvq.worker.jobs import Endpoint, JobError, JobMetrics, JobState
from kvq.worker.store import InsertReport, Store
from tests.factories import FAR_AHEAD, LONG_AGO, claim_all, new_batch, new_job, new_worker, outcome_of, state_of

Sql = Callable[..., list[Any]]


# Insert


def test_inserting_a_job_again_changes_nothing(store: Store) -> None:
    jobs = [new_job(number) for number in range(1, 4)]
    store.create_batch(batch_id="b")
    assert store.insert_jobs(jobs, batch_id="b") == InsertReport(inserted=3, existing=0)
    changed = new_job(9, job_id=jobs[0].job_id, custom_id="other")
    assert store.insert_jobs([changed, new_job(4)], batch_id="b") == InsertReport(inserted=1, existing=1)
    row = store.job(jobs[0].job_id)
    assert row is not None
    assert row.custom_id == "row-1"
    assert store.check_integrity() == []


def test_an_insert_that_broke_off_is_completed_by_repeating_it(store: Store) -> None:
    jobs = [new_job(number) for number in range(1, 7)]

    def breaking() -> Any:
        yield from jobs[:3]
        raise OSError("the file went away")

    with pytest.raises(OSError, match="went away"):
        store.insert_jobs(breaking())
    assert store.insert_jobs(jobs).inserted == 6
    assert [job.job_id for job in store.peek("kvq", limit=10)] == [job.job_id for job in jobs]


def test_the_same_id_twice_in_one_insert_is_one_job(store: Store) -> None:
    first = new_job(1)
    assert store.insert_jobs([first, new_job(2, job_id=first.job_id)]) == InsertReport(inserted=1, existing=1)
    row = store.job(first.job_id)
    assert row is not None
    assert row.custom_id == "row-1"


def test_more_jobs_than_a_chunk_keep_their_order(store: Store) -> None:
    jobs = [new_job(number) for number in range(1, 5_012)]
    assert store.insert_jobs(iter(jobs)).inserted == len(jobs)
    assert [job.job_id for job in store.peek("kvq", limit=10_000)] == [job.job_id for job in jobs]


def test_creating_a_batch_again_keeps_the_first(store: Store) -> None:
    store.create_batch(batch_id="b", name="first", source="a.jsonl", metadata={"team": "x"})
    store.create_batch(batch_id="b", name="second")
    assert store.batch_progress("b").name == "first"


def test_a_job_refused_at_submission_is_a_failed_row_with_its_reason(store: Store) -> None:
    bad = new_job(2, error=JobError(code="invalid_json", message="line 2 is not JSON"), body={})
    batch_id = new_batch(store, [new_job(1), bad, new_job(3)])
    row = store.job(bad.job_id)
    assert row is not None
    assert (row.state, row.error, row.attempts) == (JobState.FAILED, bad.error, 0)
    assert len(store.peek("kvq", limit=10)) == 2
    assert store.batch_progress(batch_id).failed == 1
    assert store.check_integrity() == []


def test_intake_says_which_messages_were_new(store: Store) -> None:
    known, fresh = new_job(1, celery={"reply_to": "x"}), new_job(2, celery={"reply_to": "y"})
    assert store.intake_jobs([known]) == [known.job_id]
    assert store.intake_jobs([known, fresh]) == [fresh.job_id]
    assert store.intake_jobs([]) == []


AWKWARD = "nul \x00 lone \ud800 astral \U0001f600 quote ' \" back \\ tab \t line \n percent %s :colon {brace}"


def test_awkward_text_survives_and_never_spoils_its_neighbours(store: Store, worker_id: str) -> None:
    body = {"messages": [{"role": "user", "content": AWKWARD}], "temperature": 0.1 + 0.2, "seed": 2**63 - 1}
    store.insert_jobs([new_job(1), new_job(2, body=body, custom_id=AWKWARD, model=AWKWARD), new_job(3)])
    jobs = claim_all(store, worker_id)
    assert jobs[1].body == body
    shown = AWKWARD.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert jobs[1].custom_id == shown
    metrics = JobMetrics(ttft_ms=math.nan, tpot_ms=math.inf, seed=2**63 - 1)
    awkward = outcome_of(
        jobs[1], text=AWKWARD, response={"text": AWKWARD, "logprob": -math.inf}, metrics=metrics, model=AWKWARD
    )
    report = store.finish(worker_id, [outcome_of(jobs[0]), awkward, outcome_of(jobs[2])])
    assert len(report.accepted) == 3
    row = store.job(jobs[1].job_id)
    assert row is not None
    assert row.text == shown
    assert row.response == {"text": AWKWARD, "logprob": None}
    assert (row.metrics.ttft_ms, row.metrics.tpot_ms, row.metrics.seed) == (None, None, 2**63 - 1)


# Peek


def test_peek_orders_by_priority_then_crashes_then_age(store: Store, sql: Sql) -> None:
    jobs = [new_job(number, priority=priority) for number, priority in enumerate([5, 0, -3, 0], start=1)]
    store.insert_jobs(jobs)
    sql("UPDATE jobs SET crashes = 1 WHERE job_id = :id", id=jobs[1].job_id)
    assert [job.job_id for job in store.peek("kvq", limit=10)] == [jobs[i].job_id for i in (2, 3, 1, 0)]
    assert [job.job_id for job in store.peek("kvq", limit=2)] == [jobs[i].job_id for i in (2, 3)]


def test_peek_leaves_out_what_it_is_told_to_and_reserves_nothing(store: Store) -> None:
    store.insert_jobs([new_job(number) for number in range(1, 6)])
    first = store.peek("kvq", limit=2)
    rest = store.peek("kvq", limit=10, exclude_seqs={job.seq for job in first})
    assert len(rest) == 3
    assert store.peek("kvq", limit=2) == first


def test_peek_gives_what_the_planner_needs(store: Store) -> None:
    job = new_job(1, endpoint=Endpoint.COMPLETIONS, body={"prompt": [1, 2, 3]}, priority=4)
    store.insert_jobs([job])
    (seen,) = store.peek("kvq", limit=10)
    assert (seen.job_id, seen.endpoint, seen.body, seen.priority) == (job.job_id, job.endpoint, job.body, 4)
    assert abs(datetime.now(UTC) - seen.created_at) < timedelta(minutes=1)


def test_peek_sees_neither_other_queues_nor_what_is_not_due(store: Store) -> None:
    store.insert_jobs(
        [
            new_job(1, queue="other"),
            new_job(2, not_before=FAR_AHEAD),
            new_job(3, deadline=LONG_AGO),
            new_job(4, not_before=LONG_AGO, deadline=FAR_AHEAD),
        ]
    )
    assert [job.body["messages"][0]["content"] for job in store.peek("kvq", limit=10)] == ["question 4"]


def test_times_of_any_zone_mean_the_same_moment(store: Store) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    west, east = timezone(timedelta(hours=-11)), timezone(timedelta(hours=13))
    store.insert_jobs([new_job(1, not_before=soon.astimezone(west)), new_job(2, not_before=soon.astimezone(east))])
    assert store.peek("kvq", limit=10) == []
    past = soon - timedelta(hours=2)
    store.insert_jobs([new_job(3, not_before=past.astimezone(west)), new_job(4, not_before=past.astimezone(east))])
    assert len(store.peek("kvq", limit=10)) == 2


# Claim


def test_a_claim_takes_the_jobs_in_the_order_asked_for(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(number) for number in range(1, 6)])
    seqs = [job.seq for job in store.peek("kvq", limit=10)]
    wanted = [seqs[3], seqs[0], seqs[4], seqs[3]]
    claimed = store.claim(worker_id, wanted)
    assert [job.seq for job in claimed] == wanted[:3]
    assert {(job.attempt, job.crashes) for job in claimed} == {(1, 0)}
    assert all(job.queue_ms >= 0 for job in claimed)
    assert store.check_integrity() == []


def test_a_claimed_job_is_neither_seen_nor_claimed_by_others(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1)])
    (job,) = claim_all(store, worker_id)
    assert store.peek("kvq", limit=10) == []
    assert store.claim(new_worker(store), [job.seq]) == []
    assert store.claim(worker_id, [job.seq]) == []


def test_a_claim_checks_again_what_changed_since_the_peek(store: Store, worker_id: str, sql: Sql) -> None:
    jobs = [new_job(number) for number in range(1, 5)]
    store.insert_jobs(jobs)
    seqs = [job.seq for job in store.peek("kvq", limit=10)]
    store.cancel_jobs([jobs[0].job_id])
    sql("UPDATE jobs SET deadline = :t WHERE job_id = :id", t="2020-01-01 00:00:00.000", id=jobs[1].job_id)
    sql("UPDATE jobs SET not_before = :t WHERE job_id = :id", t="2100-01-01 00:00:00.000", id=jobs[2].job_id)
    assert [job.job_id for job in store.claim(worker_id, seqs)] == [jobs[3].job_id]


def test_a_claim_carries_all_that_running_the_job_needs(store: Store, worker_id: str) -> None:
    job = new_job(7, priority=3, deadline=FAR_AHEAD, celery={"reply_to": "q", "headers": {"a": [1]}})
    batch_id = new_batch(store, [job])
    (claimed,) = claim_all(store, worker_id)
    assert (claimed.job_id, claimed.batch_id, claimed.custom_id) == (job.job_id, batch_id, "row-7")
    assert (claimed.endpoint, claimed.body, claimed.priority) == (job.endpoint, job.body, 3)
    assert (claimed.celery, claimed.deadline) == (job.celery, FAR_AHEAD)


def test_a_paused_queue_gives_nothing_until_it_is_resumed(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1), new_job(2, queue="other")])
    (waiting,) = store.peek("kvq", limit=10)
    store.pause_queue("kvq")
    store.pause_queue("kvq")
    assert store.paused_queues() == ["kvq"]
    assert store.peek("kvq", limit=10) == []
    assert store.claim(worker_id, [waiting.seq]) == []
    assert len(store.peek("other", limit=10)) == 1
    store.resume_queue("kvq")
    assert store.paused_queues() == []
    assert len(store.claim(worker_id, [waiting.seq])) == 1


@pytest.mark.parametrize("end", ["never registered", "retired", "dead"])
def test_only_a_live_worker_claims(store: Store, end: str) -> None:
    store.insert_jobs([new_job(1)])
    (waiting,) = store.peek("kvq", limit=10)
    worker_id = "stranger" if end == "never registered" else new_worker(store)
    if end == "retired":
        store.retire_worker(worker_id)
    if end == "dead":
        store.bury_worker(worker_id)
    with pytest.raises(LeaseLost, match="holds no lease"):
        store.claim(worker_id, [waiting.seq])
    assert len(store.peek("kvq", limit=10)) == 1
    assert store.claim(worker_id, []) == []


# Release


def test_a_released_job_is_queued_again_and_not_charged(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(number) for number in range(1, 4)])
    jobs = claim_all(store, worker_id)
    assert store.release(worker_id, [jobs[0].seq]) == 1
    assert store.release(worker_id, [jobs[0].seq]) == 0
    assert [job.seq for job in store.peek("kvq", limit=10)] == [jobs[0].seq]
    (again,) = claim_all(store, worker_id)
    assert (again.attempt, again.crashes) == (1, 0)
    assert store.release(worker_id) == 3
    assert store.check_integrity() == []


def test_a_result_of_a_claim_that_was_given_back_is_refused_though_the_same_worker_claimed_again(
    store: Store, worker_id: str
) -> None:
    store.insert_jobs([new_job(1)])
    (first,) = claim_all(store, worker_id)
    store.release(worker_id)
    (second,) = claim_all(store, worker_id)
    assert (second.attempt, second.claim_id) != (first.attempt, first.claim_id)
    report = store.finish(worker_id, [outcome_of(first, text="stale"), outcome_of(second, text="fresh")])
    assert report.accepted == {second.seq}
    row = store.job(second.job_id)
    assert row is not None
    assert (row.text, row.attempts) == ("fresh", 1)
    assert store.finish(worker_id, [outcome_of(first, text="stale")]).accepted == frozenset()
    assert store.check_integrity() == []


def test_a_worker_releases_only_what_it_holds(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1)])
    (job,) = claim_all(store, worker_id)
    assert store.release(new_worker(store), [job.seq]) == 0
    assert store.release(worker_id, []) == 0
    assert state_of(store, job.job_id) is JobState.RUNNING


def test_a_released_job_that_was_to_be_cancelled_is_cancelled(store: Store, worker_id: str) -> None:
    store.insert_jobs([new_job(1), new_job(2)])
    first, second = claim_all(store, worker_id)
    store.cancel_jobs([first.job_id])
    assert store.release(worker_id) == 2
    assert state_of(store, first.job_id) is JobState.CANCELLED
    assert state_of(store, second.job_id) is JobState.QUEUED
    assert store.check_integrity() == []
