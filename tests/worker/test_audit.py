"""Audit: it finds every broken promise, and holds nothing against what is on its way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from kvq.worker.audit import audit
from kvq.worker.config import Settings
from kvq.worker.errors import BrokerError
from kvq.worker.jobs import ClaimedJob
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of

Sql = Callable[..., list[Any]]
KEYS = QueueKeys(queue="kvq")


@pytest.fixture
def jobs(store: Store) -> list[ClaimedJob]:
    """Four running jobs, of which the sender of the first wants to be told."""
    new_batch(store, [new_job(1, celery={"headers": {}}), new_job(2), new_job(3), new_job(4)])
    return claim_all(store, new_worker(store, worker_id="w"))


def problems(store: Store, **settings: Any) -> list[str]:
    return [problem for check in audit(store, Settings(**settings)) for problem in check.problems]


def test_everything_holds_at_every_stage_of_a_calm_life(store: Store) -> None:
    assert problems(store) == []
    new_batch(store, [new_job(i) for i in range(3)])
    assert problems(store) == []
    worker_id = new_worker(store)
    claimed = claim_all(store, worker_id)
    assert problems(store) == []
    store.finish(worker_id, [outcome_of(claimed[0]), failure_of(claimed[1])])
    store.release(worker_id)
    assert problems(store) == []


def test_a_running_job_of_a_dead_worker_is_found_until_it_is_reaped(store: Store, jobs: list[ClaimedJob]) -> None:
    store.bury_worker("w")
    (problem,) = problems(store)
    assert problem == f"running without a live owner: jobs {', '.join(str(job.seq) for job in jobs)}"
    store.reap(lease_s=60)
    assert problems(store) == []


def test_a_worker_that_was_silent_for_a_lease_is_no_owner(store: Store, sql: Sql, jobs: list[ClaimedJob]) -> None:
    sql("UPDATE workers SET heartbeat_at = :then", then="2020-01-01 00:00:00.000")
    assert any("without a live owner" in problem for problem in problems(store))


def test_a_result_that_is_missing_is_found(store: Store, sql: Sql, jobs: list[ClaimedJob]) -> None:
    store.finish("w", [outcome_of(job) for job in jobs])
    store.outbox_done([row.id for row in store.outbox_pending(9)])
    sql("DELETE FROM results WHERE seq = :seq", seq=jobs[1].seq)
    assert problems(store) == [f"in a terminal state without a result: jobs {jobs[1].seq}"]


def test_a_second_success_is_found(store: Store, sql: Sql, jobs: list[ClaimedJob]) -> None:
    store.finish("w", [outcome_of(jobs[1])])
    sql(
        "INSERT INTO job_attempts (seq, attempt, worker_id, claimed_at, ended_at, outcome) "
        "SELECT seq, 2, worker_id, claimed_at, ended_at, outcome FROM job_attempts WHERE outcome = 'succeeded'"
    )
    assert problems(store) == [f"succeeded more than once: jobs {jobs[1].seq}"]


def test_a_kv_block_that_is_held_for_nobody_is_found(store: Store) -> None:
    store.record_stats("busy", {"running": 1, "waiting": 0, "kv_usage": 0.5})
    store.record_stats("waited for", {"running": 0, "waiting": 1, "kv_usage": 0.5})
    store.record_stats("idle", {"running": 0, "waiting": 0, "kv_usage": 0.0})
    assert problems(store) == []
    store.record_stats("leaking", {"running": 0, "waiting": 0, "kv_usage": 0.125})
    assert problems(store) == ["worker leaking had no job and held 12.5% of its KV blocks"]


def test_an_outbox_row_is_on_its_way_while_jobs_run_and_forgotten_once_none_does(
    store: Store, jobs: list[ClaimedJob]
) -> None:
    store.finish("w", [outcome_of(jobs[0])])
    assert problems(store) == []
    store.finish("w", [outcome_of(job) for job in jobs[1:]])
    assert problems(store) == [f"ended, but its sender was not told: jobs {jobs[0].seq}"]
    store.outbox_done([row.id for row in store.outbox_pending(9)])
    assert problems(store) == []


def test_an_old_outbox_row_is_found_even_while_jobs_run(store: Store, sql: Sql, jobs: list[ClaimedJob]) -> None:
    store.finish("w", [outcome_of(jobs[0])])
    sql("UPDATE outbox SET created_at = :then", then="2020-01-01 00:00:00.000")
    assert problems(store) == [f"ended, but its sender was not told: jobs {jobs[0].seq}"]


def test_a_message_between_redis_and_sql_is_found_unless_a_worker_has_just_taken_it(
    store: Store, redis_url: str
) -> None:
    assert problems(store, broker=redis_url) == []
    with redis.Redis.from_url(redis_url) as client:
        client.hset(KEYS.unacked, "tag", "[]")
        client.zadd(KEYS.unacked_index, {"tag": time.time()})
    assert len(problems(store, broker=redis_url)) == 1  # nobody serves the queue
    new_worker(store)
    assert problems(store, broker=redis_url) == []
    with redis.Redis.from_url(redis_url) as client:
        client.zadd(KEYS.unacked_index, {"tag": time.time() - 61})
    (problem,) = problems(store, broker=redis_url)
    assert "1 messages were taken from queue kvq and never stored" in problem


def test_an_index_without_its_message_is_found_and_unreadable_messages_are_noted(store: Store, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.zadd(KEYS.unacked_index, {"tag": time.time()})
        client.lpush(KEYS.poison, "?")
    *_, broker = audit(store, Settings(broker=redis_url))
    assert broker.problems == (f"1 entries of {KEYS.unacked_index} have no message",)
    assert broker.note is not None
    assert "1 messages could not be read" in broker.note


def test_a_broker_that_is_away_is_an_error_and_no_verdict(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, pytest.raises(BrokerError):
        audit(store, Settings(broker="redis://127.0.0.1:1/0"))
