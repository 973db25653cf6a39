"""Webhooks: an outbox of batch ends, a row for each batch that is to be announced.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

STATES = ("open", "waiting", "pending", "delivered", "failed")


def upgrade() -> None:
    """The table and the index by which workers find what is due."""
    on_postgres = op.get_bind().dialect.name == "postgresql"
    now = sa.text("clock_timestamp()" if on_postgres else "(strftime('%Y-%m-%d %H:%M:%f', 'now'))")
    instant = sa.DateTime(timezone=True)
    op.create_table(
        "webhooks",
        sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.batch_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False, server_default="open"),
        # The event as it is sent, the same at every try.
        sa.Column("event_id", sa.Text),
        sa.Column("payload", sa.Text),
        sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_at", instant),
        sa.Column("worker_id", sa.Text),
        sa.Column("last_error", sa.Text),
        sa.Column("ended_at", instant),
        sa.Column("created_at", instant, nullable=False, server_default=now),
        sa.CheckConstraint(f"state IN ({', '.join(repr(state) for state in STATES)})", name="webhooks_state_is_known"),
        sa.CheckConstraint(
            "state IN ('open', 'waiting') OR (event_id IS NOT NULL AND payload IS NOT NULL)",
            name="webhooks_event_once_ended",
        ),
    )
    where = sa.text("state IN ('waiting', 'pending')")
    op.create_index("webhooks_due", "webhooks", ["state", "next_at"], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Without the table; what was not delivered is forgotten."""
    op.drop_table("webhooks")
