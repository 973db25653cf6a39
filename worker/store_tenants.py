"""Tenants in the store: what the operator allows them, what they used, who of them waits.

Owns the tables ``tenants`` and ``tenant_usage``. A day is a day of UTC by the database's clock. Invariant: usage is
counted in the transaction that writes the results, once for each, under the worker that wrote them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.jobs import DEFAULT_TENANT
from kvq.worker.store_rows import clean_text
from kvq.worker.store_waiting import waiting_lanes
from kvq.worker.tenants import TenantBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """One tenant. ``used_tokens`` (computed and generated) and ``num_jobs`` ended are of today.

    ``waiting``: it has queued jobs, on any queue. ``resumes_at``: the end of the day where the budget is used up,
    until when its jobs wait; else None.
    """

    tenant: str
    weight: float
    tokens_per_day: int | None
    used_tokens: int
    num_jobs: int
    waiting: bool
    resumes_at: datetime | None

    @property
    def over_budget(self) -> bool:
        """True where nothing more of it is started today."""
        return self.resumes_at is not None


class TenantStore:
    """The part of the store that knows tenants."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def change_tenant(
        self,
        name: str,
        *,
        tokens_per_day: int | None = None,
        weight: float | None = None,
        without_budget: bool = False,
    ) -> None:
        """Set what is given of a tenant's budget and weight, from now on; ``without_budget`` takes the budget away."""
        statement = sa.text("""
        INSERT INTO tenants (name, tokens_per_day, weight)
        VALUES (:name, :tokens_per_day, coalesce(CAST(:weight AS double precision), 1))
        ON CONFLICT (name) DO UPDATE SET
            tokens_per_day = CASE WHEN :without_budget THEN NULL
                                  ELSE coalesce(excluded.tokens_per_day, tenants.tokens_per_day) END,
            weight = coalesce(CAST(:weight AS double precision), tenants.weight)
        """)
        values = {
            "name": clean_text(name),
            "tokens_per_day": tokens_per_day,
            "weight": weight,
            "without_budget": without_budget,
        }
        self._db.write(lambda conn: conn.execute(statement, values))

    def tenants_of_batch(self, batch_id: str) -> list[str]:
        """Whom the jobs of a batch count to."""
        statement = sa.text("SELECT tenant FROM flows WHERE batch_id = :batch_id ORDER BY tenant")
        with self._db.reading() as conn:
            return list(conn.execute(statement, {"batch_id": batch_id}).scalars())

    def tenant_budgets(self) -> list[TenantBudget]:
        """The tenants the operator named, with what they used today."""
        statement = sa.text(f"""
        SELECT t.name AS tenant, t.weight, t.tokens_per_day,
               CAST(coalesce((SELECT sum(u.computed_tokens + u.completion_tokens) FROM tenant_usage u
                              WHERE u.tenant = t.name AND u.day = {self._db.today}), 0) AS bigint) AS used_tokens
        FROM tenants t
        """)
        with self._db.reading() as conn:
            return [TenantBudget(**row) for row in conn.execute(statement).mappings()]

    def tenants(self) -> list[TenantRow]:
        """Every tenant that was named, used something today, or waits, by name."""
        statement = sa.text(f"""
        SELECT n.tenant, t.weight, t.tokens_per_day, u.used_tokens, u.num_jobs
        FROM (SELECT name AS tenant FROM tenants UNION SELECT tenant FROM tenant_usage WHERE day = {self._db.today})
             AS n
        LEFT JOIN tenants t ON t.name = n.tenant
        LEFT JOIN (SELECT tenant, CAST(sum(computed_tokens + completion_tokens) AS bigint) AS used_tokens,
                          CAST(sum(num_jobs) AS bigint) AS num_jobs
                   FROM tenant_usage WHERE day = {self._db.today} GROUP BY tenant) AS u ON u.tenant = n.tenant
        """)
        with self._db.reading() as conn:
            rows = {row["tenant"]: row for row in conn.execute(statement).mappings()}
            waiting = {lane.tenant for lane in waiting_lanes(self._db, conn)}
            tomorrow = self._tomorrow(conn)
        return [_tenant_row(name, rows.get(name), name in waiting, tomorrow) for name in sorted(rows.keys() | waiting)]

    def _tomorrow(self, conn: Connection) -> datetime:
        day = str(conn.execute(sa.text(f"SELECT {self._db.today}")).scalar_one())
        return datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)


def _tenant_row(name: str, row: sa.RowMapping | None, waiting: bool, tomorrow: datetime) -> TenantRow:
    """``row`` is None for a tenant that has jobs and nothing else."""
    budget = None if row is None else row["tokens_per_day"]
    used_tokens = 0 if row is None else row["used_tokens"] or 0
    return TenantRow(
        tenant=name,
        weight=1.0 if row is None or row["weight"] is None else row["weight"],
        tokens_per_day=budget,
        used_tokens=used_tokens,
        num_jobs=0 if row is None else row["num_jobs"] or 0,
        waiting=waiting,
        resumes_at=tomorrow if budget is not None and used_tokens >= budget else None,
    )


def flows_of(db: Database, conn: Connection, tenants: Collection[str], batch_id: str | None) -> dict[str, int]:
    """The flow of each tenant's jobs in a batch (or in none), by tenant; made where there is none yet."""
    names = sorted({clean_text(tenant) or "" for tenant in tenants})
    values = {"tenants": db.texts(names), "batch_id": clean_text(batch_id) or ""}
    find = sa.text(f"SELECT tenant, flow FROM flows WHERE batch_id = :batch_id AND tenant {db.among_texts('tenants')}")
    flows = {row.tenant: row.flow for row in conn.execute(find, values)}
    missing = [{"tenant": name, "batch_id": values["batch_id"]} for name in names if name not in flows]
    if missing:
        make = sa.text("INSERT INTO flows (tenant, batch_id) VALUES (:tenant, :batch_id) ON CONFLICT DO NOTHING")
        conn.execute(make, missing)
        flows = {row.tenant: row.flow for row in conn.execute(find, values)}
    return {tenant: flows[clean_text(tenant) or ""] for tenant in tenants}


def count_usage(db: Database, conn: Connection, worker_id: str, seqs: Collection[int]) -> None:
    """Add what the results of these jobs took to their tenants' usage of today. Called once for each result.

    An answer that was taken from an equal job took nothing.
    """
    if not seqs:
        return
    statement = sa.text(f"""
    INSERT INTO tenant_usage (tenant, day, worker_id, num_jobs, computed_tokens, completion_tokens)
    SELECT coalesce(f.tenant, '{DEFAULT_TENANT}'), {db.today}, :worker_id, count(*), sum(r.computed_tokens),
           sum(CASE WHEN r.served_from IS NULL THEN r.completion_tokens ELSE 0 END)
    FROM results r JOIN jobs j ON j.seq = r.seq LEFT JOIN flows f ON f.flow = j.flow
    WHERE r.seq {db.among("seqs")} GROUP BY 1
    ON CONFLICT (tenant, day, worker_id) DO UPDATE SET
        num_jobs = tenant_usage.num_jobs + excluded.num_jobs,
        computed_tokens = tenant_usage.computed_tokens + excluded.computed_tokens,
        completion_tokens = tenant_usage.completion_tokens + excluded.completion_tokens
    """)
    conn.execute(statement, {"worker_id": worker_id, "seqs": db.numbers(seqs)})
