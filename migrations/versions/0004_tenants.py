"""Tenants with budgets and weights, flows that share a queue, and dedup keys.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_WAITING = "state = 'queued' AND crashes = 0 AND NOT held"
_INDEXES = (
    # What of each batch and tenant waits, the most urgent first; an entry is gone once its job was claimed.
    ("jobs_sharing", ["queue", "priority", "flow", "seq"], _WAITING),
    ("jobs_suspect", ["queue", "priority", "seq"], "state = 'queued' AND crashes > 0"),
    ("jobs_by_dedup_key", ["dedup_key"], "dedup_key IS NOT NULL"),
    ("jobs_held", ["same_as"], "held"),
)


def upgrade() -> None:
    """Three tables, four columns of jobs, and the indexes by which waiting jobs are found."""
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("tokens_per_day", sa.BigInteger),
        sa.Column("weight", sa.Double, nullable=False, server_default="1"),
        sa.CheckConstraint("tokens_per_day >= 0", name="tenants_budget_is_not_negative"),
        sa.CheckConstraint("weight > 0", name="tenants_weight_is_positive"),
    )
    # A row per worker, so that workers that finish jobs at the same time do not wait for each other.
    op.create_table(
        "tenant_usage",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("day", sa.Text, primary_key=True),
        sa.Column("worker_id", sa.Text, primary_key=True),
        sa.Column("num_jobs", sa.BigInteger, nullable=False),
        sa.Column("computed_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    )
    # Who shares a queue: the jobs of a tenant's batch, or those of a tenant without a batch ('').
    op.create_table(
        "flows",
        sa.Column("flow", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(), primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("batch_id", sa.Text, nullable=False, server_default=""),
        sa.UniqueConstraint("batch_id", "tenant", name="flows_are_distinct"),
    )
    op.execute("INSERT INTO flows (flow, tenant, batch_id) VALUES (0, 'default', '')")
    # No foreign keys: flows and originals are pruned apart from the jobs that name them.
    op.add_column("jobs", sa.Column("flow", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("dedup_key", sa.Text))
    op.add_column("jobs", sa.Column("same_as", sa.BigInteger))
    op.add_column("jobs", sa.Column("held", sa.Boolean, nullable=False, server_default=sa.false()))
    unfinished = "state IN ('queued', 'running') AND batch_id IS NOT NULL"
    op.execute(f"INSERT INTO flows (tenant, batch_id) SELECT DISTINCT 'default', batch_id FROM jobs WHERE {unfinished}")
    op.execute(
        "UPDATE jobs SET flow = (SELECT f.flow FROM flows f WHERE f.batch_id = jobs.batch_id AND f.tenant = 'default')"
        f" WHERE {unfinished}"
    )
    for name, columns, where in _INDEXES:
        op.create_index(name, "jobs", columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))


def downgrade() -> None:
    """Budgets, usage and dedup keys are forgotten; jobs that were held run by themselves."""
    for name, _, _ in _INDEXES:
        op.drop_index(name, "jobs")
    for column in ("held", "same_as", "dedup_key", "flow"):
        op.drop_column("jobs", column)
    for table in ("flows", "tenant_usage", "tenants"):
        op.drop_table(table)
