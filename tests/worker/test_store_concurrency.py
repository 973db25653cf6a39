"""Many at once: threads and processes that claim, finish, cancel and reap the same rows."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from kvq.worker import database, store_postgres
from kvq.worker.errors import LeaseLost, StoreError, StoreUnavailable
from kvq.worker.jobs import ClaimedJob, JobState, NewJob
from kvq.worker.store import Store
from kvq.worker.store_rows import job_values
from tests.factories import claim_all, new_batch, new_job, new_worker, outcome_of

NUM_THREADS = 12


def all_at_once(work: Any, count: int = NUM_THREADS) -> list[Any]:
    """Run ``work(number)`` in that many threads that start together; raises what they raise."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        barrier.wait(timeout=60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def all_finished(store: Store, jobs: list[ClaimedJob]) -> bool:
    rows = [store.job(job.job_id) for job in jobs]
    return all(row is not None and row.finished for row in rows)


def test_no_job_is_claimed_twice(store: Store) -> None:
    store.insert_jobs([new_job(number) for number in range(1, 1_201)])
    seqs = [job.seq for job in store.peek("kvq", limit=2_000)]

    def claim_until_nothing_is_left(number: int) -> list[int]:
        worker_id, mine = new_worker(store), []
        order = random.Random(number).sample(seqs, len(seqs))
        for start in range(0, len(order), 40):
            mine += [job.seq for job in store.claim(worker_id, order[start : start + 40])]
        return mine

    claimed = [seq for mine in all_at_once(claim_until_nothing_is_left) for seq in mine]
    # SKIP LOCKED may leave a row to nobody for a moment, never to two.
    assert len(claimed) == len(set(claimed))
    assert len(claimed) + len(store.peek("kvq", limit=2_000)) == len(seqs)
    assert store.check_integrity() == []


def test_everybody_after_the_same_row_only_one_gets_it(store: Store) -> None:
    workers = [new_worker(store) for _ in range(NUM_THREADS)]
    for number in range(1, 11):
        store.insert_jobs([new_job(number)])
        (job,) = store.peek("kvq", limit=1)
        winners = all_at_once(lambda index, seq=job.seq: store.claim(workers[index], [seq]))
        assert sum(len(won) for won in winners) == 1


def test_the_same_outcome_from_many_threads_is_one_result(store: Store) -> None:
    worker_id = new_worker(store)
    store.insert_jobs([new_job(number) for number in range(1, 61)])
    jobs = claim_all(store, worker_id)

    def finish_in_some_order(number: int) -> list[int]:
        order = random.Random(number).sample(jobs, len(jobs))
        mine = [outcome_of(job, text=f"thread {number}") for job in order]
        return [seq for start in range(0, 60, 20) for seq in store.finish(worker_id, mine[start : start + 20]).accepted]

    accepted = all_at_once(finish_in_some_order)
    assert Counter(seq for seqs in accepted for seq in seqs) == Counter(job.seq for job in jobs)
    writer_by_seq = {seq: f"thread {number}" for number, seqs in enumerate(accepted) for seq in seqs}
    for job in jobs:
        row = store.job(job.job_id)
        assert row is not None
        assert row.text == writer_by_seq[job.seq]
    assert store.check_integrity() == []


def test_a_reaped_job_is_finished_by_its_new_owner_or_its_old_one_never_by_both(store: Store) -> None:
    store.insert_jobs([new_job(number) for number in range(1, 41)])
    old = new_worker(store)
    jobs = claim_all(store, old)
    store.bury_worker(old)
    heirs = [new_worker(store) for _ in range(3)]

    def act(number: int) -> frozenset[int]:
        if number < 4:
            return store.finish(old, [outcome_of(job, text="old") for job in jobs[number::4]]).accepted
        if number < 8:
            store.reap(lease_s=3600)
            return frozenset()
        heir, done = heirs[number % 3], frozenset[int]()
        while not all_finished(store, jobs):
            done |= store.finish(heir, [outcome_of(job, text="new") for job in claim_all(store, heir)]).accepted
        return done

    accepted = Counter(seq for seqs in all_at_once(act, 11) for seq in seqs)
    assert accepted == Counter(job.seq for job in jobs)
    assert store.check_integrity() == []


def test_many_reapers_move_each_job_once(store: Store) -> None:
    dead = new_worker(store)
    store.insert_jobs([new_job(number) for number in range(1, 301)])
    claim_all(store, dead)
    store.bury_worker(dead)
    reports = all_at_once(lambda _: store.reap(lease_s=3600))
    assert sum(report.requeued for report in reports) == 300
    assert {job.crashes for job in store.peek("kvq", limit=1_000)} == {1}
    assert store.check_integrity() == []


def test_cancelling_while_others_claim_finish_and_release_ends_everything(store: Store) -> None:
    """Rows are locked in many orders here: a deadlock must be repeated, not raised."""
    batch_id = new_batch(store, [new_job(number) for number in range(1, 601)])
    stop = threading.Event()

    def act(number: int) -> None:
        if number == 0:
            try:
                store.cancel_batch(batch_id)
            finally:
                stop.set()
            return
        worker_id, chance = new_worker(store), random.Random(number)
        while not stop.is_set():
            waiting = [job.seq for job in store.peek("kvq", limit=60)]
            chance.shuffle(waiting)
            jobs = store.claim(worker_id, waiting[:20])
            chance.shuffle(jobs)
            store.finish(worker_id, [outcome_of(job) for job in jobs[:3]])
            store.release(worker_id, [job.seq for job in jobs[3:6]])
        store.release(worker_id)

    all_at_once(act, 8)
    progress = store.batch_progress(batch_id)
    assert (progress.queued, progress.running) == (0, 0)
    assert progress.succeeded + progress.cancelled == 600
    assert store.check_integrity() == []


