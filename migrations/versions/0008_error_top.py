"""The example of an error is that of its first line: number and text of one row.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_KIND = "PARTITION BY j.batch_id, r.error_code"


def upgrade() -> None:
    """The row of the smallest line, or the oldest where no line has a number, stands for its kind."""
    _replace_view(
        f"""
        SELECT batch_id, error_code, num_jobs, error_message AS example_message, line_no AS first_line_no, last_at
        FROM (
            SELECT j.batch_id, r.error_code, r.error_message, j.line_no,
                   count(*) OVER ({_KIND}) AS num_jobs,
                   max(r.finished_at) OVER ({_KIND}) AS last_at,
                   row_number() OVER ({_KIND} ORDER BY j.line_no IS NULL, j.line_no, j.seq) AS place
            FROM results r JOIN jobs j ON j.seq = r.seq
            WHERE r.error_code IS NOT NULL
        ) AS placed
        WHERE place = 1
        """
    )


def downgrade() -> None:
    """The smallest number and the smallest text, of whichever rows."""
    _replace_view(
        """
        SELECT j.batch_id, r.error_code, count(*) AS num_jobs, min(r.error_message) AS example_message,
               min(j.line_no) AS first_line_no, max(r.finished_at) AS last_at
        FROM results r JOIN jobs j ON j.seq = r.seq
        WHERE r.error_code IS NOT NULL
        GROUP BY j.batch_id, r.error_code
        """
    )


def _replace_view(query: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        create = "CREATE OR REPLACE VIEW"  # keeps what was granted on it
    else:
        op.execute("DROP VIEW error_top")
        create = "CREATE VIEW"
    op.execute(f"{create} error_top AS {query}")
