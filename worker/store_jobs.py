"""Jobs in the store: insert, claim, release, finish, cancel, expire, retry.

Owns the statements that move a job through its life (bulk forms in store_postgres and store_sqlite, the rest in
store_moves). Invariants: claiming and finishing are compare-and-set; a job ends once and then has one result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker import store_dedup as dedup
from kvq.worker import store_moves as moves
from kvq.worker.database import Database
from kvq.worker.errors import LeaseLost
from kvq.worker.jobs import (
    DEDUP_PERIOD_S,
    LEGAL_MOVES,
    TERMINAL_STATES,
    ClaimedJob,
    JobError,
    JobOutcome,
    JobState,
    NewJob,
)
from kvq.worker.loading import CHUNK_JOBS, load
from kvq.worker.store_postgres import PostgresBulk
from kvq.worker.store_privacy import forget_ended, note_wishes, without_prompts
from kvq.worker.store_records import FinishReport, InsertReport
from kvq.worker.store_rows import claimed_job, clean_text, json_text
from kvq.worker.store_sqlite import SqliteBulk
from kvq.worker.store_tenants import count_usage, flows_of

T = TypeVar("T")

SWEEP_CHUNK = 1_000

EXPIRED = JobError(code="expired", message="its deadline passed before it was run")


class Bulk(Protocol):
    """The statements that each database does its own way."""

    def insert(
        self, conn: Connection, jobs: Sequence[NewJob], batch_id: str | None, flows: Mapping[str, int]
    ) -> list[str]:
        """Insert the jobs whose id is new, in order; returns their ids. Ids must be distinct.

        ``flows``: by tenant.
        """

    def after_load(self, conn: Connection) -> None:
        """Called in a transaction of its own after many rows came in."""

    def claim(self, conn: Connection, worker_id: str, seqs: Sequence[int]) -> Sequence[sa.RowMapping]:
        """Take those of ``seqs`` that are free and due."""

    def finish(self, conn: Connection, worker_id: str, outcomes: Sequence[JobOutcome]) -> set[int]:
        """Write the outcomes of jobs still held by that claim; returns the seqs written."""


class JobStore:
    """The part of the store that holds batches and jobs."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._bulk: Bulk = PostgresBulk() if db.on_postgres else SqliteBulk()

    def create_batch(
        self,
        *,
        batch_id: str,
        name: str | None = None,
        source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Create a batch; one that is there already stays as it is (False)."""
        metadata_value = "CAST(:metadata AS json)" if self._db.on_postgres else ":metadata"
        statement = sa.text(f"""
        INSERT INTO batches (batch_id, name, source, metadata)
        VALUES (:batch_id, :name, :source, {metadata_value}) ON CONFLICT (batch_id) DO NOTHING
        """)
        values = {
            "batch_id": clean_text(batch_id),
            "name": clean_text(name),
            "source": clean_text(source),
            "metadata": json_text(dict(metadata or {})),
        }
        return self._db.write(lambda conn: conn.execute(statement, values).rowcount) == 1

    def withdraw_batch(self, batch_id: str) -> None:
        """Forget a batch whose submission failed, with all its jobs; the results of those that run are refused."""

        def work(conn: Connection) -> None:
            values = {"batch_id": clean_text(batch_id)}
            originals = dedup.originals_in(conn, values["batch_id"] or "")
            for table in ("batches", "flows"):
                conn.execute(sa.text(f"DELETE FROM {table} WHERE batch_id = :batch_id"), values)
            dedup.let_go(self._db, conn, originals)

        self._db.write(work)

    def insert_jobs(
        self, jobs: Iterable[NewJob], *, batch_id: str | None = None, dedup_period_s: float = DEDUP_PERIOD_S
    ) -> InsertReport:
        """Insert jobs, up to 5,000 a transaction, reading the iterable as it goes.

        A job whose id is known already is left as it is, so an interrupted insert can simply be repeated.
        """
        inserted, seen = load(jobs, lambda chunk: len(self._insert(chunk, batch_id, dedup_period_s)))
        if inserted >= CHUNK_JOBS:
            self._db.write(self._bulk.after_load)
        return InsertReport(inserted=inserted, existing=seen - inserted)

    def intake_jobs(self, jobs: Iterable[NewJob], *, dedup_period_s: float = DEDUP_PERIOD_S) -> list[str]:
        """Insert jobs in one transaction; returns the ids that were new."""
        return self._insert(list(jobs), None, dedup_period_s)

    def _insert(self, jobs: Sequence[NewJob], batch_id: str | None, dedup_period_s: float) -> list[str]:
        privacy = self._db.privacy
        distinct = [privacy.seal_job(job) for job in {job.job_id: job for job in reversed(jobs)}.values()][::-1]
        if not distinct:
            return []

        def work(conn: Connection) -> list[str]:
            dedup.serialize(self._db, conn, distinct)
            flows = flows_of(self._db, conn, {job.tenant for job in distinct}, batch_id)
            inserted = self._bulk.insert(conn, distinct, batch_id, flows)
            dedup.link(self._db, conn, distinct, inserted, period_s=dedup_period_s)
            note_wishes(self._db, conn, inserted)
            return inserted

        return self._db.write(work)

    def claim(self, worker_id: str, seqs: Sequence[int]) -> list[ClaimedJob]:
        """Take those of ``seqs`` that are still free and due, in the order given.

        Each is from now on this worker's, under a claim id no other claim has, until it is finished, released or
        reaped.

        Raises:
            LeaseLost: the worker is not registered or was declared dead.
            ValueUnreadable: one of them is encrypted, and not for us. They are taken all the same: release them.
        """
        if not seqs:
            return []
        rows = self._db.write_at_once(lambda conn: self._claim(conn, worker_id, seqs))
        by_seq = {row["seq"]: claimed_job(row, self._db.privacy) for row in rows}
        return [by_seq[seq] for seq in dict.fromkeys(seqs) if seq in by_seq]

    def _claim(self, conn: Connection, worker_id: str, seqs: Sequence[int]) -> Sequence[sa.RowMapping]:
        rows = self._bulk.claim(conn, worker_id, seqs)
        if not rows:
            live = sa.text("SELECT 1 FROM workers WHERE worker_id = :worker_id AND state = 'live'")
            if conn.execute(live, {"worker_id": worker_id}).first() is None:
                raise LeaseLost(worker_id)
        return rows

    def release(self, worker_id: str, seqs: Sequence[int] | None = None) -> int:
        """Give back running jobs of this worker (all, or those of ``seqs``) without charging an attempt.

        Those that were to be cancelled are cancelled. Returns how many it held.
        """
        return self._db.write(lambda conn: moves.release_held(self._db, conn, worker_id, seqs))

    def finish(self, worker_id: str, outcomes: Sequence[JobOutcome]) -> FinishReport:
        """Write the ends of jobs, all in one transaction; safe to repeat with the same outcomes.

        An outcome is refused (fenced) when the job no longer runs under that claim: it was reaped,
        released, or is finished already.
        """
        assert all(outcome.state in LEGAL_MOVES[JobState.RUNNING] & TERMINAL_STATES for outcome in outcomes)
        distinct = list({(o.claim_id, o.attempt): o for o in reversed(outcomes)}.values())
        if not distinct:
            return FinishReport(accepted=frozenset(), fenced=frozenset())

        def work(conn: Connection) -> set[int]:
            quiet = without_prompts(self._db, conn, distinct)
            accepted = self._bulk.finish(conn, worker_id, [self._db.privacy.seal_outcome(one) for one in quiet])
            forget_ended(self._db, conn, accepted)
            count_usage(self._db, conn, worker_id, accepted)
            dedup.let_go(self._db, conn, accepted)
            return accepted

        accepted = self._db.write(work)
        return FinishReport(
            accepted=frozenset(accepted), fenced=frozenset(outcome.seq for outcome in distinct) - accepted
        )

    def cancel_batch(self, batch_id: str) -> int:
        """Cancel what is not finished: queued jobs at once, running ones by request. Returns how many."""
        return self._cancel("j.batch_id = :batch_id", {"batch_id": batch_id})

    def cancel_queue(self, queue: str) -> int:
        """Cancel all jobs of a queue, as ``cancel_batch`` does."""
        return self._cancel("j.queue = :queue", {"queue": queue})

    def cancel_jobs(self, job_ids: Iterable[str]) -> int:
        """Cancel jobs by id, as ``cancel_batch`` does."""
        which = f"j.job_id {self._db.among_texts('job_ids')}"
        return sum(self._cancel(which, {"job_ids": self._db.texts(chunk)}) for chunk in _chunks(job_ids, SWEEP_CHUNK))

    def _cancel(self, which: str, values: Mapping[str, Any]) -> int:
        num_cancelled = 0
        # Until a whole round finds nothing: between the two steps a job may be claimed, or given back.
        while found := self._db.write(lambda conn: self._cancel_queued(conn, which, values)) + self._db.write(
            lambda conn: self._request_cancel(conn, which, values)
        ):
            num_cancelled += found
        return num_cancelled

    def _cancel_queued(self, conn: Connection, which: str, values: Mapping[str, Any]) -> int:
        seqs = self._lock(conn, f"j.state = 'queued' AND {which}", values)
        return len(moves.end(self._db, conn, seqs, start=JobState.QUEUED, to=JobState.CANCELLED, error=moves.CANCELLED))

    def _request_cancel(self, conn: Connection, which: str, values: Mapping[str, Any]) -> int:
        seqs = self._lock(conn, f"j.state = 'running' AND NOT j.cancel_requested AND {which}", values)
        statement = sa.text(f"UPDATE jobs SET cancel_requested = TRUE WHERE seq {self._db.among('seqs')}")
        return conn.execute(statement, {"seqs": self._db.numbers(seqs)}).rowcount if seqs else 0

    def cancel_requests(self, worker_id: str) -> list[tuple[int, str]]:
        """(seq, job id) of the jobs this worker runs that somebody wants cancelled."""
        statement = sa.text("""
        SELECT seq, job_id FROM jobs
        WHERE owner = :worker_id AND state = 'running' AND cancel_requested ORDER BY seq
        """)
        with self._db.reading() as conn:
            return [(row.seq, row.job_id) for row in conn.execute(statement, {"worker_id": worker_id})]

    def expire_due(self) -> int:
        """End the queued jobs whose deadline has passed; returns how many."""
        num_expired = 0
        while (seqs := self._due()) and (ended := self._db.write(partial(self._expire, seqs=seqs))):
            num_expired += ended
        return num_expired

    def _due(self) -> list[int]:
        # In the order of the index on deadlines: in any other a planner that expects many walks through all that wait.
        statement = sa.text(f"""
        SELECT seq FROM jobs WHERE state = 'queued' AND deadline <= {self._db.now}
        ORDER BY deadline LIMIT {SWEEP_CHUNK}
        """)
        with self._db.reading() as conn:
            return list(conn.execute(statement).scalars())

    def _expire(self, conn: Connection, seqs: list[int]) -> int:
        condition = f"j.seq {self._db.among('seqs')} AND j.state = 'queued'"
        found = self._lock(conn, condition, {"seqs": self._db.numbers(seqs)})
        ended = moves.end(self._db, conn, found, start=JobState.QUEUED, to=JobState.EXPIRED, error=EXPIRED)
        return len(ended)

    def retry_batch(self, batch_id: str, states: Collection[JobState] = (JobState.FAILED, JobState.DEAD)) -> int:
        """Queue again the jobs of a batch that ended in one of ``states``; returns how many."""
        return self._retry("j.batch_id = :batch_id", {"batch_id": batch_id}, states)

    def retry_jobs(self, job_ids: Iterable[str]) -> int:
        """Queue again those of the jobs that ended without success; returns how many."""
        which = f"j.job_id {self._db.among_texts('job_ids')}"
        states = TERMINAL_STATES - {JobState.SUCCEEDED}
        return sum(
            self._retry(which, {"job_ids": self._db.texts(chunk)}, states) for chunk in _chunks(job_ids, SWEEP_CHUNK)
        )

    def _retry(self, which: str, values: Mapping[str, Any], states: Collection[JobState]) -> int:
        return sum(self._retry_from(start, which, values) for start in states)

    def _retry_from(self, start: JobState, which: str, values: Mapping[str, Any]) -> int:
        condition = f"j.state = '{start.value}' AND j.seq > :after AND {which}"
        num_retried = after = 0

        def work(conn: Connection) -> tuple[list[int], int]:
            seqs = self._lock(conn, condition, {**values, "after": after})
            return seqs, len(moves.try_again(self._db, conn, seqs, start=start))

        # Forward only: a job that fails again at once is not met a second time.
        while True:
            seqs, moved = self._db.write(work)
            num_retried += moved
            if not seqs:
                return num_retried
            after = seqs[-1]

    def pause_queue(self, queue: str) -> None:
        """From now on nothing of ``queue`` is claimed, by any worker; what runs goes on."""
        self._set_paused(queue, paused=True)

    def resume_queue(self, queue: str) -> None:
        """Undo ``pause_queue``."""
        self._set_paused(queue, paused=False)

    def _set_paused(self, queue: str, *, paused: bool) -> None:
        statement = sa.text("""
        INSERT INTO queues (name, paused) VALUES (:name, :paused)
        ON CONFLICT (name) DO UPDATE SET paused = excluded.paused
        """)
        self._db.write(lambda conn: conn.execute(statement, {"name": queue, "paused": paused}))

    def paused_queues(self) -> list[str]:
        """Names of the paused queues."""
        with self._db.reading() as conn:
            return list(conn.execute(sa.text("SELECT name FROM queues WHERE paused ORDER BY name")).scalars())

    def _lock(self, conn: Connection, condition: str, values: Mapping[str, Any]) -> list[int]:
        # In order of seq, as finish does: two transactions that wait for each other's rows would deadlock.
        statement = sa.text(f"""
        SELECT j.seq FROM jobs j WHERE {condition} ORDER BY j.seq LIMIT {SWEEP_CHUNK} {self._db.for_update("j")}
        """)
        return list(conn.execute(statement, values).scalars())


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
