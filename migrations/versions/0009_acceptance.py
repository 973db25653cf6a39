"""The views show tokens guessed ahead, and the share of them that was right: per job, per batch, per worker.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_STATES = ("queued", "running", "succeeded", "failed", "cancelled", "expired", "dead")
_DRAFTS, _ACCEPTED = "num_draft_tokens", "num_accepted_tokens"

_JOB_COLUMNS = """
    j.job_id, j.batch_id, j.custom_id, j.line_no, j.state, r.finish_reason, r.text, r.error_code,
    r.error_message, r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.queue_ms, r.ttft_ms,
    r.tpot_ms, r.e2e_ms, r.preemptions, j.attempt AS attempts, r.seed,
    coalesce(r.model, j.model) AS model, coalesce(r.worker_id, j.owner) AS worker_id,
    j.created_at, j.claimed_at AS started_at, r.finished_at, r.served_from
"""
_JOBS = "jobs j LEFT JOIN results r ON r.seq = j.seq"


def upgrade() -> None:
    """Columns at the end of three views; the share is NULL where nothing was guessed."""
    _replace_views(
        of_job=f", r.{_DRAFTS}, r.{_ACCEPTED}, {_share(f'r.{_ACCEPTED}', f'r.{_DRAFTS}')} AS acceptance",
        of_batch=f", {_total(_DRAFTS)} AS {_DRAFTS}, {_total(_ACCEPTED)} AS {_ACCEPTED},"
        f" {_share(f'sum(r.{_ACCEPTED})', f'sum(r.{_DRAFTS})')} AS acceptance",
        of_sample=f", s.{_DRAFTS}, s.{_ACCEPTED}, {_share(f's.{_ACCEPTED}', f's.{_DRAFTS}')} AS acceptance",
    )


def downgrade() -> None:
    """The views as they were; what was granted on them is lost, since PostgreSQL takes no column from a view."""
    if _on_postgres():
        _drop_views()
    _replace_views(of_job="", of_batch="", of_sample="")


def _replace_views(*, of_job: str, of_batch: str, of_sample: str) -> None:
    if _on_postgres():
        create = "CREATE OR REPLACE VIEW"  # keeps what was granted on it
        age = "CAST(extract(epoch FROM clock_timestamp() - w.heartbeat_at) AS double precision)"
    else:
        _drop_views()
        create = "CREATE VIEW"
        age = "((julianday(strftime('%Y-%m-%d %H:%M:%f', 'now')) - julianday(w.heartbeat_at)) * 86400.0)"
    counts = ", ".join(f"count(*) FILTER (WHERE j.state = '{state}') AS {state}" for state in _STATES)
    tokens = ", ".join(f"{_total(kind)} AS {kind}" for kind in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    op.execute(f"{create} job_results AS SELECT {_JOB_COLUMNS} {of_job} FROM {_JOBS}")
    op.execute(
        f"""
        {create} batch_progress AS
        SELECT b.batch_id, b.name, count(j.seq) AS total, {counts}, {tokens}, b.created_at,
               CASE WHEN count(*) FILTER (WHERE j.state IN ('queued', 'running')) = 0
                    THEN max(r.finished_at) END AS finished_at
               {of_batch}
        FROM batches b
        LEFT JOIN jobs j ON j.batch_id = b.batch_id
        LEFT JOIN results r ON r.seq = j.seq
        GROUP BY b.batch_id, b.name, b.created_at
        """
    )
    op.execute(
        f"""
        {create} worker_health AS
        SELECT w.worker_id, w.hostname, w.pid, w.model, w.queue, w.state, w.started_at, w.heartbeat_at,
               {age} AS heartbeat_age_s,
               (SELECT count(*) FROM jobs j WHERE j.owner = w.worker_id AND j.state = 'running') AS running_jobs,
               s.at AS sampled_at, s.prompt_tps, s.generation_tps, s.running, s.waiting, s.kv_usage,
               s.prefix_hit_rate, s.swapped_in, s.swapped_out, s.preemptions, s.steps {of_sample}
        FROM workers w
        LEFT JOIN worker_stats s
          ON s.id = (SELECT max(latest.id) FROM worker_stats latest WHERE latest.worker_id = w.worker_id)
        """
    )


def _drop_views() -> None:
    for view in ("job_results", "batch_progress", "worker_health"):
        op.execute(f"DROP VIEW {view}")


def _on_postgres() -> bool:
    return bool(op.get_bind().dialect.name == "postgresql")


def _total(column: str) -> str:
    return f"CAST(coalesce(sum(r.{column}), 0) AS bigint)"


def _share(part: str, whole: str) -> str:
    return f"CAST({part} AS {'double precision' if _on_postgres() else 'REAL'}) / nullif({whole}, 0)"
