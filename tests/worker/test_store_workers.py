"""Workers in the store: the lease, the reaper, samples."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from kvq.worker.errors import LeaseLost, StoreError
from kvq.worker.jobs import JobState
from kvq.worker.store import ReapReport, Store
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of

Sql = Callable[..., list[Any]]


@pytest.fixture
def silence(sql: Sql, store_url: str) -> Callable[[str, float], None]:
    """Makes a worker's last heartbeat that many seconds old."""

    def age(worker_id: str, seconds: float) -> None:
        if store_url.startswith("sqlite"):
            past = f"strftime('%Y-%m-%d %H:%M:%f', 'now', '-{seconds} seconds')"
        else:
            past = f"clock_timestamp() - interval '{seconds} seconds'"
        sql(f"UPDATE workers SET heartbeat_at = {past} WHERE worker_id = :id", id=worker_id)

    return age


def test_a_registered_worker_is_live_with_all_it_said(store: Store) -> None:
    worker_id = new_worker(
        store, hostname="gpu-1", pid=77, pid_started="123456", model="tiny", queue="night", info={"device": "cpu"}
    )
    (row,) = store.live_workers()
    assert (row.worker_id, row.hostname, row.pid, row.pid_started) == (worker_id, "gpu-1", 77, "123456")
    assert (row.model, row.queue, row.info, row.state) == ("tiny", "night", {"device": "cpu"}, "live")
    assert 0 <= row.heartbeat_age_s < 60


def test_registering_again_while_the_lease_holds_is_harmless(store: Store) -> None:
    worker_id = new_worker(store)
    assert new_worker(store, worker_id=worker_id) == worker_id
    assert len(store.live_workers()) == 1


@pytest.mark.parametrize("end", ["retire_worker", "bury_worker"])
def test_a_worker_that_ended_never_comes_back_under_its_id(store: Store, end: str) -> None:
    worker_id = new_worker(store)
    assert store.heartbeat(worker_id)
    getattr(store, end)(worker_id)
    assert not store.heartbeat(worker_id)
    assert store.live_workers() == []
    assert not store.bury_worker(worker_id)
    with pytest.raises(LeaseLost, match="new id"):
        new_worker(store, worker_id=worker_id)


def test_a_heartbeat_of_a_stranger_is_refused(store: Store) -> None:
    assert not store.heartbeat("stranger")


def test_a_heartbeat_renews_the_lease(store: Store, silence: Callable[[str, float], None]) -> None:
    worker_id = new_worker(store)
    silence(worker_id, 59)
    (row,) = store.live_workers()
    assert 58 < row.heartbeat_age_s < 120
    assert store.reap(lease_s=300) == ReapReport()
    assert store.heartbeat(worker_id)
    assert store.reap(lease_s=50) == ReapReport()


def test_the_jobs_of_a_silent_worker_are_run_again_with_a_crash_counted(
    store: Store, silence: Callable[[str, float], None]
) -> None:
    dead, alive = new_worker(store), new_worker(store)
    store.insert_jobs([new_job(number) for number in range(1, 5)])
    seqs = [job.seq for job in store.peek("kvq", limit=10)]
    lost = store.claim(dead, seqs[:3])
    store.claim(alive, seqs[3:])
    silence(dead, 61)
    assert store.reap(lease_s=60) == ReapReport(requeued=3, workers=(dead,))
    assert store.reap(lease_s=60) == ReapReport()
    again = claim_all(store, alive)
    assert [job.seq for job in again] == [job.seq for job in lost]
    assert {(job.attempt, job.crashes) for job in again} == {(2, 1)}
    assert not store.heartbeat(dead)
    assert store.check_integrity() == []