def test_a_worker_buried_while_it_claims_loses_every_job_to_the_reaper(store: Store) -> None:
    store.insert_jobs([new_job(number) for number in range(1, 201)])
    seqs = [job.seq for job in store.peek("kvq", limit=1_000)]
    worker_id = new_worker(store)

    def act(number: int) -> None:
        if number == 0:
            store.bury_worker(worker_id)
            return
        try:
            for seq in seqs[number::4]:
                store.claim(worker_id, [seq])
        except LeaseLost:
            return

    all_at_once(act, 5)
    store.reap(lease_s=3600)
    assert len(store.peek("kvq", limit=1_000)) == 200
    assert store.check_integrity() == []


_DRAIN = """
import json, sys
from kvq.worker.jobs import JobOutcome, JobState
from kvq.worker.store import Store
from kvq.worker.store_rows import job_values
url, worker_id = sys.argv[1:]
done = []
with Store.open(url) as store:
    store.register_worker(worker_id, hostname="host", pid=1)
    while waiting := store.peek("kvq", limit=50):
        jobs = store.claim(worker_id, [job.seq for job in waiting][:10])
        outcomes = [
            JobOutcome(
                seq=j.seq,
                job_id=j.job_id,
                attempt=j.attempt,
                claim_id=j.claim_id,
                state=JobState.SUCCEEDED,
                text=worker_id,
            )
            for j in jobs
        ]
        done += store.finish(worker_id, outcomes).accepted
print(json.dumps(done))
"""


def test_processes_share_one_database(store: Store, store_url: str) -> None:
    batch_id = new_batch(store, [new_job(number) for number in range(1, 401)])
    with ThreadPoolExecutor(3) as pool:
        runs = list(
            pool.map(
                lambda number: subprocess.run(
                    [sys.executable, "-c", _DRAIN, store_url, f"process-{number}"], capture_output=True, text=True
                ),
                range(3),
            )
        )
    assert [run.returncode for run in runs] == [0, 0, 0], [run.stderr for run in runs]
    done = [seq for run in runs for seq in json.loads(run.stdout)]
    assert len(done) == len(set(done)) == 400
    assert store.batch_progress(batch_id).succeeded == 400
    assert store.check_integrity() == []


def test_the_same_jobs_submitted_by_many_are_inserted_once(store: Store) -> None:
    jobs = [new_job(number) for number in range(1, 301)]
    store.create_batch(batch_id="b")

    def submit(number: int) -> int:
        store.create_batch(batch_id="b")
        return store.insert_jobs(random.Random(number).sample(jobs, len(jobs)), batch_id="b").inserted

    assert sum(all_at_once(submit, 6)) == 300
    assert store.batch_progress("b").total == 300
    assert store.check_integrity() == []


@pytest.mark.parametrize("kill_after", [JobState.RUNNING, JobState.SUCCEEDED])
def test_a_write_that_fails_half_way_leaves_nothing(store: Store, kill_after: JobState) -> None:
    """The whole of a claim or a finish is one transaction."""
    worker_id = new_worker(store)
    store.insert_jobs([new_job(1)])
    (waiting,) = store.peek("kvq", limit=1)

    class Killed(Exception):
        pass

    def claim_then_die(conn: Any) -> None:
        rows = store._bulk.claim(conn, worker_id, [waiting.seq])
        assert len(rows) == 1
        if kill_after is JobState.SUCCEEDED:
            store._bulk.finish(conn, worker_id, [outcome_of(ClaimedJob(**rows[0]))])
        raise Killed

    with pytest.raises(Killed):
        store._db.write(claim_then_die)
    assert store.peek("kvq", limit=1) == [waiting]
    assert store.check_integrity() == []


def test_who_is_stopped_in_a_transaction_on_postgresql_keeps_the_others_waiting_for_a_while_only(
    pg_db_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_SILENCE_S", 1)
    stopped, awake = threading.Event(), threading.Event()

    def stop(connection: Any) -> None:
        """What SIGSTOP between a heartbeat and its commit comes to."""
        connection.execute(sa.text("UPDATE workers SET heartbeat_at = '2020-01-01'"))
        stopped.set()
        awake.wait(60)
        connection.execute(sa.text("SELECT 1"))

    with Store.open(pg_db_url) as sleeper, Store.open(pg_db_url) as other, ThreadPoolExecutor(1) as pool:
        worker_id = new_worker(sleeper)
        sleeping = pool.submit(sleeper._db.write, stop)
        try:
            assert stopped.wait(60)
            assert other.heartbeat(worker_id), "it waits for the row until the server ends the silent session"
        finally:
            awake.set()
        with pytest.raises(StoreUnavailable, match="idle-in-transaction timeout"):
            sleeping.result()
        assert sleeper.heartbeat(worker_id)
        assert [worker.heartbeat_age_s < 60 for worker in other.live_workers()] == [True]


def test_a_job_that_postgresql_cannot_copy_is_refused_and_a_server_lost_meanwhile_is_away(
    pg_db_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_server(job: NewJob, flow: int) -> Any:
        other._db.write(
            lambda conn: conn.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
        )
        return job_values(job, flow)

    with Store.open(pg_db_url) as store, Store.open(pg_db_url) as other:
        with pytest.raises(StoreError, match="refused a value: invalid input syntax for type integer"):
            store.insert_jobs([new_job(1, priority="urgent")])
        with monkeypatch.context() as patch:
            patch.setattr(store_postgres, "job_values", lose_the_server)
            with pytest.raises(StoreUnavailable):
                store.insert_jobs([new_job(2)])
        assert store.insert_jobs([new_job(3)]).inserted == 1
