"""What people read from the store: progress, results, errors, summaries. Changes nothing.

Invariant: a batch of any size is read in pages by key, never in one transaction, so that a slow reader holds back
neither vacuum nor the workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.errors import UnknownBatch
from kvq.worker.jobs import TERMINAL_STATES, JobState
from kvq.worker.schema import (
    batch_progress,
    batches,
    error_top,
    job_attempts,
    job_payloads,
    jobs,
    latency_percentiles,
    results,
)
from kvq.worker.store_records import BatchProgress, BatchSummary, ErrorCount, Percentiles, ResultRow
from kvq.worker.store_rows import METRIC_COLUMNS, result_row
from kvq.worker.store_webhooks import read_webhook

PAGE = 1_000


class ReadingStore:
    """The part of the store that answers questions."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def batch_progress(self, batch_id: str) -> BatchProgress:
        """How far a batch is. Raises UnknownBatch."""
        query = sa.select(batch_progress).where(batch_progress.c.batch_id == batch_id)
        with self._db.reading() as conn:
            row = conn.execute(query).mappings().first()
        if row is None:
            raise UnknownBatch(batch_id)
        return BatchProgress(**row)

    def batch_finished(self, batch_id: str) -> bool:
        """True when nothing of a batch is left to do; at once, where ``batch_progress`` reads all its rows."""
        unfinished = sa.exists().where(
            jobs.c.batch_id == batch_id, jobs.c.state.in_([JobState.QUEUED.value, JobState.RUNNING.value])
        )
        with self._db.reading() as conn:
            return not conn.execute(sa.select(unfinished)).scalar_one()

    def list_batches(self, limit: int = 20) -> list[BatchProgress]:
        """The newest batches, newest first."""
        # The newest ids first, so that the view adds up only their jobs.
        newest = sa.select(batches.c.batch_id).order_by(batches.c.created_at.desc()).limit(limit)
        query = (
            sa.select(batch_progress)
            .where(batch_progress.c.batch_id.in_(newest))
            .order_by(batch_progress.c.created_at.desc(), batch_progress.c.batch_id)
        )
        with self._db.reading() as conn:
            return [BatchProgress(**row) for row in conn.execute(query).mappings()]

    def find_batch(self, prefix_or_name: str) -> str:
        """The id of the batch with that id, that name (the newest of several), or the one id that begins so.

        Raises:
            UnknownBatch: none does, or several begin so.
        """
        wanted = prefix_or_name
        exact = (
            sa.select(batches.c.batch_id)
            .where((batches.c.batch_id == wanted) | (batches.c.name == wanted))
            .order_by((batches.c.batch_id == wanted).desc(), batches.c.created_at.desc())
        )
        beginning = sa.select(batches.c.batch_id).where(batches.c.batch_id.startswith(wanted, autoescape=True))
        with self._db.reading() as conn:
            found = conn.execute(exact.limit(1)).scalar()
            if found is not None:
                return str(found)
            matches = tuple(conn.execute(beginning.order_by(batches.c.batch_id).limit(6)).scalars()) if wanted else ()
        if len(matches) != 1:
            raise UnknownBatch(wanted, matches)
        return str(matches[0])

    def job(self, job_id: str) -> ResultRow | None:
        """One job, None where there is none with that id."""
        with self._db.reading() as conn:
            row = conn.execute(_RESULT_ROWS.where(jobs.c.job_id == job_id)).mappings().first()
        return None if row is None else result_row(row, self._db.privacy)

    def job_body(self, job_id: str) -> dict[str, Any] | None:
        """The request body a job was submitted with, None where there is no such job, or its prompt was forgotten."""
        query = sa.select(job_payloads.c.body).join(jobs, jobs.c.seq == job_payloads.c.seq)
        with self._db.reading() as conn:
            body = conn.execute(query.where(jobs.c.job_id == job_id)).scalar()
        opened: dict[str, Any] | None = self._db.privacy.open_json(body, job_id, "body")
        return opened

    def iter_results(self, batch_id: str, *, states: Collection[JobState] | None = None) -> Iterator[ResultRow]:
        """The jobs of a batch in order of line number (jobs without one last, in order of arrival).

        Jobs that are not finished are included unless ``states`` leaves them out.
        """
        query = _RESULT_ROWS.where(jobs.c.batch_id == batch_id).limit(PAGE)
        if states is not None:
            query = query.where(jobs.c.state.in_([state.value for state in states]))
        numbered = query.where(jobs.c.line_no.is_not(None)).order_by(jobs.c.line_no, jobs.c.seq)
        yield from self._pages(numbered, sa.tuple_(jobs.c.line_no, jobs.c.seq), ("line_no", "seq"))
        others = query.where(jobs.c.line_no.is_(None)).order_by(jobs.c.seq)
        yield from self._pages(others, sa.tuple_(jobs.c.seq), ("seq",))

    def _pages(self, query: sa.Select[Any], key: sa.Tuple, key_names: tuple[str, ...]) -> Iterator[ResultRow]:
        page = query
        while True:
            with self._db.reading() as conn:
                rows = conn.execute(page).mappings().all()
            yield from (result_row(row, self._db.privacy) for row in rows)
            if len(rows) < PAGE:
                return
            page = query.where(key > tuple(rows[-1][name] for name in key_names))

    def errors_top(self, batch_id: str, limit: int = 10) -> list[ErrorCount]:
        """The kinds of error of a batch, most frequent first."""
        with self._db.reading() as conn:
            return self._errors(conn, batch_id, limit)

    def _errors(self, conn: Connection, batch_id: str, limit: int) -> list[ErrorCount]:
        query = (
            sa.select(error_top)
            .where(error_top.c.batch_id == batch_id)
            .order_by(error_top.c.num_jobs.desc(), error_top.c.error_code)
            .limit(limit)
        )
        return [
            ErrorCount(
                code=row["error_code"],
                num_jobs=row["num_jobs"],
                example=row["example_message"] or "",
                first_line_no=row["first_line_no"],
            )
            for row in conn.execute(query).mappings()
        ]

    def summary(self, batch_id: str) -> BatchSummary:
        """What a batch cost so far. Raises UnknownBatch."""
        progress = self.batch_progress(batch_id)
        with self._db.reading() as conn:
            percentiles = self._percentiles(conn, batch_id)
            wall = self._db.seconds_between("min(j.claimed_at)", "max(r.finished_at)")
            totals = conn.execute(
                sa.text(f"""
                SELECT {wall} AS wall_s, CAST(coalesce(sum(r.computed_tokens), 0) AS bigint) AS computed_tokens,
                       CAST(coalesce(sum(r.preemptions), 0) AS bigint) AS preemptions
                FROM jobs j JOIN results r ON r.seq = j.seq
                WHERE j.batch_id = :batch_id AND j.claimed_at IS NOT NULL
                """),
                {"batch_id": batch_id},
            ).one()
            retried = conn.execute(_NUM_RETRIED.where(jobs.c.batch_id == batch_id)).scalar_one()
            errors = self._errors(conn, batch_id, 10)
            webhook = read_webhook(conn, batch_id)
        return BatchSummary(
            progress=progress,
            queue=percentiles.get("queue"),
            ttft=percentiles.get("ttft"),
            tpot=percentiles.get("tpot"),
            e2e=percentiles.get("e2e"),
            wall_s=totals.wall_s,
            computed_tokens=totals.computed_tokens,
            preemptions=totals.preemptions,
            retried_jobs=retried,
            errors=tuple(errors),
            webhook=webhook,
        )

    def check_integrity(self) -> list[str]:
        """Sentences about rows that contradict each other; empty when all is well. For tests and doctors."""
        problems = []
        with self._db.reading() as conn:
            for sentence, query in _CONTRADICTIONS.items():
                seqs = list(conn.execute(sa.text(f"{query} ORDER BY j.seq LIMIT 5")).scalars())
                if seqs:
                    problems.append(f"{sentence}: jobs {', '.join(map(str, seqs))}")
        return problems

    def _percentiles(self, conn: Connection, batch_id: str) -> dict[str, Percentiles]:
        view = latency_percentiles.c
        query = sa.select(latency_percentiles).where(view.batch_id == batch_id).order_by(view.num_jobs)
        # A batch is nearly always of one model; where it is not, the one with most jobs stands for it.
        return {
            row["measure"]: Percentiles(
                num_jobs=row["num_jobs"],
                p50_ms=row["p50_ms"],
                p90_ms=row["p90_ms"],
                p95_ms=row["p95_ms"],
                p99_ms=row["p99_ms"],
                max_ms=row["max_ms"],
            )
            for row in conn.execute(query).mappings()
        }


