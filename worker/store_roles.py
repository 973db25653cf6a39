"""Roles: who may read the database without being able to change it. PostgreSQL only.

Owns the grants. Invariant: a reader sees the views and nothing else: neither prompts nor Celery's headers, which
are in the tables alone.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.errors import StoreError

# Answers and errors are among what they show; prompts are not.
READABLE_VIEWS = (
    "batch_progress",
    "error_top",
    "job_results",
    "job_summary",
    "latency_percentiles",
    "prefix_savings",
    "throughput_by_minute",
    "worker_health",
)
_MAX_NAME_BYTES = 63


def grant_reader(url: str, role: str) -> bool:
    """Let ``role`` read the views; it is created, without a login, where there is none. True if it was created.

    Raises:
        StoreError: the database is no PostgreSQL, or does not allow it.
    """
    if not 0 < len(role.encode()) <= _MAX_NAME_BYTES or "\x00" in role:
        raise StoreError(f"a role's name has 1 to {_MAX_NAME_BYTES} bytes")
    db = Database(url)
    try:
        if not db.on_postgres:
            raise StoreError("SQLite has no roles: whoever may read the file may read all of it")
        return db.write(lambda conn: _grant(conn, role))
    finally:
        db.close()


def _grant(conn: Connection, role: str) -> bool:
    quote = conn.dialect.identifier_preparer.quote_identifier
    name = quote(role)
    known = conn.execute(sa.text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}).first()
    if known is None:
        conn.exec_driver_sql(f"CREATE ROLE {name} NOLOGIN")
    schema = quote(conn.execute(sa.text("SELECT current_schema()")).scalar_one())
    conn.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
    conn.exec_driver_sql(f"GRANT SELECT ON {', '.join(f'{schema}.{view}' for view in READABLE_VIEWS)} TO {name}")
    return known is None
