"""Finished deterministic answers by key, served again across batches.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """A column of results, by which an equal request finds the answer."""
    op.add_column("results", sa.Column("request_key", sa.Text))
    where = sa.text("request_key IS NOT NULL")
    op.create_index("results_by_request_key", "results", ["request_key"], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Answers are computed again."""
    op.drop_index("results_by_request_key", "results")
    op.drop_column("results", "request_key")
