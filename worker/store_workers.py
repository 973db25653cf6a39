"""Workers in the store: registration, heartbeat, the reaper, samples.

Owns the lease: one heartbeat row per worker, measured by the database's clock alone. Invariants: a worker that
was declared dead never comes back under its id; a running job whose owner is not live is moved by the next reap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker import store_moves as moves
from kvq.worker.database import Database
from kvq.worker.errors import LeaseLost, StoreError
from kvq.worker.jobs import JobState
from kvq.worker.retry import DEFAULT_MAX_CRASHES, Verdict, after_crash
from kvq.worker.schema import Instant
from kvq.worker.store_records import ReapReport, WorkerRow
from kvq.worker.store_rows import clean_text, json_text

REAP_CHUNK = 1_000
STATS_KEPT_S = 30 * 86_400.0
SAMPLE_FIELDS = (
    "prompt_tps",
    "generation_tps",
    "running",
    "waiting",
    "kv_usage",
    "prefix_hit_rate",
    "swapped_in",
    "swapped_out",
    "preemptions",
    "steps",
    "num_draft_tokens",
    "num_accepted_tokens",
)

_ORPHANED = "NOT EXISTS (SELECT 1 FROM workers w WHERE w.worker_id = j.owner AND w.state = 'live')"


class WorkerStore:
    """The part of the store that holds workers and takes jobs back from dead ones."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def register_worker(
        self,
        worker_id: str,
        *,
        hostname: str,
        pid: int,
        pid_started: str | None = None,
        model: str | None = None,
        queue: str = "kvq",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a lease. ``worker_id`` is a random boot id, new for every start of a process.

        Old samples are pruned here, once per start. Safe to repeat while the lease holds.

        Raises:
            LeaseLost: the id was used before and is retired or dead.
        """
        values = {
            "worker_id": worker_id,
            "hostname": clean_text(hostname),
            "pid": pid,
            "pid_started": clean_text(pid_started),
            "model": clean_text(model),
            "queue": clean_text(queue),
            "info": json_text(dict(info or {})),
        }
        self._db.write(lambda conn: self._register(conn, values))

    def _register(self, conn: Connection, values: Mapping[str, Any]) -> None:
        info = "CAST(:info AS json)" if self._db.on_postgres else ":info"
        insert = sa.text(f"""
        INSERT INTO workers (worker_id, hostname, pid, pid_started, model, queue, info, state)
        VALUES (:worker_id, :hostname, :pid, :pid_started, :model, :queue, {info}, 'live')
        ON CONFLICT (worker_id) DO NOTHING
        """)
        conn.execute(insert, values)
        if not self._beat(conn, values["worker_id"]):
            raise LeaseLost(values["worker_id"])
        old = sa.text(f"DELETE FROM worker_stats WHERE at < {self._db.now_plus('age')}")
        conn.execute(old, {"age": -STATS_KEPT_S})

    def heartbeat(self, worker_id: str) -> bool:
        """Renew the lease. False: it is lost for good, and the worker's jobs are being given to others."""
        return self._db.write_at_once(lambda conn: self._beat(conn, worker_id))

    def _beat(self, conn: Connection, worker_id: str) -> bool:
        statement = sa.text(
            f"UPDATE workers SET heartbeat_at = {self._db.now} WHERE worker_id = :worker_id AND state = 'live'"
        )
        return conn.execute(statement, {"worker_id": worker_id}).rowcount == 1

    def retire_worker(self, worker_id: str) -> None:
        """End the lease in good order: whatever it still holds is given back, uncharged."""

        def work(conn: Connection) -> None:
            moves.release_held(self._db, conn, worker_id)
            self._end_lease(conn, worker_id, state="retired")

        self._db.write(work)

    def bury_worker(self, worker_id: str) -> bool:
        """Declare a worker dead that is known to be gone, before its lease runs out; False if it was not live.

        Its jobs are moved by the next ``reap``.
        """
        return self._db.write(lambda conn: self._end_lease(conn, worker_id, state="dead"))

    def _end_lease(self, conn: Connection, worker_id: str, *, state: str) -> bool:
        statement = sa.text(f"""
        UPDATE workers SET state = :state, ended_at = {self._db.now}
        WHERE worker_id = :worker_id AND state = 'live'
        """)
        ended = conn.execute(statement, {"worker_id": worker_id, "state": state}).rowcount == 1
        if ended:
            self._untold_by(conn, [worker_id])
        return ended

    def _untold_by(self, conn: Connection, worker_ids: list[str]) -> None:
        """What workers that are gone were telling is due now, not when their hold on it ends.

        Rows that one of them has locked (stopped in the middle of a transaction) are passed over, not waited for.
        """
        statement = sa.text(f"""
        UPDATE outbox SET next_at = {self._db.now}
        WHERE id IN (SELECT o.id FROM outbox o
                     WHERE o.next_at > {self._db.now} AND o.worker_id {self._db.among_texts("worker_ids")}
                     {self._db.for_update("o", skip_locked=True)})
        """)
        conn.execute(statement, {"worker_ids": self._db.texts(worker_ids)})

    def live_workers(self) -> list[WorkerRow]:
        """The registered workers that were not retired or declared dead, oldest first."""
        statement = sa.text(f"""
        SELECT worker_id, hostname, pid, pid_started, model, queue, info, state, started_at, heartbeat_at,
               {self._db.seconds_between("heartbeat_at", self._db.now)} AS heartbeat_age_s
        FROM workers WHERE state = 'live' ORDER BY started_at, worker_id
        """).columns(info=sa.JSON(), started_at=Instant(), heartbeat_at=Instant())
        with self._db.reading() as conn:
            return [WorkerRow(**row) for row in conn.execute(statement).mappings()]

    def reap(self, *, lease_s: float, max_crashes: int = DEFAULT_MAX_CRASHES, bury_silent: bool = True) -> ReapReport:
        """Declare silent workers dead (if ``bury_silent``) and move the running jobs of every worker that is not live.

        They go back to the queue with one more crash, or end: as dead after ``max_crashes``, as cancelled or
        expired where that was due. Any number of workers may reap at once; each job is moved by one of them.
        """
        silent = self._db.write(lambda conn: self._bury_silent(conn, lease_s)) if bury_silent else []
        totals: Counter[JobState] = Counter()
        while moved := self._db.write(lambda conn: self._reap_some(conn, max_crashes)):
            totals += moved
        return ReapReport(
            requeued=totals[JobState.QUEUED],
            dead=totals[JobState.DEAD],
            cancelled=totals[JobState.CANCELLED],
            expired=totals[JobState.EXPIRED],
            workers=tuple(silent),
        )

    def _bury_silent(self, conn: Connection, lease_s: float) -> list[str]:
        statement = sa.text(f"""
        UPDATE workers SET state = 'dead', ended_at = {self._db.now}
        WHERE state = 'live' AND heartbeat_at < {self._db.now_plus("silence")} RETURNING worker_id
        """)
        silent = list(conn.execute(statement, {"silence": -lease_s}).scalars())
        if silent:
            self._untold_by(conn, silent)
        return silent

    def _reap_some(self, conn: Connection, max_crashes: int) -> Counter[JobState]:
        lost = conn.execute(
            sa.text(f"""
            SELECT j.seq, j.crashes, j.cancel_requested,
                   (j.deadline IS NOT NULL AND j.deadline <= {self._db.now}) AS expired
            FROM jobs j WHERE j.state = 'running' AND {_ORPHANED}
            ORDER BY j.seq LIMIT {REAP_CHUNK} {self._db.for_update("j", skip_locked=True)}
            """)
        ).all()
        seqs_by_verdict: dict[Verdict, list[int]] = {}
        for row in lost:
            verdict = after_crash(
                crashes=row.crashes + 1,
                max_crashes=max_crashes,
                cancel_requested=bool(row.cancel_requested),
                expired=bool(row.expired),
            )
            seqs_by_verdict.setdefault(verdict, []).append(row.seq)
        moved: Counter[JobState] = Counter()
        for verdict, seqs in seqs_by_verdict.items():
            moved[verdict.state] += len(self._carry_out(conn, verdict, seqs))
        return +moved

    def _carry_out(self, conn: Connection, verdict: Verdict, seqs: list[int]) -> list[int]:
        # The condition again, on the locked rows: between the snapshot and the lock another reaper may have put
        # a job back and a live worker may have claimed it.
        if verdict.error is None:
            return moves.put_back(self._db, conn, seqs, cause=moves.Cause.LOST, recheck=_ORPHANED)
        return moves.end(
            self._db,
            conn,
            seqs,
            start=JobState.RUNNING,
            to=verdict.state,
            error=verdict.error,
            cause=moves.Cause.LOST,
            recheck=_ORPHANED,
        )

    def record_stats(self, worker_id: str, sample: Mapping[str, float | None]) -> None:
        """Keep one sample of a worker's counters; fields left out are null.

        Raises:
            StoreError: a field that is not one of SAMPLE_FIELDS.
        """
        unknown = sorted(set(sample) - set(SAMPLE_FIELDS))
        if unknown:
            raise StoreError(f"a sample has no field {', '.join(unknown)}; it has {', '.join(SAMPLE_FIELDS)}")
        statement = sa.text(f"""
        INSERT INTO worker_stats (worker_id, {", ".join(SAMPLE_FIELDS)})
        VALUES (:worker_id, {", ".join(f":{name}" for name in SAMPLE_FIELDS)})
        """)
        values = {name: sample.get(name) for name in SAMPLE_FIELDS} | {"worker_id": worker_id}
        self._db.write(lambda conn: conn.execute(statement, values))
