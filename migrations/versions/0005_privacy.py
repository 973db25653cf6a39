"""What is kept of prompts and answers: two wishes beside each payload.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """A payload whose prompt was forgotten has the JSON value null as its body."""
    for name in ("forget_prompt", "forget_answer"):
        op.add_column("job_payloads", sa.Column(name, sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """What was forgotten stays so; what was to be forgotten is kept."""
    for name in ("forget_answer", "forget_prompt"):
        op.drop_column("job_payloads", name)
