"""The bulk statements for PostgreSQL: insert, claim, finish, each one round trip for any number of rows.

Knows the tables and nothing of transactions. Invariants: rows are locked in order of seq where the statement
waits for locks, and skipped where it must not wait; a data-modifying CTE repeats its condition on the row, since
another transaction may have changed it between the snapshot and the lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import psycopg
import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.jobs import JobOutcome, NewJob
from kvq.worker.schema import Instant
from kvq.worker.store_rows import JOB_COLUMNS, OUTCOME_COLUMNS, job_values, outcome_values

CLAIMED_TYPES: dict[str, Any] = {"body": sa.JSON(), "celery": sa.JSON(), "deadline": Instant()}


class PostgresBulk:
    """Set-based statements with array parameters; COPY for what comes in."""

    def insert(
        self, conn: Connection, jobs: Sequence[NewJob], batch_id: str | None, flows: Mapping[str, int]
    ) -> list[str]:
        """Insert the jobs whose id is new, in order; returns their ids. Ids must be distinct.

        ``flows``: by tenant.
        """
        conn.exec_driver_sql(_CREATE_INCOMING)
        driver = cast("psycopg.Connection[Any]", conn.connection.driver_connection)
        columns = ", ".join(JOB_COLUMNS)
        with (
            driver.cursor() as cursor,
            cursor.copy(f"COPY kvq_incoming (place, {columns}) FROM STDIN") as copy,
        ):
            for place, job in enumerate(jobs):
                values = job_values(job, flows[job.tenant])
                copy.write_row((place, *(values[name] for name in JOB_COLUMNS)))
        return list(conn.execute(_INSERT, {"batch_id": batch_id}).scalars())

    def after_load(self, conn: Connection) -> None:
        """Fresh statistics: until autovacuum comes by, the planner would take the table for a small one."""
        conn.exec_driver_sql("ANALYZE jobs, job_payloads")

    def claim(self, conn: Connection, worker_id: str, seqs: Sequence[int]) -> Sequence[sa.RowMapping]:
        """Take those of ``seqs`` that are free and due and that nobody else is taking at this moment."""
        return conn.execute(_CLAIM, {"worker_id": worker_id, "seqs": list(seqs)}).mappings().all()

    def finish(self, conn: Connection, worker_id: str, outcomes: Sequence[JobOutcome]) -> set[int]:
        """Write the outcomes of jobs still held by that claim; returns the seqs written."""
        rows = [outcome_values(outcome) for outcome in outcomes]
        arrays = {name: [row[name] for row in rows] for name in OUTCOME_COLUMNS}
        return set(conn.execute(_FINISH, {**arrays, "worker_id": worker_id}).scalars())


# A temporary table lives as long as its connection: made once, emptied at every commit.
_CREATE_INCOMING = (
    "CREATE TEMPORARY TABLE IF NOT EXISTS kvq_incoming (place integer, "
    + ", ".join(f"{name} {pg_type}" for name, pg_type in JOB_COLUMNS.items())
    + ") ON COMMIT DELETE ROWS"
)

# Numbered in the order given, inserted in order of id: two that insert the same ids in different orders would wait
# for each other at the unique index.
_INSERT = sa.text("""
WITH numbered AS MATERIALIZED (
    SELECT nextval(pg_get_serial_sequence('jobs', 'seq')) AS seq, i.*
    FROM (SELECT * FROM kvq_incoming ORDER BY place) i
), fresh AS (
    INSERT INTO jobs (seq, job_id, batch_id, custom_id, line_no, queue, endpoint, model, priority, state,
                      not_before, deadline, flow, dedup_key)
    SELECT seq, job_id, CAST(:batch_id AS text), custom_id, line_no, queue, endpoint, model, priority, state,
           not_before, deadline, flow, dedup_key
    FROM numbered ORDER BY job_id
    ON CONFLICT (job_id) DO NOTHING
    RETURNING seq, job_id
), payloads AS (
    INSERT INTO job_payloads (seq, body, celery)
    SELECT fresh.seq, i.body, i.celery FROM fresh JOIN kvq_incoming i USING (job_id)
), refused AS (
    INSERT INTO results (seq, attempt, error_code, error_message, model)
    SELECT fresh.seq, 0, i.error_code, i.error_message, i.model
    FROM fresh JOIN kvq_incoming i USING (job_id) WHERE i.state = 'failed'
), told AS (
    INSERT INTO outbox (kind, seq)
    SELECT 'celery', fresh.seq
    FROM fresh JOIN kvq_incoming i USING (job_id) WHERE i.state = 'failed' AND i.celery IS NOT NULL
)
SELECT job_id FROM fresh ORDER BY seq
""")

_CLAIM = sa.text("""
WITH wanted AS MATERIALIZED (
    SELECT j.seq
    FROM jobs j
    WHERE j.seq = ANY(CAST(:seqs AS bigint[])) AND j.state = 'queued' AND NOT j.cancel_requested
      AND (j.not_before IS NULL OR j.not_before <= clock_timestamp())
      AND (j.deadline IS NULL OR j.deadline > clock_timestamp())
      AND NOT EXISTS (SELECT 1 FROM queues q WHERE q.name = j.queue AND q.paused)
      AND EXISTS (SELECT 1 FROM workers w WHERE w.worker_id = :worker_id AND w.state = 'live')
    FOR UPDATE OF j SKIP LOCKED
), moved AS (
    UPDATE jobs j
    SET state = 'running', owner = :worker_id, attempt = j.attempt + 1, claimed_at = clock_timestamp()
    FROM wanted
    WHERE j.seq = wanted.seq AND j.state = 'queued'
    RETURNING j.*
), noted AS (
    INSERT INTO job_attempts (seq, attempt, worker_id, claimed_at)
    SELECT seq, attempt, owner, claimed_at FROM moved
    RETURNING seq, id
)
SELECT m.seq, m.job_id, m.batch_id, m.custom_id, m.endpoint, m.priority, m.attempt, n.id AS claim_id, m.crashes,
       m.deadline,
       CAST(1000 * extract(epoch FROM m.claimed_at - greatest(m.created_at, m.not_before))
            AS double precision) AS queue_ms,
       p.body, p.celery