_RESULT_ROWS = sa.select(
    jobs.c.seq,
    jobs.c.job_id,
    jobs.c.batch_id,
    jobs.c.custom_id,
    jobs.c.line_no,
    jobs.c.state,
    jobs.c.endpoint,
    sa.func.coalesce(results.c.model, jobs.c.model).label("model"),
    results.c.text,
    results.c.finish_reason,
    results.c.response,
    results.c.error_code,
    results.c.error_message,
    *(results.c[name] for name in METRIC_COLUMNS),
    jobs.c.attempt.label("attempts"),
    jobs.c.crashes,
    sa.func.coalesce(results.c.worker_id, jobs.c.owner).label("worker_id"),
    jobs.c.created_at,
    jobs.c.claimed_at.label("started_at"),
    results.c.finished_at,
    results.c.model_defaults,
).select_from(jobs.outerjoin(results, results.c.seq == jobs.c.seq))

_NUM_RETRIED = (
    sa.select(sa.func.count(sa.distinct(jobs.c.seq)))
    .select_from(jobs.join(job_attempts, job_attempts.c.seq == jobs.c.seq))
    .where(job_attempts.c.outcome == "lost", jobs.c.attempt > job_attempts.c.attempt)
)

_TERMINAL = ", ".join(f"'{state.value}'" for state in sorted(TERMINAL_STATES))
_CONTRADICTIONS = {
    "in a terminal state without a result": f"""
        SELECT j.seq FROM jobs j LEFT JOIN results r ON r.seq = j.seq
        WHERE j.state IN ({_TERMINAL}) AND r.seq IS NULL""",
    "with a result, yet not in a terminal state": f"""
        SELECT j.seq FROM jobs j JOIN results r ON r.seq = j.seq WHERE j.state NOT IN ({_TERMINAL})""",
    "succeeded with an error, or ended otherwise without one": """
        SELECT j.seq FROM jobs j JOIN results r ON r.seq = j.seq
        WHERE (j.state = 'succeeded') = (r.error_code IS NOT NULL)""",
    "without a payload": """
        SELECT j.seq FROM jobs j LEFT JOIN job_payloads p ON p.seq = j.seq WHERE p.seq IS NULL""",
    "running without exactly one open attempt, or not running with one": """
        SELECT j.seq FROM jobs j
        WHERE (SELECT count(*) FROM job_attempts a WHERE a.seq = j.seq AND a.ended_at IS NULL)
              <> CASE WHEN j.state = 'running' THEN 1 ELSE 0 END""",
    "announced in the outbox, yet not in a terminal state": f"""
        SELECT j.seq FROM jobs j JOIN outbox o ON o.seq = j.seq WHERE j.state NOT IN ({_TERMINAL})""",
}
