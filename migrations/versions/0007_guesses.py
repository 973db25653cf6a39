"""Tokens guessed ahead, and how many were right: per result and per sample of a worker.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS = ("num_draft_tokens", "num_accepted_tokens")


def upgrade() -> None:
    """NULL where nothing was guessed."""
    for name in _COLUMNS:
        op.add_column("results", sa.Column(name, sa.Integer))
        op.add_column("worker_stats", sa.Column(name, sa.BigInteger))


def downgrade() -> None:
    """The counts are forgotten."""
    for name in _COLUMNS:
        op.drop_column("worker_stats", name)
        op.drop_column("results", name)