FROM moved m JOIN noted n ON n.seq = m.seq JOIN job_payloads p ON p.seq = m.seq
""").columns(**CLAIMED_TYPES)

_COPIED = [name for name in OUTCOME_COLUMNS if name not in ("claim_id", "state", "queue_ms", "e2e_ms")]
_RESULT_COLUMNS = ", ".join(_COPIED)
_GIVEN_RESULT_COLUMNS = ", ".join(f"g.{name}" for name in _COPIED)

_FINISH = sa.text(f"""
WITH given AS (
    SELECT * FROM unnest({", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in OUTCOME_COLUMNS.items())})
        AS g({", ".join(OUTCOME_COLUMNS)})
), held AS MATERIALIZED (
    -- By claim alone: with the owner named here too, its index would be walked over all that the worker runs.
    -- The claim is locked too: one given back since the snapshot is then seen to have ended.
    SELECT j.seq, a.id AS claim_id
    FROM jobs j JOIN job_attempts a ON a.seq = j.seq
    WHERE a.id = ANY(CAST(:claim_id AS bigint[])) AND a.ended_at IS NULL ORDER BY j.seq FOR UPDATE
), moved AS (
    UPDATE jobs j SET state = g.state
    FROM given g JOIN held ON held.claim_id = g.claim_id AND held.seq = g.seq
    WHERE j.seq = held.seq AND j.attempt = g.attempt AND j.state = 'running' AND j.owner = :worker_id
    RETURNING j.seq, held.claim_id, j.attempt, j.state, j.claimed_at, greatest(j.created_at, j.not_before) AS due_at
), written AS (
    INSERT INTO results ({_RESULT_COLUMNS}, queue_ms, e2e_ms, worker_id, finished_at)
    SELECT {_GIVEN_RESULT_COLUMNS},
           coalesce(g.queue_ms, 1000 * extract(epoch FROM m.claimed_at - m.due_at)),
           coalesce(g.e2e_ms, 1000 * extract(epoch FROM clock_timestamp() - m.due_at)),
           :worker_id, clock_timestamp()
    FROM moved m JOIN given g ON g.claim_id = m.claim_id AND g.attempt = m.attempt
), noted AS (
    UPDATE job_attempts a SET ended_at = clock_timestamp(), outcome = m.state
    FROM moved m WHERE a.id = m.claim_id AND a.ended_at IS NULL
), told AS (
    INSERT INTO outbox (kind, seq, worker_id)
    SELECT 'celery', m.seq, :worker_id FROM moved m JOIN job_payloads p ON p.seq = m.seq
    WHERE p.celery IS NOT NULL
)
SELECT seq FROM moved
""")
