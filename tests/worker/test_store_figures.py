"""Figures: samples, queues and costs, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvq.worker.store import Store
from tests.factories import claim_all, new_batch, new_job, new_worker, outcome_of


def test_samples_of_the_last_seconds_come_oldest_first(store: Store, sql: Callable[..., list[Any]]) -> None:
    store.record_stats("a", {"running": 1})
    sql("UPDATE worker_stats SET at = :then", then="2020-01-01 00:00:00.000")
    store.record_stats("a", {"running": 2, "kv_usage": 0.5})
    store.record_stats("b", {"running": 3})
    found = store.worker_samples(last_s=60)
    assert [(s.worker_id, s.running, s.kv_usage, s.swapped_in) for s in found] == [("a", 2, 0.5, 0), ("b", 3, 0.0, 0)]
    assert all(0 <= s.age_s < 60 and s.at.tzinfo is not None for s in found)


def test_queues_tell_what_waits_and_who_serves_it(store: Store) -> None:
    new_batch(store, [new_job(1), new_job(2), new_job(3, queue="other")])
    worker_id = new_worker(store)
    store.claim(worker_id, [store.peek("kvq", limit=1)[0].seq])
    store.pause_queue("other")
    kvq, other = store.queues()
    assert (kvq.queue, kvq.queued, kvq.running, kvq.paused, kvq.num_workers) == ("kvq", 1, 1, False, 1)
    assert (other.queue, other.queued, other.running, other.paused, other.num_workers) == ("other", 1, 0, True, 0)
    assert kvq.oldest_age_s is not None
    assert 0 <= kvq.oldest_age_s < 60


def test_a_batch_costs_the_time_in_which_it_was_worked_on(store: Store, sql: Callable[..., list[Any]]) -> None:
    batch_id = new_batch(store, [new_job(i) for i in range(3)])
    worker_id = new_worker(store)
    jobs = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job) for job in jobs])
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def at(seconds: float) -> str:
        return (start + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S.000")

    sql("UPDATE jobs SET claimed_at = :at", at=at(0))
    # Four seconds of work, six more, a night, and work for as long as can be told.
    for job, seconds in zip(jobs, (4, 10, 40_000), strict=True):
        sql("UPDATE results SET finished_at = :at WHERE seq = :seq", at=at(seconds), seq=job.seq)
    (cost,) = store.batch_costs(["tiny", "another"])
    assert (cost.batch_id, cost.num_jobs, cost.computed_tokens, cost.output_tokens) == (batch_id, 3, 18, 15)
    assert cost.busy_s == pytest.approx(4 + 6 + 60, abs=0.01)
    assert store.batch_costs(["another"]) == []