def test_a_poison_job_becomes_a_dead_letter_and_its_neighbour_does_not(store: Store) -> None:
    poison, neighbour = new_job(1, celery={"reply_to": "x"}), new_job(2)
    batch_id = new_batch(store, [poison, neighbour])
    for crash in (1, 2, 3):
        worker_id = new_worker(store)
        jobs = claim_all(store, worker_id)
        if crash == 1:
            store.finish(worker_id, [outcome_of(job) for job in jobs if job.job_id == neighbour.job_id])
        store.bury_worker(worker_id)
        report = store.reap(lease_s=60, max_crashes=3)
        assert report == (ReapReport(requeued=1) if crash < 3 else ReapReport(dead=1))
    row = store.job(poison.job_id)
    assert row is not None
    assert (row.state, row.attempts, row.crashes) == (JobState.DEAD, 3, 3)
    assert row.error is not None
    assert row.error.code == "worker_lost"
    assert [told.payload["state"] for told in store.outbox_pending(10)] == ["dead"]
    assert store.batch_progress(batch_id).dead == 1
    assert store.check_integrity() == []
    assert store.retry_batch(batch_id) == 1


def test_reaping_a_job_that_was_to_be_cancelled_cancels_it(store: Store, sql: Sql) -> None:
    worker_id = new_worker(store)
    batch_id = new_batch(store, [new_job(1), new_job(2), new_job(3)])
    first, second, _third = claim_all(store, worker_id)
    store.cancel_jobs([first.job_id])
    sql("UPDATE jobs SET deadline = '2020-01-01 00:00:00.000' WHERE seq = :seq", seq=second.seq)
    store.bury_worker(worker_id)
    assert store.reap(lease_s=60) == ReapReport(requeued=1, cancelled=1, expired=1)
    progress = store.batch_progress(batch_id)
    assert (progress.queued, progress.cancelled, progress.expired) == (1, 1, 1)
    assert store.check_integrity() == []


def test_the_reaper_takes_jobs_from_workers_whose_row_is_gone(store: Store, sql: Sql) -> None:
    worker_id = new_worker(store)
    store.insert_jobs([new_job(1)])
    claim_all(store, worker_id)
    sql("DELETE FROM workers")
    assert store.reap(lease_s=60) == ReapReport(requeued=1)


def test_the_reaper_moves_any_number_of_jobs(store: Store) -> None:
    worker_id = new_worker(store)
    store.insert_jobs([new_job(number) for number in range(1, 2_502)])
    assert len(claim_all(store, worker_id)) == 2_501
    store.bury_worker(worker_id)
    assert store.reap(lease_s=60).requeued == 2_501
    assert store.check_integrity() == []


def test_a_worker_that_retires_gives_back_what_it_holds_uncharged(store: Store) -> None:
    worker_id = new_worker(store)
    store.insert_jobs([new_job(1), new_job(2)])
    first, _second = claim_all(store, worker_id)
    store.finish(worker_id, [failure_of(first)])
    store.retire_worker(worker_id)
    assert store.reap(lease_s=60) == ReapReport()
    (again,) = claim_all(store, new_worker(store))
    assert (again.attempt, again.crashes) == (1, 0)


def test_why_a_job_ran_twice_is_on_record(store: Store, sql: Sql) -> None:
    store.insert_jobs([new_job(1)])
    outcomes = []
    for end in ("released", "lost", "succeeded"):
        worker_id = new_worker(store)
        (job,) = claim_all(store, worker_id)
        if end == "released":
            store.release(worker_id)
        elif end == "lost":
            store.bury_worker(worker_id)
            store.reap(lease_s=60)
        else:
            store.finish(worker_id, [outcome_of(job)])
        outcomes.append((job.attempt, worker_id, end))
    rows = sql("SELECT attempt, worker_id, outcome FROM job_attempts WHERE ended_at >= claimed_at ORDER BY id")
    assert [tuple(row) for row in rows] == outcomes


def test_samples_are_kept_and_old_ones_pruned_when_a_worker_starts(store: Store, sql: Sql) -> None:
    worker_id = new_worker(store)
    store.record_stats(worker_id, {"prompt_tps": 12.5, "running": 3, "kv_usage": 0.25, "steps": 2**40})
    sql("INSERT INTO worker_stats (worker_id, at) VALUES ('old', '2020-01-01 00:00:00.000')")
    new_worker(store)
    rows = sql("SELECT worker_id, prompt_tps, running, kv_usage, steps, waiting FROM worker_stats")
    assert [tuple(row) for row in rows] == [(worker_id, 12.5, 3, 0.25, 2**40, None)]


def test_a_sample_with_a_field_of_no_column_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no field tokens"):
        store.record_stats(uuid.uuid4().hex, {"tokens": 1.0})
