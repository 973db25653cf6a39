"""Dedup keys: a row that repeats one refers to the job that has it, and gets its answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvq.worker.errors import RowError
from kvq.worker.jobs import ClaimedJob, JobState
from kvq.worker.lines import MAX_DEDUP_KEY_LENGTH, read_line
from kvq.worker.store import Store
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of

Rows = Callable[[], list[tuple[Any, ...]]]


@pytest.fixture
def rows(sql: Callable[..., list[Any]]) -> Rows:
    """(custom id, state, custom id of the job referred to, held) in order of arrival."""

    def read() -> list[tuple[Any, ...]]:
        found = sql("""
        SELECT j.custom_id, j.state, o.custom_id, j.held FROM jobs j LEFT JOIN jobs o ON o.seq = j.same_as
        ORDER BY j.seq""")
        return [(*row[:3], bool(row[3])) for row in found]

    return read


def keyed(number: int, key: str | None = "k", **changes: Any) -> Any:
    return new_job(number, dedup_key=key, **changes)


def only_job(store: Store, worker_id: str) -> ClaimedJob:
    (job,) = claim_all(store, worker_id)
    return job


def test_rows_with_a_known_key_are_held_until_the_first_ends_then_refer_to_its_answer(store: Store, rows: Rows) -> None:
    new_batch(store, [keyed(1), keyed(2), keyed(3, "other")])
    store.insert_jobs([keyed(4)])
    assert [(name, of, held) for name, _, of, held in rows()] == [
        ("row-1", None, False),
        ("row-2", "row-1", True),
        ("row-3", None, False),
        ("row-4", "row-1", True),
    ]
    worker_id = new_worker(store)
    jobs = {job.custom_id: job for job in claim_all(store, worker_id)}
    assert jobs.keys() == {"row-1", "row-3"}
    store.finish(worker_id, [outcome_of(jobs["row-1"])])
    freed = store.peek("kvq", limit=10)
    assert {job.same_as for job in freed} == {jobs["row-1"].seq}
    assert store.answers_by_seq([jobs["row-1"].seq])[jobs["row-1"].seq].text == "row-1"
    store.insert_jobs([keyed(5)])
    assert rows()[-1] == ("row-5", "queued", "row-1", False)


def test_when_the_first_does_not_succeed_the_next_is_run_and_the_others_wait_for_it(store: Store, rows: Rows) -> None:
    store.insert_jobs([keyed(number) for number in (1, 2, 3)])
    worker_id = new_worker(store)
    store.finish(worker_id, [failure_of(only_job(store, worker_id))])
    assert rows()[1:] == [("row-2", "queued", None, False), ("row-3", "queued", "row-2", True)]
    second = only_job(store, worker_id)
    assert second.custom_id == "row-2"
    store.cancel_jobs([second.job_id])
    store.release(worker_id)
    assert rows()[1:] == [("row-2", "cancelled", None, False), ("row-3", "queued", None, False)]
    assert only_job(store, worker_id).custom_id == "row-3"
    assert store.check_integrity() == []


def test_a_key_counts_for_its_period_queue_and_endpoint_only(
    store: Store, rows: Rows, sql: Callable[..., list[Any]]
) -> None:
    store.insert_jobs([keyed(1), keyed(2, queue="other"), keyed(3, endpoint="/v1/completions")][:2])
    assert [of for _, _, of, _ in rows()] == [None, None]
    store.insert_jobs([keyed(4)], dedup_period_s=-60.0)  # all there is was submitted before that
    assert rows()[-1] == ("row-4", "queued", None, False)


def test_a_held_row_can_be_cancelled_and_one_retried_is_not_held(store: Store, rows: Rows) -> None:
    jobs = [keyed(1), keyed(2)]
    store.insert_jobs(jobs)
    assert store.cancel_jobs([jobs[1].job_id]) == 1
    assert store.retry_jobs([jobs[1].job_id]) == 1
    assert rows()[1] == ("row-2", "queued", "row-1", False)


def test_withdrawing_the_batch_of_the_first_lets_the_others_run(store: Store, rows: Rows) -> None:
    batch_id = new_batch(store, [keyed(1)])
    new_batch(store, [keyed(2), keyed(3)])
    store.withdraw_batch(batch_id)
    assert rows() == [("row-2", "queued", None, False), ("row-3", "queued", "row-2", True)]


def test_of_many_that_bring_the_same_new_key_at_once_one_is_run(store: Store, rows: Rows) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.insert_jobs([keyed(number)]), range(16)))
    assert [held for *_, held in rows()].count(False) == 1


def test_a_first_that_ends_while_a_second_comes_in_leaves_nothing_held(store: Store, rows: Rows) -> None:
    worker_id = new_worker(store)
    for number in range(12):
        key = f"key-{number}"
        store.insert_jobs([keyed(1, key)])
        (job,) = claim_all(store, worker_id)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(store.finish, worker_id, [outcome_of(job)])
            pool.submit(store.insert_jobs, [keyed(2, key)])
        for waiting in claim_all(store, worker_id):
            assert waiting.custom_id == "row-2"
            store.finish(worker_id, [outcome_of(waiting)])
    assert all(state == JobState.SUCCEEDED and not held for _, state, _, held in rows())


def test_lines_bring_dedup_keys_in_either_form() -> None:
    long_form = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"},"dedup_key":"k"}'
    for raw in (long_form, b'{"prompt":"x","dedup_key":"k"}'):
        line = read_line(1, raw)
        assert (line.dedup_key, line.body, line.error) == ("k", {"prompt": "x"}, None)
    for value in ("5", '""', '"' + "k" * (MAX_DEDUP_KEY_LENGTH + 1) + '"'):
        error = read_line(1, b'{"prompt":"x","dedup_key":' + value.encode() + b"}").error
        assert isinstance(error, RowError)
        assert "dedup_key" in error.message
