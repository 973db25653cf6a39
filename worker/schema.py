"""The tables and views as SQLAlchemy sees them: names, types, and how their values become Python's.

Describes; creates nothing. The revisions in ``migrations/`` are what makes the tables, and a test holds the two
equal. Invariant: every time is an aware UTC datetime in Python, on both databases.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

metadata = sa.MetaData()


class Instant(TypeDecorator[datetime]):
    """A moment: timestamptz on PostgreSQL, text like ``2026-11-30 01:15:47.123`` in UTC on SQLite.

    The text sorts as the moments do, and SQLite's own date functions read it.
    """

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        """Plain text on SQLite: SQLAlchemy's own type would read .123 as 123 microseconds."""
        return dialect.type_descriptor(sa.Text() if dialect.name == "sqlite" else sa.DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Naive datetimes are refused: nobody knows what they mean."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone: pass an aware datetime, as in datetime.now(UTC)")
        value = value.astimezone(UTC)
        return instant_text(value) if dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Both spellings become aware UTC."""
        if value is None:
            return None
        if isinstance(value, str):
            return datetime.fromisoformat(value).replace(tzinfo=UTC)
        return value.astimezone(UTC)  # type: ignore[no-any-return]


def instant_text(value: datetime) -> str:
    """SQLite's spelling of an aware datetime."""
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ", timespec="milliseconds")


_BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _job_key() -> sa.Column[int]:
    return sa.Column(
        "seq", _BIG_KEY, sa.ForeignKey("jobs.seq", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )


queues = sa.Table(
    "queues",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("paused", sa.Boolean, nullable=False),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("batch_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text),
    sa.Column("source", sa.Text),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("seq", _BIG_KEY, primary_key=True),
    sa.Column("job_id", sa.Text, nullable=False, unique=True),
    sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.batch_id", ondelete="CASCADE")),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("line_no", sa.Integer),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("model", sa.Text),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("not_before", Instant),
    sa.Column("deadline", Instant),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("owner", sa.Text),
    sa.Column("claimed_at", Instant),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("flow", sa.BigInteger, nullable=False),
    sa.Column("dedup_key", sa.Text),
    sa.Column("same_as", sa.BigInteger),
    sa.Column("held", sa.Boolean, nullable=False),
)

job_payloads = sa.Table(
    "job_payloads",
    metadata,
    _job_key(),
    sa.Column("body", sa.JSON, nullable=False),
    sa.Column("celery", sa.JSON),
    sa.Column("forget_prompt", sa.Boolean, nullable=False),
    sa.Column("forget_answer", sa.Boolean, nullable=False),
)

results = sa.Table(
    "results",
    metadata,
    _job_key(),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("text", sa.Text),
    sa.Column("finish_reason", sa.Text),
    sa.Column("response", sa.JSON),
    sa.Column("error_code", sa.Text),
    sa.Column("error_message", sa.Text),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("computed_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("queue_ms", sa.Double),
    sa.Column("ttft_ms", sa.Double),
    sa.Column("tpot_ms", sa.Double),
    sa.Column("e2e_ms", sa.Double),
    sa.Column("prefill_ms", sa.Double),
    sa.Column("decode_ms", sa.Double),
    sa.Column("preemptions", sa.Integer, nullable=False),
    sa.Column("seed", sa.BigInteger),
    sa.Column("finished_at", Instant, nullable=False),
    sa.Column("served_from", sa.Text),
    sa.Column("model_defaults", sa.JSON),
    sa.Column("request_key", sa.Text),
    sa.Column("num_draft_tokens", sa.Integer),
    sa.Column("num_accepted_tokens", sa.Integer),
)

job_attempts = sa.Table(
    "job_attempts",
    metadata,
    sa.Column("id", _BIG_KEY, primary_key=True),
    sa.Column("seq", _BIG_KEY, sa.ForeignKey("jobs.seq", ondelete="CASCADE"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("claimed_at", Instant, nullable=False),
    sa.Column("ended_at", Instant),
    sa.Column("outcome", sa.Text),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("worker_id", sa.Text, primary_key=True),
    sa.Column("hostname", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("pid_started", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("info", sa.JSON, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("started_at", Instant, nullable=False),
    sa.Column("heartbeat_at", Instant, nullable=False),
    sa.Column("ended_at", Instant),
)

worker_stats = sa.Table(
    "worker_stats",
    metadata,
    sa.Column("id", _BIG_KEY, primary_key=True),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("at", Instant, nullable=False),
    sa.Column("prompt_tps", sa.Double),
    sa.Column("generation_tps", sa.Double),
    sa.Column("running", sa.Integer),
    sa.Column("waiting", sa.Integer),
    sa.Column("kv_usage", sa.Double),
    sa.Column("prefix_hit_rate", sa.Double),
    sa.Column("swapped_in", sa.BigInteger),
    sa.Column("swapped_out", sa.BigInteger),
    sa.Column("preemptions", sa.BigInteger),
    sa.Column("steps", sa.BigInteger),
    sa.Column("num_draft_tokens", sa.BigInteger),
    sa.Column("num_accepted_tokens", sa.BigInteger),
)

outbox = sa.Table(
    "outbox",
    metadata,
    sa.Column("id", _BIG_KEY, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("seq", _BIG_KEY, sa.ForeignKey("jobs.seq", ondelete="CASCADE"), nullable=False),
    sa.Column("worker_id", sa.Text),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("next_at", Instant, nullable=False),
    sa.Column("last_error", sa.Text),
    sa.Column("created_at", Instant, nullable=False),
)

tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("tokens_per_day", sa.BigInteger),
    sa.Column("weight", sa.Double, nullable=False),
)

tenant_usage = sa.Table(
    "tenant_usage",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("day", sa.Text, primary_key=True),
    sa.Column("worker_id", sa.Text, primary_key=True),
    sa.Column("num_jobs", sa.BigInteger, nullable=False),
    sa.Column("computed_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
)

flows = sa.Table(
    "flows",
    metadata,
    sa.Column("flow", _BIG_KEY, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("batch_id", sa.Text, nullable=False),
    sa.UniqueConstraint("batch_id", "tenant"),
)

webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.batch_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("event_id", sa.Text),
    sa.Column("payload", sa.Text),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("next_at", Instant),
    sa.Column("worker_id", sa.Text),
    sa.Column("last_error", sa.Text),
    sa.Column("ended_at", Instant),
    sa.Column("created_at", Instant, nullable=False),
)

# The views are columns to select from; their SQL is in the revision that creates them. They have a MetaData of
# their own, since they are not tables to be compared or created.
views = sa.MetaData()

batch_progress = sa.Table(
    "batch_progress",
    views,
    sa.Column("batch_id", sa.Text),
    sa.Column("name", sa.Text),
    *(
        sa.Column(name, sa.BigInteger)
        for name in (
            "total",
            "queued",
            "running",
            "succeeded",
            "failed",
            "cancelled",
            "expired",
            "dead",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
        )
    ),
    sa.Column("created_at", Instant),
    sa.Column("finished_at", Instant),
    sa.Column("num_draft_tokens", sa.BigInteger),
    sa.Column("num_accepted_tokens", sa.BigInteger),
    sa.Column("acceptance", sa.Double),
)

latency_percentiles = sa.Table(
    "latency_percentiles",
    views,
    sa.Column("batch_id", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("measure", sa.Text),
    sa.Column("num_jobs", sa.BigInteger),
    *(sa.Column(f"{name}_ms", sa.Double) for name in ("p50", "p90", "p95", "p99", "max", "mean")),
)

error_top = sa.Table(
    "error_top",
    views,
    sa.Column("batch_id", sa.Text),
    sa.Column("error_code", sa.Text),
    sa.Column("num_jobs", sa.BigInteger),
    sa.Column("example_message", sa.Text),
    sa.Column("first_line_no", sa.Integer),
    sa.Column("last_at", Instant),
)
