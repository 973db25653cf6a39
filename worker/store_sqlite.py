"""The bulk statements for SQLite: insert, claim, finish.

Knows the tables and nothing of transactions, but relies on one: it is called inside BEGIN IMMEDIATE, where this
connection is the only writer, so what it has just read stays true while it writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.jobs import JobOutcome, NewJob
from kvq.worker.schema import Instant, instant_text
from kvq.worker.store_rows import OUTCOME_COLUMNS, job_values, outcome_values

CLAIMED_TYPES: dict[str, Any] = {"body": sa.JSON(), "celery": sa.JSON(), "deadline": Instant()}


class SqliteBulk:
    """executemany for what comes in and goes out, json_each for lists of rows."""

    def insert(
        self, conn: Connection, jobs: Sequence[NewJob], batch_id: str | None, flows: Mapping[str, int]
    ) -> list[str]:
        """Insert the jobs whose id is new, in order; returns their ids. Ids must be distinct.

        ``flows``: by tenant.
        """
        # Numbered here rather than by SQLite, so that the payloads can follow without asking for the numbers.
        last = conn.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").scalar() or 0
        rows = []
        for seq, job in enumerate(jobs, start=last + 1):
            values = job_values(job, flows[job.tenant])
            rows.append(
                {
                    **values,
                    "seq": seq,
                    "batch_id": batch_id,
                    "not_before": _text_of(values["not_before"]),
                    "deadline": _text_of(values["deadline"]),
                }
            )
        conn.exec_driver_sql(_INSERT_JOB, rows)
        conn.exec_driver_sql(_INSERT_PAYLOAD, rows)
        if any(row["state"] == "failed" for row in rows):
            conn.exec_driver_sql(_INSERT_REFUSED, [row for row in rows if row["state"] == "failed"])
            conn.exec_driver_sql(_TELL_REFUSED, {"last": last})
        fresh = conn.exec_driver_sql("SELECT job_id FROM jobs WHERE seq > :last ORDER BY seq", {"last": last})
        return list(fresh.scalars())

    def after_load(self, conn: Connection) -> None:
        """Nothing: SQLite plans our statements the same whatever the size of the tables."""

    def claim(self, conn: Connection, worker_id: str, seqs: Sequence[int]) -> Sequence[sa.RowMapping]:
        """Take those of ``seqs`` that are free and due."""
        parameters = {"worker_id": worker_id, "seqs": json.dumps(list(seqs))}
        taken = list(conn.execute(_CLAIM, parameters).scalars())
        if not taken:
            return []
        parameters["seqs"] = json.dumps(taken)
        conn.execute(_NOTE_CLAIM, parameters)
        return conn.execute(_CLAIMED, parameters).mappings().all()

    def finish(self, conn: Connection, worker_id: str, outcomes: Sequence[JobOutcome]) -> set[int]:
        """Write the outcomes of jobs still held by that claim; returns the seqs written."""
        fences = json.dumps([[outcome.seq, outcome.claim_id, outcome.attempt] for outcome in outcomes])
        held = set(map(tuple, conn.execute(_HELD, {"worker_id": worker_id, "fences": fences})))
        rows = [
            {**outcome_values(outcome), "worker_id": worker_id}
            for outcome in outcomes
            if (outcome.seq, outcome.claim_id, outcome.attempt) in held
        ]
        if not rows:
            return set()
        conn.exec_driver_sql(_WRITE_RESULT, rows)
        conn.exec_driver_sql(_END_JOB, rows)
        conn.exec_driver_sql(_END_ATTEMPT, rows)
        seqs = {row["seq"] for row in rows}
        conn.execute(_TELL, {"worker_id": worker_id, "seqs": json.dumps(sorted(seqs))})
        return seqs


def _text_of(value: datetime | None) -> str | None:
    return None if value is None else instant_text(value)


_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"

_INSERT_JOB = """
INSERT INTO jobs (seq, job_id, batch_id, custom_id, line_no, queue, endpoint, model, priority, state, not_before,
                  deadline, flow, dedup_key)
VALUES (:seq, :job_id, :batch_id, :custom_id, :line_no, :queue, :endpoint, :model, :priority, :state, :not_before,
        :deadline, :flow, :dedup_key)
