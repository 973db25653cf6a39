"""What has ended can be run again, given up or pruned; what has not is never touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvq.worker.bodies import changed_body
from kvq.worker.errors import RowError
from kvq.worker.filters import parse_filter
from kvq.worker.jobs import Endpoint, JobState
from kvq.worker.store import Store
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of

Sql = Callable[..., list[Any]]
FAILED = (JobState.FAILED,)


def fail_all(store: Store, codes: list[str], batch_id: str | None = None) -> str:
    """A batch whose rows have failed with ``codes``."""
    batch_id = batch_id or new_batch(store, [new_job(i) for i in range(1, len(codes) + 1)])
    worker_id = new_worker(store)
    store.finish(worker_id, [failure_of(job, codes[i]) for i, job in enumerate(claim_all(store, worker_id))])
    return batch_id


def kill_worker_three_times(store: Store) -> None:
    for _ in range(3):
        worker_id = new_worker(store)
        claim_all(store, worker_id)
        store.bury_worker(worker_id)
        store.reap(lease_s=60)


@pytest.mark.parametrize(
    ("where", "lines"),
    [
        ("error_code = odd", {1, 3, 5}),
        ("error_code != odd", {2, 4}),
        ("error_code = odd and line_no > 1", {3, 5}),
        ("custom_id like 'row-%' and line_no <= 2", {1, 2}),
        ("model != x", {1, 2, 3, 4, 5}),
        ("error_message like \"%' OR '1'='1%\"", set()),
    ],
)
def test_only_rows_that_meet_the_conditions_are_retried(store: Store, where: str, lines: set[int]) -> None:
    batch_id = fail_all(store, ["odd", "even", "odd", "even", "odd"])
    other = new_batch(store, [new_job(1)])
    number = store.retry_where(batch_id=batch_id, states=FAILED, where=parse_filter(where))
    queued = {row.line_no for row in store.iter_results(batch_id, states=[JobState.QUEUED])}
    assert (number, queued) == (len(lines), lines)
    assert store.batch_progress(other).queued == 1
    assert store.check_integrity() == []


def test_a_retry_may_change_bodies_all_of_them_or_none(store: Store) -> None:
    jobs = [new_job(1), replace(new_job(2), endpoint=Endpoint.COMPLETIONS, body={"prompt": "x", "max_tokens": 3})]
    batch_id = fail_all(store, ["bad", "bad"], new_batch(store, jobs))

    def with_top_logprobs(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
        return changed_body(endpoint, body, {"logprobs": True, "top_logprobs": 2})

    with pytest.raises(RowError, match="is not a field of /v1/completions"):
        store.retry_where(batch_id=batch_id, states=FAILED, rewrite=with_top_logprobs)
    assert store.batch_progress(batch_id).failed == 2

    def longer(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
        return changed_body(endpoint, body, {"max_tokens": 200})

    assert store.retry_where(batch_id=batch_id, states=FAILED, rewrite=longer) == 2
    assert [job.body["max_tokens"] for job in store.peek("kvq", limit=5)] == [200, 200]


def test_null_removes_a_field_and_max_tokens_replaces_its_newer_name() -> None:
    body = {"prompt": "x", "seed": 3, "max_completion_tokens": 5}
    changed = changed_body(Endpoint.COMPLETIONS, body, {"seed": None, "max_tokens": 9})
    assert changed == {"prompt": "x", "max_tokens": 9}


def test_dead_letters_are_listed_retried_and_dropped(store: Store, sql: Sql) -> None:
    batch_id = new_batch(store, [new_job(i) for i in range(1, 4)])
    kill_worker_three_times(store)
    letters = store.dead_letters(batch_id=batch_id)
    assert [(letter.line_no, letter.crashes, letter.error_code) for letter in letters] == [
        (line, 3, "worker_lost") for line in (3, 2, 1)
    ]
    one = parse_filter("line_no = 1")
    assert store.retry_where(batch_id=None, states=[JobState.DEAD], where=one) == 1
    assert store.drop_dead(where=parse_filter("line_no = 2")) == 1
    assert store.drop_dead(where=one) == 0, "it is no dead letter any more"
    assert [row.line_no for row in store.iter_results(batch_id)] == [1, 3]
    assert sql("SELECT count(*) FROM job_payloads") == [(2,)]
    assert store.check_integrity() == []


def test_pruning_deletes_what_ended_long_ago_and_nothing_else(store: Store, sql: Sql) -> None:
    old = fail_all(store, ["x"] * 3)
    fail_all(store, ["x"], new_batch(store, []))  # nothing waits: an empty batch stays empty
    store.intake_jobs([new_job(1, job_id="loose"), new_job(2, job_id="untold", celery={"headers": {}})])
    fail_all(store, ["x", "x"], old)
    half = new_batch(store, [new_job(1, queue="other"), new_job(2, queue="other")])
    worker_id = new_worker(store)
    first = store.claim(worker_id, [store.peek("other", limit=1)[0].seq])
    store.finish(worker_id, [outcome_of(job) for job in first])
    store.retire_worker(worker_id)
    sql("UPDATE results SET finished_at = '2020-01-01 00:00:00.000'")
    sql("UPDATE batches SET created_at = '2020-01-01 00:00:00.000'")
    recent = fail_all(store, ["x"], new_batch(store, [new_job(9)], name="recent"))
    would = store.prune(older_than_s=3600, dry_run=True)
    did = store.prune(older_than_s=3600)
    assert (would.batches, would.jobs) == (did.batches, did.jobs) == (2, 4)
    left = {batch.batch_id for batch in store.list_batches()}
    assert left == {half, recent}
    assert store.batch_progress(half).total == 2, "a batch that is not finished stays whole"
    assert store.job("loose") is None
    assert store.job("untold") is not None
    assert store.check_integrity() == []


def test_counting_the_queue_stops_at_the_bound(store: Store) -> None:
    new_batch(store, [new_job(i) for i in range(10)])
    assert store.num_queued("kvq", at_most=4) == 4
    assert store.num_queued("kvq", at_most=40) == 10
    assert store.num_queued("other", at_most=4) == 0
