"""What people read: progress, results in order, errors, summaries, names of batches."""

from __future__ import annotations

import pytest

from kvq.worker import store_reading
from kvq.worker.errors import UnknownBatch
from kvq.worker.jobs import JobError, JobMetrics, JobState
from kvq.worker.store import ErrorCount, Store
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of


def test_progress_counts_every_state_and_ends_with_a_time(store: Store) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(store, [new_job(number) for number in range(1, 5)], name="night run")
    progress = store.batch_progress(batch_id)
    assert (progress.total, progress.queued, progress.done, progress.finished) == (4, 4, 0, False)
    assert progress.finished_at is None
    jobs = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(jobs[0]), outcome_of(jobs[1]), failure_of(jobs[2])])
    progress = store.batch_progress(batch_id)
    assert (progress.succeeded, progress.failed, progress.running, progress.done) == (2, 1, 1, 3)
    assert (progress.prompt_tokens, progress.cached_tokens, progress.completion_tokens) == (20, 8, 10)
    store.finish(worker_id, [outcome_of(jobs[3])])
    progress = store.batch_progress(batch_id)
    assert progress.finished
    assert progress.finished_at is not None
    assert progress.finished_at >= progress.created_at
    assert progress.name == "night run"


def test_an_empty_batch_has_nothing_to_do(store: Store) -> None:
    progress = store.batch_progress(new_batch(store, []))
    assert (progress.total, progress.finished, progress.finished_at) == (0, True, None)


def test_batches_are_listed_newest_first(store: Store) -> None:
    batch_ids = [new_batch(store, [new_job(number)]) for number in range(1, 4)]
    listed = [progress.batch_id for progress in store.list_batches(2)]
    assert len(listed) == 2
    assert set(listed) <= set(batch_ids)
    assert {progress.batch_id for progress in store.list_batches()} == set(batch_ids)


def test_a_batch_is_found_by_id_by_name_and_by_the_beginning_of_its_id(store: Store) -> None:
    for batch_id, name in (("aa11", "first"), ("aa22", "second"), ("bb33", "aa11x"), ("a%_4", None)):
        store.create_batch(batch_id=batch_id, name=name)
    assert store.find_batch("aa11") == "aa11"
    assert store.find_batch("second") == "aa22"
    assert store.find_batch("b") == "bb33"
    assert store.find_batch("a%") == "a%_4"
    with pytest.raises(UnknownBatch, match=r"several batches \(aa11, aa22\)"):
        store.find_batch("aa")
    for name in ("zz", "", "%"):
        with pytest.raises(UnknownBatch, match="kvq status"):
            store.find_batch(name)
    with pytest.raises(UnknownBatch):
        store.batch_progress("zz")
    with pytest.raises(UnknownBatch):
        store.summary("zz")


def test_results_come_in_order_of_line_whatever_the_order_of_insertion(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reading, "PAGE", 3)
    store.create_batch(batch_id="b")
    lines = [7, 1, 4, 2, 9, 3, 8, 5, 6]
    store.insert_jobs([new_job(line) for line in lines], batch_id="b")
    store.insert_jobs([new_job(0, line_no=None, custom_id=f"late-{n}") for n in range(4)], batch_id="b")
    store.insert_jobs([new_job(99)], batch_id=None)
    rows = list(store.iter_results("b"))
    assert [row.line_no for row in rows] == [*range(1, 10), None, None, None, None]
    assert [row.custom_id for row in rows[9:]] == [f"late-{n}" for n in range(4)]
    assert list(store.iter_results("nobody")) == []


def test_results_are_filtered_by_state_and_unfinished_jobs_have_none_yet(store: Store) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(store, [new_job(number) for number in range(1, 4)])
    seqs = [job.seq for job in store.peek("kvq", limit=10)]
    first, _second = store.claim(worker_id, seqs[:2])
    store.finish(worker_id, [outcome_of(first)])
    done, running, queued = store.iter_results(batch_id)
    assert (done.state, running.state, queued.state) == (JobState.SUCCEEDED, JobState.RUNNING, JobState.QUEUED)
    assert (running.text, running.response, running.finished_at, running.worker_id) == (None, None, None, worker_id)
    assert running.started_at is not None
    assert (queued.started_at, queued.worker_id, queued.metrics, queued.finished) == (None, None, JobMetrics(), False)
    assert list(store.iter_results(batch_id, states=[JobState.SUCCEEDED])) == [done]
    assert list(store.iter_results(batch_id, states=[])) == []


def test_a_job_nobody_knows_is_none(store: Store) -> None:
    assert store.job("nobody") is None


def test_errors_are_counted_by_kind_with_an_example(store: Store) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(
        store, [new_job(1, error=JobError(code="invalid_json", message="bad")), *map(new_job, range(2, 5))]
    )
    store.finish(worker_id, [failure_of(job) for job in claim_all(store, worker_id)])
    assert store.errors_top(batch_id) == [
        ErrorCount(code="engine_error", num_jobs=3, example="engine_error in a test", first_line_no=2),
        ErrorCount(code="invalid_json", num_jobs=1, example="bad", first_line_no=1),
    ]
    assert len(store.errors_top(batch_id, limit=1)) == 1


def test_the_summary_tells_what_a_batch_cost(store: Store) -> None:
    dead, worker_id = new_worker(store), new_worker(store)
    batch_id = new_batch(store, [new_job(number) for number in range(1, 102)])
    store.claim(dead, [job.seq for job in store.peek("kvq", limit=2)])
    store.bury_worker(dead)
    store.reap(lease_s=60)
    jobs = claim_all(store, worker_id)
    outcomes = [
        outcome_of(
            job,
            metrics=JobMetrics(
                prompt_tokens=10, cached_tokens=4, computed_tokens=6, completion_tokens=2, ttft_ms=float(place)
            ),
        )
        for place, job in enumerate(jobs[:100], start=1)
    ]
    store.finish(worker_id, [*outcomes, failure_of(jobs[100])])
    summary = store.summary(batch_id)
    assert summary.ttft is not None
    assert (summary.ttft.num_jobs, summary.ttft.p50_ms, summary.ttft.p90_ms) == (100, 50.0, 90.0)
    assert (summary.ttft.p95_ms, summary.ttft.p99_ms, summary.ttft.max_ms) == (95.0, 99.0, 100.0)
    assert summary.tpot is None
    assert summary.wall_s is not None
    assert summary.wall_s > 0
    assert summary.completion_tokens_per_s == 200 / summary.wall_s
    assert (summary.computed_tokens, summary.reuse_share, summary.retried_jobs) == (600, 0.4, 2)
    assert [error.code for error in summary.errors] == ["engine_error"]


def test_a_batch_that_has_not_begun_has_a_summary_too(store: Store) -> None:
    summary = store.summary(new_batch(store, [new_job(1)]))
    assert (summary.ttft, summary.wall_s, summary.reuse_share, summary.errors) == (None, None, None, ())
    assert summary.prompt_tokens_per_s is None


def test_the_integrity_check_names_what_is_wrong(store: Store, sql: object) -> None:
    assert callable(sql)
    store.insert_jobs([new_job(1), new_job(2)])
    assert store.check_integrity() == []
    sql("UPDATE jobs SET state = 'succeeded' WHERE line_no = 1")
    sql("DELETE FROM job_payloads WHERE seq = (SELECT seq FROM jobs WHERE line_no = 2)")
    problems = store.check_integrity()
    assert len(problems) == 2
    assert problems[0].startswith("in a terminal state without a result: jobs ")
    assert problems[1].startswith("without a payload: jobs ")
