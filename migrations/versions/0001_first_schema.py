"""The first schema: batches, jobs, results, workers, outbox, and the views people read.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

STATES = ("queued", "running", "succeeded", "failed", "cancelled", "expired", "dead")


def upgrade() -> None:
    """Create everything."""
    _create_tables(on_postgres=op.get_bind().dialect.name == "postgresql")
    _create_views(on_postgres=op.get_bind().dialect.name == "postgresql")


def downgrade() -> None:
    """There is nothing before this revision."""
    raise NotImplementedError("there is no revision before the first: drop the database instead")


def _create_tables(*, on_postgres: bool) -> None:
    now = sa.text("clock_timestamp()" if on_postgres else "(strftime('%Y-%m-%d %H:%M:%f', 'now'))")
    instant = sa.DateTime(timezone=True)
    # SQLite numbers rows by itself only for a key spelled INTEGER.
    big_key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

    def created() -> sa.Column[object]:
        return sa.Column("created_at", instant, nullable=False, server_default=now)

    op.create_table(
        "queues",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text),
        sa.Column("source", sa.Text),
        sa.Column("metadata", sa.JSON, nullable=False),
        created(),
    )
    op.create_index("batches_by_age", "batches", ["created_at"])
    op.create_index("batches_by_name", "batches", ["name"], postgresql_where=sa.text("name IS NOT NULL"))

    # Narrow and hot: a job's prompt is elsewhere, so that a change of state does not rewrite it.
    op.create_table(
        "jobs",
        sa.Column("seq", big_key, sa.Identity(), primary_key=True),
        sa.Column("job_id", sa.Text, nullable=False, unique=True),
        sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.batch_id", ondelete="CASCADE")),
        sa.Column("custom_id", sa.Text, nullable=False),
        sa.Column("line_no", sa.Integer),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
        sa.Column("crashes", sa.Integer, nullable=False, server_default="0"),
        sa.Column("not_before", instant),
        sa.Column("deadline", instant),
        sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("owner", sa.Text),
        sa.Column("claimed_at", instant),
        created(),
        sa.CheckConstraint(f"state IN ({', '.join(repr(state) for state in STATES)})", name="jobs_state_is_known"),
        sa.CheckConstraint("attempt >= 0 AND crashes >= 0", name="jobs_counts_are_not_negative"),
        sa.CheckConstraint(
            "(state = 'running' AND owner IS NOT NULL AND claimed_at IS NOT NULL)"
            " OR (state = 'queued' AND owner IS NULL AND claimed_at IS NULL)"
            " OR state NOT IN ('running', 'queued')",
            name="jobs_owner_while_running",
        ),
        postgresql_with={"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.02"},
        sqlite_autoincrement=True,
    )
    for name, columns, where in (
        ("jobs_waiting", ["queue", "priority", "crashes", "seq"], "state = 'queued'"),
        ("jobs_due", ["deadline"], "state = 'queued' AND deadline IS NOT NULL"),
        ("jobs_owned", ["owner"], "state = 'running'"),
    ):
        op.create_index(name, "jobs", columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
    op.create_index("jobs_of_batch", "jobs", ["batch_id", "state"])
    op.create_index("jobs_in_line_order", "jobs", ["batch_id", "line_no", "seq"])

    def job_key() -> sa.Column[int]:
        return sa.Column(
            "seq",
            big_key,
            sa.ForeignKey("jobs.seq", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        )

    # json, not jsonb: what was sent is kept as it was sent, NUL escapes and key order included.
    op.create_table(
        "job_payloads",
        job_key(),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("celery", sa.JSON),
    )
    op.create_table(
        "results",
        job_key(),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("worker_id", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("text", sa.Text),
        sa.Column("finish_reason", sa.Text),
        sa.Column("response", sa.JSON),
        sa.Column("error_code", sa.Text),
        sa.Column("error_message", sa.Text),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("computed_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("queue_ms", sa.Double),
        sa.Column("ttft_ms", sa.Double),
        sa.Column("tpot_ms", sa.Double),
        sa.Column("e2e_ms", sa.Double),
        sa.Column("prefill_ms", sa.Double),
        sa.Column("decode_ms", sa.Double),
        sa.Column("preemptions", sa.Integer, nullable=False, server_default="0"),
        sa.Column("seed", sa.BigInteger),
        sa.Column("finished_at", instant, nullable=False, server_default=now),
    )
    op.create_index("results_by_time", "results", ["finished_at"])

    # Why did this run twice? One row per claim. A claim that was given back is not charged, so two rows of a job
    # may carry the same attempt number.
    op.create_table(
        "job_attempts",
        sa.Column("id", big_key, sa.Identity(), primary_key=True),
        sa.Column("seq", big_key, sa.ForeignKey("jobs.seq", ondelete="CASCADE"), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("worker_id", sa.Text, nullable=False),
        sa.Column("claimed_at", instant, nullable=False),
        sa.Column("ended_at", instant),
        sa.Column("outcome", sa.Text),
        sa.CheckConstraint(
            "outcome IN ('succeeded', 'failed', 'cancelled', 'expired', 'dead', 'released', 'lost')",
            name="job_attempts_outcome_is_known",
        ),
        sa.CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="job_attempts_end_has_a_time"),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index("job_attempts_of_job", "job_attempts", ["seq", "attempt"])

    op.create_table(
        "workers",
        sa.Column("worker_id", sa.Text, primary_key=True),
        sa.Column("hostname", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("pid_started", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("info", sa.JSON, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("started_at", instant, nullable=False, server_default=now),
        sa.Column("heartbeat_at", instant, nullable=False, server_default=now),
        sa.Column("ended_at", instant),
        sa.CheckConstraint("state IN ('live', 'retired', 'dead')", name="workers_state_is_known"),
    )
    op.create_table(
        "worker_stats",
        sa.Column("id", big_key, sa.Identity(), primary_key=True),
        sa.Column("worker_id", sa.Text, nullable=False),
        sa.Column("at", instant, nullable=False, server_default=now),
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
    )
    op.create_index("worker_stats_of_worker", "worker_stats", ["worker_id", "at"])

    op.create_table(
        "outbox",
        sa.Column("id", big_key, sa.Identity(), primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("seq", big_key, sa.ForeignKey("jobs.seq", ondelete="CASCADE"), nullable=False),
        sa.Column("worker_id", sa.Text),
        sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_at", instant, nullable=False, server_default=now),
        sa.Column("last_error", sa.Text),
        created(),
    )
    op.create_index("outbox_due", "outbox", ["next_at"])
    op.create_index("outbox_of_job", "outbox", ["seq"])


def _create_views(*, on_postgres: bool) -> None:
    """One text per view for both databases; what they spell differently is filled in."""
    if on_postgres:
        spelling = {
            "minute": "date_trunc('minute', {0})",
            "seconds": "CAST(extract(epoch FROM ({1}) - ({0})) AS double precision)",
            "now": "clock_timestamp()",
            "share": "CAST({0} AS double precision) / nullif({1}, 0)",
        }
    else:
        spelling = {
            "minute": "strftime('%Y-%m-%d %H:%M:00.000', {0})",
            "seconds": "((julianday({1}) - julianday({0})) * 86400.0)",
            "now": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
            "share": "CAST({0} AS REAL) / nullif({1}, 0)",
        }

    def say(key: str, *args: str) -> str:
        return spelling[key].format(*args)

    now = spelling["now"]
    counts = ",\n".join(f"count(*) FILTER (WHERE j.state = '{state}') AS {state}" for state in STATES)
    tokens = ",\n".join(
        f"CAST(coalesce(sum(r.{kind}), 0) AS bigint) AS {kind}"
        for kind in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )

    op.execute(
        """
        CREATE VIEW job_results AS
        SELECT j.job_id, j.batch_id, j.custom_id, j.line_no, j.state, r.finish_reason, r.text, r.error_code,
               r.error_message, r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.queue_ms, r.ttft_ms,
               r.tpot_ms, r.e2e_ms, r.preemptions, j.attempt AS attempts, r.seed,
               coalesce(r.model, j.model) AS model, coalesce(r.worker_id, j.owner) AS worker_id,
               j.created_at, j.claimed_at AS started_at, r.finished_at
        FROM jobs j LEFT JOIN results r ON r.seq = j.seq
        """
    )
    op.execute(
        f"""
        CREATE VIEW batch_progress AS
        SELECT b.batch_id, b.name, count(j.seq) AS total, {counts}, {tokens}, b.created_at,
               CASE WHEN count(*) FILTER (WHERE j.state IN ('queued', 'running')) = 0
                    THEN max(r.finished_at) END AS finished_at
        FROM batches b
        LEFT JOIN jobs j ON j.batch_id = b.batch_id
        LEFT JOIN results r ON r.seq = j.seq
        GROUP BY b.batch_id, b.name, b.created_at
        """
    )
    op.execute(
        f"""
        CREATE VIEW job_summary AS
        SELECT j.queue, j.state, count(*) AS num_jobs, {tokens}, sum(j.attempt) AS attempts,
               sum(j.crashes) AS crashes, min(j.created_at) AS oldest_created_at,
               {say("seconds", "min(j.created_at)", now)} AS oldest_age_s
        FROM jobs j LEFT JOIN results r ON r.seq = j.seq
        GROUP BY j.queue, j.state
        """
    )
    # Nearest rank, so that a percentile is a value that occurred, and the same on both databases. One pass of
    # the results per measure.
    measures = "\nUNION ALL\n".join(
        f"SELECT j.batch_id, r.model, '{measure}' AS measure, r.{measure}_ms AS value"
        f" FROM results r JOIN jobs j ON j.seq = r.seq"
        f" WHERE j.state = 'succeeded' AND r.{measure}_ms IS NOT NULL"
        for measure in ("queue", "ttft", "tpot", "e2e")
    )
    picks = ",\n".join(
        f"min(CASE WHEN place >= (num_jobs * {rank} + 99) / 100 THEN value END) AS p{rank}_ms"
        for rank in (50, 90, 95, 99)
    )
    op.execute(
        f"""
        CREATE VIEW latency_percentiles AS
        SELECT batch_id, model, measure, max(num_jobs) AS num_jobs, {picks}, max(value) AS max_ms,
               avg(value) AS mean_ms
        FROM (
            SELECT batch_id, model, measure, value,
                   row_number() OVER (PARTITION BY batch_id, model, measure ORDER BY value) AS place,
                   count(*) OVER (PARTITION BY batch_id, model, measure) AS num_jobs
            FROM ({measures}) AS measured
        ) AS ranked
        GROUP BY batch_id, model, measure
        """
    )
    op.execute(
        f"""
        CREATE VIEW prefix_savings AS
        SELECT j.batch_id, r.model, count(*) AS num_jobs,
               CAST(sum(r.prompt_tokens) AS bigint) AS prompt_tokens,
               CAST(sum(r.cached_tokens) AS bigint) AS cached_tokens,
               CAST(sum(r.computed_tokens) AS bigint) AS computed_tokens,
               {say("share", "sum(r.cached_tokens)", "sum(r.prompt_tokens)")} AS cached_share
        FROM results r JOIN jobs j ON j.seq = r.seq
        WHERE j.state = 'succeeded'
        GROUP BY j.batch_id, r.model
        """
    )
    op.execute(
        f"""
        CREATE VIEW throughput_by_minute AS
        SELECT {say("minute", "r.finished_at")} AS minute, r.worker_id, r.model, count(*) AS num_jobs,
               CAST(sum(r.prompt_tokens) AS bigint) AS prompt_tokens,
               CAST(sum(r.cached_tokens) AS bigint) AS cached_tokens,
               CAST(sum(r.completion_tokens) AS bigint) AS completion_tokens,
               sum(r.completion_tokens) / 60.0 AS completion_tokens_per_s
        FROM results r
        WHERE r.worker_id IS NOT NULL
        GROUP BY 1, r.worker_id, r.model
        """
    )
    op.execute(
        """
        CREATE VIEW error_top AS
        SELECT j.batch_id, r.error_code, count(*) AS num_jobs, min(r.error_message) AS example_message,
               min(j.line_no) AS first_line_no, max(r.finished_at) AS last_at
        FROM results r JOIN jobs j ON j.seq = r.seq
        WHERE r.error_code IS NOT NULL
        GROUP BY j.batch_id, r.error_code
        """
    )
    op.execute(
        f"""
        CREATE VIEW worker_health AS
        SELECT w.worker_id, w.hostname, w.pid, w.model, w.queue, w.state, w.started_at, w.heartbeat_at,
               {say("seconds", "w.heartbeat_at", now)} AS heartbeat_age_s,
               (SELECT count(*) FROM jobs j WHERE j.owner = w.worker_id AND j.state = 'running') AS running_jobs,
               s.at AS sampled_at, s.prompt_tps, s.generation_tps, s.running, s.waiting, s.kv_usage,
               s.prefix_hit_rate, s.swapped_in, s.swapped_out, s.preemptions, s.steps
        FROM workers w
        LEFT JOIN worker_stats s
          ON s.id = (SELECT max(latest.id) FROM worker_stats latest WHERE latest.worker_id = w.worker_id)
        """
    )