ON CONFLICT (job_id) DO NOTHING
"""

# Only where the job went in: an id that was there before has its payload already.
_INSERT_PAYLOAD = """
INSERT INTO job_payloads (seq, body, celery)
SELECT :seq, :body, :celery WHERE EXISTS (SELECT 1 FROM jobs WHERE seq = :seq)
"""

_INSERT_REFUSED = """
INSERT INTO results (seq, attempt, error_code, error_message, model)
SELECT :seq, 0, :error_code, :error_message, :model WHERE EXISTS (SELECT 1 FROM jobs WHERE seq = :seq)
"""

_TELL_REFUSED = """
INSERT INTO outbox (kind, seq)
SELECT 'celery', j.seq FROM jobs j JOIN job_payloads p ON p.seq = j.seq
WHERE j.seq > :last AND j.state = 'failed' AND p.celery IS NOT NULL
"""

_CLAIM = sa.text(f"""
UPDATE jobs
SET state = 'running', owner = :worker_id, attempt = attempt + 1, claimed_at = {_NOW}
WHERE seq IN (SELECT value FROM json_each(:seqs)) AND state = 'queued' AND NOT cancel_requested
  AND (not_before IS NULL OR not_before <= {_NOW})
  AND (deadline IS NULL OR deadline > {_NOW})
  AND NOT EXISTS (SELECT 1 FROM queues q WHERE q.name = jobs.queue AND q.paused)
  AND EXISTS (SELECT 1 FROM workers w WHERE w.worker_id = :worker_id AND w.state = 'live')
RETURNING seq
""")

_NOTE_CLAIM = sa.text("""
INSERT INTO job_attempts (seq, attempt, worker_id, claimed_at)
SELECT seq, attempt, owner, claimed_at FROM jobs WHERE seq IN (SELECT value FROM json_each(:seqs))
""")

_CLAIMED = sa.text("""
SELECT j.seq, j.job_id, j.batch_id, j.custom_id, j.endpoint, j.priority, j.attempt, a.id AS claim_id, j.crashes,
       j.deadline,
       (julianday(j.claimed_at) - julianday(max(j.created_at, coalesce(j.not_before, j.created_at))))
           * 86400000.0 AS queue_ms,
       p.body, p.celery
FROM jobs j JOIN job_payloads p ON p.seq = j.seq
JOIN job_attempts a ON a.seq = j.seq AND a.attempt = j.attempt AND a.ended_at IS NULL
WHERE j.seq IN (SELECT value FROM json_each(:seqs))
""").columns(**CLAIMED_TYPES)

# CROSS JOIN: SQLite then keeps this order, and does not walk all that the worker runs for each row given.
_HELD = sa.text("""
SELECT j.seq, a.id, j.attempt
FROM json_each(:fences) f CROSS JOIN job_attempts a ON a.id = json_extract(f.value, '$[1]')
CROSS JOIN jobs j ON j.seq = a.seq AND j.attempt = json_extract(f.value, '$[2]')
WHERE j.seq = json_extract(f.value, '$[0]') AND a.ended_at IS NULL AND j.state = 'running' AND j.owner = :worker_id
""")

_COLUMNS = [name for name in OUTCOME_COLUMNS if name not in ("seq", "claim_id", "state", "queue_ms", "e2e_ms")]

_WRITE_RESULT = f"""
INSERT INTO results (seq, {", ".join(_COLUMNS)}, queue_ms, e2e_ms, worker_id, finished_at)
SELECT j.seq, {", ".join(f":{name}" for name in _COLUMNS)},
       coalesce(:queue_ms, (julianday(j.claimed_at)
                            - julianday(max(j.created_at, coalesce(j.not_before, j.created_at)))) * 86400000.0),
       coalesce(:e2e_ms, (julianday('now')
                          - julianday(max(j.created_at, coalesce(j.not_before, j.created_at)))) * 86400000.0),
       :worker_id, {_NOW}
FROM jobs j WHERE j.seq = :seq
"""

_END_JOB = """
UPDATE jobs SET state = :state
WHERE seq = :seq AND attempt = :attempt AND owner = :worker_id AND state = 'running'
"""

_END_ATTEMPT = f"""
UPDATE job_attempts SET ended_at = {_NOW}, outcome = :state
WHERE id = :claim_id AND ended_at IS NULL
"""

_TELL = sa.text("""
INSERT INTO outbox (kind, seq, worker_id)
SELECT 'celery', p.seq, :worker_id FROM job_payloads p
WHERE p.seq IN (SELECT value FROM json_each(:seqs)) AND p.celery IS NOT NULL
""")
