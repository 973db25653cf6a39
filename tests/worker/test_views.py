"""The views people query: the same rows and columns on both databases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvq.worker.jobs import JobError, JobMetrics
from kvq.worker.store import Store
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of

Sql = Callable[..., list[Any]]


@pytest.fixture
def worker_id(store: Store) -> str:
    return new_worker(store, worker_id="w1", hostname="gpu-1")


def finish_with(store: Store, worker_id: str, metrics: list[JobMetrics], *, model: str = "tiny") -> str:
    """A batch of jobs that succeeded with these metrics."""
    batch_id = new_batch(store, [new_job(number) for number in range(1, len(metrics) + 1)])
    jobs = claim_all(store, worker_id)
    pairs = zip(jobs, metrics, strict=True)
    store.finish(worker_id, [outcome_of(job, metrics=cost, model=model) for job, cost in pairs])
    return batch_id


def test_job_results_shows_every_job_finished_or_not(store: Store, worker_id: str, sql: Sql) -> None:
    bad = new_job(1, error=JobError(code="invalid_json", message="line 1"))
    batch_id = new_batch(store, [bad, *(new_job(number, model="asked") for number in range(2, 5))])
    succeeded, _running = store.claim(worker_id, [job.seq for job in store.peek("kvq", limit=2)])
    metrics = JobMetrics(
        prompt_tokens=10, cached_tokens=4, completion_tokens=5, ttft_ms=1.5, tpot_ms=2.5, preemptions=1, seed=7
    )
    store.finish(worker_id, [outcome_of(succeeded, text="yes", metrics=metrics)])
    rows = sql("SELECT * FROM job_results WHERE batch_id = :b ORDER BY line_no", b=batch_id)
    failed, done, running, queued = (row._mapping for row in rows)
    assert (failed["state"], failed["error_code"], failed["error_message"]) == ("failed", "invalid_json", "line 1")
    assert (failed["attempts"], failed["started_at"], failed["worker_id"]) == (0, None, None)
    assert (done["state"], done["finish_reason"], done["text"], done["model"]) == ("succeeded", "stop", "yes", "tiny")
    assert (done["prompt_tokens"], done["cached_tokens"], done["completion_tokens"]) == (10, 4, 5)
    assert (done["ttft_ms"], done["tpot_ms"], done["preemptions"], done["seed"]) == (1.5, 2.5, 1, 7)
    assert (done["attempts"], done["worker_id"], done["custom_id"]) == (1, "w1", "row-2")
    assert done["created_at"] <= done["started_at"] <= done["finished_at"]
    assert done["queue_ms"] <= done["e2e_ms"]
    assert (running["state"], running["worker_id"], running["model"]) == ("running", "w1", "asked")
    assert (running["text"], running["finished_at"], running["prompt_tokens"]) == (None, None, None)
    assert (queued["state"], queued["worker_id"], queued["started_at"]) == ("queued", None, None)


def test_percentiles_are_the_nearest_rank_at_any_number_of_jobs(store: Store, worker_id: str, sql: Sql) -> None:
    for count in (1, 2, 3, 19, 20, 21, 100, 101):
        values = [float(10 * place) for place in range(1, count + 1)]
        batch_id = finish_with(store, worker_id, [JobMetrics(ttft_ms=value) for value in reversed(values)])
        (row,) = sql("SELECT * FROM latency_percentiles WHERE batch_id = :b AND measure = 'ttft'", b=batch_id)
        for percent in (50, 90, 95, 99):
            place = -(-count * percent // 100)  # the smallest rank with at least that share at or below it
            assert row._mapping[f"p{percent}_ms"] == values[place - 1], (count, percent)
        assert (row.num_jobs, row.max_ms) == (count, values[-1])
        assert row.mean_ms == pytest.approx(sum(values) / count)


def test_percentiles_leave_out_failures_and_jobs_without_the_measure(store: Store, worker_id: str, sql: Sql) -> None:
    batch_id = new_batch(store, [new_job(number) for number in (1, 2, 3)])
    first, second, third = claim_all(store, worker_id)
    store.finish(
        worker_id,
        [
            outcome_of(first, metrics=JobMetrics(ttft_ms=5.0, tpot_ms=None)),
            outcome_of(second, metrics=JobMetrics(ttft_ms=7.0, tpot_ms=2.0)),
            failure_of(third),
        ],
    )
    rows = sql("SELECT measure, num_jobs, p50_ms FROM latency_percentiles WHERE batch_id = :b", b=batch_id)
    found = {row.measure: (row.num_jobs, row.p50_ms) for row in rows}
    assert (found["ttft"], found["tpot"]) == ((2, 5.0), (1, 2.0))
    assert found["queue"][0] == found["e2e"][0] == 2


def test_prefix_savings_are_tokens_reused_of_tokens_asked_for(store: Store, worker_id: str, sql: Sql) -> None:
    metrics = JobMetrics(prompt_tokens=100, cached_tokens=75, computed_tokens=25)
    batch_id = finish_with(store, worker_id, [metrics, metrics])
    (row,) = sql("SELECT * FROM prefix_savings WHERE batch_id = :b", b=batch_id)
    assert (row.num_jobs, row.prompt_tokens, row.cached_tokens, row.computed_tokens) == (2, 200, 150, 50)
    assert row.cached_share == 0.75
    empty = finish_with(store, worker_id, [JobMetrics()])
    assert sql("SELECT cached_share FROM prefix_savings WHERE batch_id = :b", b=empty)[0][0] is None


def test_the_share_of_right_guesses_is_shown_per_job_batch_and_worker(store: Store, worker_id: str, sql: Sql) -> None:
    metrics = [JobMetrics(num_draft_tokens=8, num_accepted_tokens=6), JobMetrics(num_draft_tokens=2), JobMetrics()]
    batch_id = finish_with(store, worker_id, metrics)
    store.record_stats(worker_id, {"num_draft_tokens": 40, "num_accepted_tokens": 10})
    shown = "num_draft_tokens, num_accepted_tokens, acceptance"
    rows = sql(f"SELECT {shown} FROM job_results WHERE batch_id = :b ORDER BY line_no", b=batch_id)
    assert [tuple(row) for row in rows] == [(8, 6, 0.75), (2, 0, 0.0), (None, None, None)]
    assert tuple(*sql(f"SELECT {shown} FROM batch_progress WHERE batch_id = :b", b=batch_id)) == (10, 6, 0.6)
    assert tuple(*sql(f"SELECT {shown} FROM worker_health")) == (40, 10, 0.25)
    without = store.batch_progress(finish_with(store, worker_id, [JobMetrics()]))
    assert (without.num_draft_tokens, without.num_accepted_tokens, without.acceptance) == (0, 0, None)


def test_throughput_is_added_up_by_minute_worker_and_model(store: Store, worker_id: str, sql: Sql) -> None:
    finish_with(store, worker_id, [JobMetrics(completion_tokens=60, prompt_tokens=7)] * 3)
    sql("UPDATE results SET finished_at = '2026-01-02 03:04:05.678' WHERE seq = 1")
    sql("UPDATE results SET finished_at = '2026-01-02 03:04:59.999' WHERE seq = 2")
    sql("UPDATE results SET finished_at = '2026-01-02 03:05:00.000' WHERE seq = 3")
    rows = sql(
        "SELECT CAST(minute AS text) AS minute, worker_id, model, num_jobs, prompt_tokens, completion_tokens,"
        " completion_tokens_per_s FROM throughput_by_minute ORDER BY minute"
    )
    assert [row.minute[:16] for row in rows] == ["2026-01-02 03:04", "2026-01-02 03:05"]
    assert [(row.worker_id, row.model, row.num_jobs) for row in rows] == [("w1", "tiny", 2), ("w1", "tiny", 1)]
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(14, 120), (7, 60)]
    assert [float(row.completion_tokens_per_s) for row in rows] == [2.0, 1.0]


def test_errors_are_counted_with_an_example_and_the_first_line(store: Store, worker_id: str, sql: Sql) -> None:
    batch_id = new_batch(store, [new_job(number) for number in range(5, 9)])
    jobs = claim_all(store, worker_id)
    store.finish(worker_id, [failure_of(jobs[1], "a"), failure_of(jobs[2], "a"), failure_of(jobs[3], "b")])
    rows = sql("SELECT * FROM error_top WHERE batch_id = :b ORDER BY num_jobs DESC", b=batch_id)
    assert [(row.error_code, row.num_jobs, row.first_line_no) for row in rows] == [("a", 2, 6), ("b", 1, 8)]
    assert rows[0].example_message == "a in a test"


def test_the_example_of_an_error_is_that_of_its_first_line(store: Store, worker_id: str, sql: Sql) -> None:
    batch_id = new_batch(store, [new_job(number) for number in range(5, 8)])
    messages = {5: "the longest", 6: "a text that sorts first", 7: "b"}
    jobs = claim_all(store, worker_id)
    pairs = zip(jobs, messages.values(), strict=True)
    failures = [
        replace(failure_of(job, "a"), error=JobError(code="a", message=message)) for job, message in reversed([*pairs])
    ]
    store.finish(worker_id, failures)
    (row,) = sql("SELECT * FROM error_top WHERE batch_id = :b", b=batch_id)
    assert (row.num_jobs, row.first_line_no, row.example_message) == (3, 5, "the longest")
    (error,) = store.errors_top(batch_id)
    assert (error.first_line_no, error.example) == (5, "the longest")


def test_job_summary_shows_each_queue_and_how_old_its_backlog_is(store: Store, worker_id: str, sql: Sql) -> None:
    store.insert_jobs([new_job(1), new_job(2), new_job(3, queue="night")])
    store.finish(worker_id, [outcome_of(job) for job in claim_all(store, worker_id)[:1]])
    rows = sql("SELECT * FROM job_summary ORDER BY queue, state")
    assert [(row.queue, row.state, row.num_jobs) for row in rows] == [
        ("kvq", "running", 1),
        ("kvq", "succeeded", 1),
        ("night", "queued", 1),
    ]
    assert rows[1].prompt_tokens == 10
    assert all(-1 < row.oldest_age_s < 60 for row in rows)


def test_worker_health_shows_the_latest_sample_beside_the_lease(store: Store, worker_id: str, sql: Sql) -> None:
    silent = new_worker(store, worker_id="w2")
    store.bury_worker(silent)
    store.record_stats(worker_id, {"prompt_tps": 1.0, "kv_usage": 0.1})
    store.record_stats(worker_id, {"prompt_tps": 2.0, "kv_usage": 0.2})
    store.insert_jobs([new_job(1), new_job(2)])
    claim_all(store, worker_id)
    first, second = sql("SELECT * FROM worker_health ORDER BY worker_id")
    assert (first.state, first.hostname, first.running_jobs) == ("live", "gpu-1", 2)
    assert (first.prompt_tps, first.kv_usage) == (2.0, 0.2)
    assert -1 < first.heartbeat_age_s < 60
    assert (second.state, second.running_jobs, second.prompt_tps) == ("dead", 0, None)
