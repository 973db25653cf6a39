"""What people do to jobs that have ended: run them again (changed, perhaps), give them up, prune them.

Owns the statements that pick ended jobs by a filter, and deletion. Invariants: only jobs in a terminal state are
touched; a filter's values are bound, never spelled into SQL; a finished batch is pruned whole or not at all; every
transaction is of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker import store_moves as moves
from kvq.worker.database import Database
from kvq.worker.filters import Condition, Operator
from kvq.worker.jobs import LEGAL_MOVES, Endpoint, JobState
from kvq.worker.schema import Instant
from kvq.worker.store_privacy import HAS_PROMPT
from kvq.worker.store_records import DeadLetter, PruneReport
from kvq.worker.store_rows import json_text

CHUNK = 1_000

# Gives the new body of a job; raises for one that cannot be changed so.
Rewrite = Callable[[Endpoint, dict[str, Any]], dict[str, Any]]

_COLUMN_BY_FIELD = {
    "state": "j.state",
    "custom_id": "j.custom_id",
    "job_id": "j.job_id",
    "line_no": "j.line_no",
    "queue": "j.queue",
    "endpoint": "j.endpoint",
    "model": "coalesce(r.model, j.model)",
    "priority": "j.priority",
    "attempts": "j.attempt",
    "crashes": "j.crashes",
    "error_code": "r.error_code",
    "error_message": "r.error_message",
    "finish_reason": "r.finish_reason",
    "worker_id": "r.worker_id",
    "prompt_tokens": "r.prompt_tokens",
    "completion_tokens": "r.completion_tokens",
}
_UNFINISHED = "('queued', 'running')"


class UpkeepStore:
    """The part of the store that deals with what has ended."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def retry_where(
        self,
        *,
        batch_id: str | None,
        states: Collection[JobState],
        where: Sequence[Condition] = (),
        rewrite: Rewrite | None = None,
    ) -> int:
        """Queue again the jobs (of a batch, or of all) in one of ``states`` that meet ``where``; returns how many.

        Args:
            rewrite: changes each job's body. It is asked about all of them before the first one is touched.

        Raises:
            Whatever ``rewrite`` raises; nothing was changed then.
        """
        assert all(JobState.QUEUED in LEGAL_MOVES[state] for state in states)
        condition, values = _picked(batch_id, where)
        if rewrite is not None:
            for state in states:
                self._for_each_chunk(state, condition, values, partial(self._rewrite, rewrite=rewrite))
        return sum(
            self._for_each_chunk(state, condition, values, partial(self._queue_again, start=state, rewrite=rewrite))
            for state in states
        )

    def _queue_again(self, conn: Connection, seqs: list[int], *, start: JobState, rewrite: Rewrite | None) -> int:
        bodies = [] if rewrite is None else self._rewrite(conn, seqs, rewrite)
        moved = set(moves.try_again(self._db, conn, seqs, start=start))
        changed = [body for body in bodies if body["seq"] in moved]
        if changed:
            value = "CAST(:body AS json)" if self._db.on_postgres else ":body"
            conn.execute(sa.text(f"UPDATE job_payloads SET body = {value} WHERE seq = :seq"), changed)
        return len(moved)

    def _rewrite(self, conn: Connection, seqs: list[int], rewrite: Rewrite) -> list[dict[str, Any]]:
        statement = sa.text(f"""
        SELECT j.seq, j.job_id, j.endpoint, p.body FROM jobs j JOIN job_payloads p ON p.seq = j.seq
        WHERE j.seq {self._db.among("seqs")} AND {HAS_PROMPT} ORDER BY j.seq
        """).columns(body=sa.JSON())
        rows = conn.execute(statement, {"seqs": self._db.numbers(seqs)}).all()
        privacy, rewritten = self._db.privacy, []
        for row in rows:
            body = rewrite(Endpoint(row.endpoint), privacy.open_json(row.body, row.job_id, "body"))
            rewritten.append({"seq": row.seq, "body": json_text(privacy.seal_json(body, row.job_id, "body"))})
        return rewritten

    def _for_each_chunk(
        self,
        state: JobState,
        condition: str,
        values: dict[str, Any],
        work: Callable[[Connection, list[int]], Any],
    ) -> int:
        """``work`` on the picked jobs in ``state``, a chunk a transaction, forward only; the sum of its counts."""
        total = after = 0
        statement = sa.text(f"""
        SELECT j.seq FROM jobs j LEFT JOIN results r ON r.seq = j.seq
        WHERE j.state = '{state.value}' AND j.seq > :after AND {condition}
        ORDER BY j.seq LIMIT {CHUNK} {self._db.for_update("j")}
        """)

        def step(conn: Connection) -> tuple[list[int], Any]:
            seqs = list(conn.execute(statement, {**values, "after": after}).scalars())
            return seqs, work(conn, seqs) if seqs else 0

        while True:
            seqs, done = self._db.write(step)
            if not seqs:
                return total
            total += done if isinstance(done, int) else len(done)
            after = seqs[-1]

    def num_forgotten(
        self, *, batch_id: str | None, states: Collection[JobState], where: Sequence[Condition] = ()
    ) -> int:
        """How many of the jobs that ``retry_where`` would take cannot run again, since their prompt was forgotten."""
        condition, values = _picked(batch_id, where)
        statement = sa.text(f"""
        SELECT count(*) FROM jobs j LEFT JOIN results r ON r.seq = j.seq JOIN job_payloads p ON p.seq = j.seq
        WHERE j.state IN ({", ".join(f"'{state.value}'" for state in states)}) AND NOT {HAS_PROMPT} AND {condition}
        """)
        with self._db.reading() as conn:
            return int(conn.execute(statement, values).scalar_one())

    def dead_letters(
        self, *, batch_id: str | None = None, where: Sequence[Condition] = (), limit: int = 100
    ) -> list[DeadLetter]:
        """The jobs that took their workers down with them, newest first."""
        condition, values = _picked(batch_id, where)
        statement = sa.text(f"""
        SELECT j.job_id, j.batch_id, j.custom_id, j.line_no, j.queue, j.crashes, r.error_code, r.error_message,
               r.finished_at
        FROM jobs j JOIN results r ON r.seq = j.seq
        WHERE j.state = 'dead' AND {condition} ORDER BY j.seq DESC LIMIT :limit
        """).columns(finished_at=Instant())
        with self._db.reading() as conn:
            return [DeadLetter(**row) for row in conn.execute(statement, {**values, "limit": limit}).mappings()]

    def num_dead(self, *, batch_id: str | None = None, where: Sequence[Condition] = ()) -> int:
        """How many dead letters there are."""
        condition, values = _picked(batch_id, where)
        statement = sa.text(
            f"SELECT count(*) FROM jobs j JOIN results r ON r.seq = j.seq WHERE j.state = 'dead' AND {condition}"
        )
        with self._db.reading() as conn:
            return int(conn.execute(statement, values).scalar_one())

    def drop_dead(self, *, batch_id: str | None = None, where: Sequence[Condition] = ()) -> int:
        """Delete dead letters for good, with their prompts; returns how many. Those stay whose sender is to be told."""
        condition, values = _picked(batch_id, where)
        told = "NOT EXISTS (SELECT 1 FROM outbox o WHERE o.seq = j.seq)"
        return self._for_each_chunk(JobState.DEAD, f"{condition} AND {told}", values, self._delete)

    def num_queued(self, queue: str, *, at_most: int) -> int:
        """How many jobs of ``queue`` wait to be run; counting stops at ``at_most``."""
        statement = sa.text("""
        SELECT count(*) FROM (SELECT 1 FROM jobs WHERE queue = :queue AND state = 'queued' LIMIT :at_most) AS waiting
        """)
        with self._db.reading() as conn:
            return int(conn.execute(statement, {"queue": queue, "at_most": at_most}).scalar_one())

    def prune(self, *, older_than_s: float, dry_run: bool = False) -> PruneReport:
        """Delete what ended more than ``older_than_s`` seconds ago.

        Batches go whole, once their last job ended that long ago; then jobs without a batch, ended workers and
        their samples. What still has to be told (the outbox, webhooks) stays.
        """
        cutoff = self._cutoff(older_than_s)
        batch_ids = self._old_batches(cutoff)
        if dry_run:
            with self._db.reading() as conn:
                num_jobs = self._count_jobs(conn, batch_ids) + len(self._loose_jobs(conn, cutoff, limit=None))
            return PruneReport(batches=len(batch_ids), jobs=num_jobs, workers=0)
        num_jobs = sum(self._prune_batch(batch_id) for batch_id in batch_ids)
        while True:
            deleted = self._db.write(lambda conn: self._delete(conn, self._loose_jobs(conn, cutoff, limit=CHUNK)))
            num_jobs += deleted
            if not deleted:
                break
        num_workers = self._db.write(lambda conn: self._delete_workers(conn, cutoff))
        return PruneReport(batches=len(batch_ids), jobs=num_jobs, workers=num_workers)

    def _cutoff(self, older_than_s: float) -> Any:
        """One instant for the whole pruning, by the database's clock."""
        statement = sa.text(f"SELECT {self._db.now_plus('ago')}")
        with self._db.reading() as conn:
            return conn.execute(statement, {"ago": -older_than_s}).scalar_one()

    def _old_batches(self, cutoff: Any) -> list[str]:
        statement = sa.text(f"""
        SELECT b.batch_id FROM batches b
        WHERE b.created_at < :cutoff
          AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.batch_id = b.batch_id AND j.state IN {_UNFINISHED})
          AND NOT EXISTS (SELECT 1 FROM webhooks w
                          WHERE w.batch_id = b.batch_id AND w.state IN ('waiting', 'pending'))
          AND NOT EXISTS (SELECT 1 FROM jobs j LEFT JOIN results r ON r.seq = j.seq
                          LEFT JOIN outbox o ON o.seq = j.seq
                          WHERE j.batch_id = b.batch_id AND (r.finished_at >= :cutoff OR o.id IS NOT NULL))
        ORDER BY b.batch_id
        """)
        with self._db.reading() as conn:
            return list(conn.execute(statement, {"cutoff": cutoff}).scalars())

    def _prune_batch(self, batch_id: str) -> int:
        """A batch, a chunk at a time; should somebody retry one of its jobs meanwhile, what is left stays."""
        total = 0
        while True:
            deleted = self._db.write(lambda conn: self._delete(conn, self._ended_jobs(conn, batch_id)))
            total += deleted
            if not deleted:
                break
        statement = sa.text("""
        DELETE FROM batches WHERE batch_id = :batch_id
           AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.batch_id = :batch_id)
        """)
        flow = sa.text("""
        DELETE FROM flows WHERE batch_id = :batch_id
           AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.batch_id = :batch_id)
        """)
        self._db.write(lambda conn: [conn.execute(one, {"batch_id": batch_id}) for one in (statement, flow)])
        return total

    def _ended_jobs(self, conn: Connection, batch_id: str) -> list[int]:
        statement = sa.text(f"""
        SELECT j.seq FROM jobs j WHERE j.batch_id = :batch_id AND j.state NOT IN {_UNFINISHED}
        ORDER BY j.seq LIMIT {CHUNK} {self._db.for_update("j")}
        """)
        return list(conn.execute(statement, {"batch_id": batch_id}).scalars())

    def _loose_jobs(self, conn: Connection, cutoff: Any, *, limit: int | None) -> list[int]:
        statement = sa.text(f"""
        SELECT j.seq FROM jobs j JOIN results r ON r.seq = j.seq
        WHERE j.batch_id IS NULL AND r.finished_at < :cutoff
          AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.seq = j.seq)
        ORDER BY j.seq {"" if limit is None else f"LIMIT {limit}"}
        """)
        return list(conn.execute(statement, {"cutoff": cutoff}).scalars())

    def _count_jobs(self, conn: Connection, batch_ids: Sequence[str]) -> int:
        statement = sa.text(f"SELECT count(*) FROM jobs WHERE batch_id {self._db.among_texts('batch_ids')}")
        return int(conn.execute(statement, {"batch_ids": self._db.texts(batch_ids)}).scalar_one())

    def _delete(self, conn: Connection, seqs: list[int]) -> int:
        """With everything that belongs to them, by the foreign keys."""
        if not seqs:
            return 0
        statement = sa.text(f"""
        DELETE FROM jobs WHERE seq {self._db.among("seqs")} AND state NOT IN {_UNFINISHED}
        """)
        return conn.execute(statement, {"seqs": self._db.numbers(seqs)}).rowcount

    def _delete_workers(self, conn: Connection, cutoff: Any) -> int:
        conn.execute(sa.text("DELETE FROM worker_stats WHERE at < :cutoff"), {"cutoff": cutoff})
        conn.execute(sa.text("DELETE FROM tenant_usage WHERE day < :day"), {"day": str(cutoff)[:10]})
        statement = sa.text("""
        DELETE FROM workers WHERE state <> 'live' AND ended_at < :cutoff
           AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.owner = workers.worker_id AND j.state = 'running')
        """)
        return conn.execute(statement, {"cutoff": cutoff}).rowcount


def _picked(batch_id: str | None, where: Sequence[Condition]) -> tuple[str, dict[str, Any]]:
    """A condition on ``jobs j LEFT JOIN results r`` and its parameters."""
    clauses = ["TRUE"]
    values: dict[str, Any] = {}
    if batch_id is not None:
        clauses.append("j.batch_id = :batch_id")
        values["batch_id"] = batch_id
    for i, condition in enumerate(where):
        column = _COLUMN_BY_FIELD[condition.field]
        if condition.operator is Operator.NOT_EQUAL:  # a field that is null differs from every value
            clauses.append(f"({column} IS NULL OR {column} <> :value{i})")
        else:
            clauses.append(f"{column} {condition.operator.value.upper()} :value{i}")
        values[f"value{i}"] = condition.value
    return " AND ".join(clauses), values
