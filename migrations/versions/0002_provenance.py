"""Where an answer came from: the equal job that was computed for it, and the model's own sampling options.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS = """
    j.job_id, j.batch_id, j.custom_id, j.line_no, j.state, r.finish_reason, r.text, r.error_code,
    r.error_message, r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.queue_ms, r.ttft_ms,
    r.tpot_ms, r.e2e_ms, r.preemptions, j.attempt AS attempts, r.seed,
    coalesce(r.model, j.model) AS model, coalesce(r.worker_id, j.owner) AS worker_id,
    j.created_at, j.claimed_at AS started_at, r.finished_at
"""


def upgrade() -> None:
    """Two columns of results, one of them shown in job_results."""
    # A job id, and no foreign key: the answer stays when the job it came from is pruned.
    op.add_column("results", sa.Column("served_from", sa.Text))
    op.add_column("results", sa.Column("model_defaults", sa.JSON))
    _replace_view(f"{_COLUMNS}, r.served_from")


def downgrade() -> None:
    """Back to the first schema; the provenance is lost."""
    op.execute("DROP VIEW job_results")
    op.drop_column("results", "model_defaults")
    op.drop_column("results", "served_from")
    _replace_view(_COLUMNS)


def _replace_view(columns: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        create = "CREATE OR REPLACE VIEW"  # keeps what was granted on it
    else:
        op.execute("DROP VIEW IF EXISTS job_results")
        create = "CREATE VIEW"
    op.execute(f"{create} job_results AS SELECT {columns} FROM jobs j LEFT JOIN results r ON r.seq = j.seq")
