"""``kvq tenants``: budgets and weights of those who share the queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvq.cli.batches import open_store
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import print_json, print_table, say
from kvq.worker.config import Settings

if TYPE_CHECKING:
    from kvq.worker.store import TenantRow


@click.group("tenants")
def command() -> None:
    """Set and list budgets and weights of those who share the queues.

    A job counts to the tenant it was submitted for: `kvq submit --tenant`, Client.submit(tenant=), the header tenant of
    a Celery message (or metadata.tenant in its body), else to the tenant "default".
    """


@command.command("set")
@click.argument("name")
@settings_options("db")
@click.option(
    "--tokens-per-day",
    type=click.IntRange(min=0),
    help="Tokens, computed and generated, that its jobs may take a day (of UTC); then they wait.",
)
@click.option("--no-budget", is_flag=True, help="Take its budget away.")
@click.option(
    "--weight",
    type=click.FloatRange(min=0, min_open=True, max=1e6),
    help="Its share of the work beside other tenants; 1 for those that have none.",
)
def set_tenant(
    name: str, settings: Settings, tokens_per_day: int | None, no_budget: bool, weight: float | None
) -> None:
    """Set the budget, the weight, or both, of tenant NAME; what is not given stays as it is."""
    from kvq.worker.tenants import checked_tenant

    if no_budget and tokens_per_day is not None:
        raise click.UsageError("--tokens-per-day, --no-budget: give one of them, not both")
    if not no_budget and tokens_per_day is None and weight is None:
        raise click.UsageError("nothing to set: give --tokens-per-day, --no-budget or --weight")
    store = open_store(settings, create=True)
    try:
        store.change_tenant(
            checked_tenant(name), tokens_per_day=tokens_per_day, without_budget=no_budget, weight=weight
        )
        (row,) = (row for row in store.tenants() if row.tenant == name)
    finally:
        store.close()
    budget = "no budget" if row.tokens_per_day is None else f"{row.tokens_per_day:,} tokens a day"
    say(f"{name}: {budget}, weight {row.weight:g}")


@command.command("list")
@settings_options("db")
@json_option
def list_tenants(settings: Settings, as_json: bool) -> None:
    """List the tenants that have a budget or weight, jobs that wait, or used something today."""
    store = open_store(settings)
    try:
        rows = store.tenants()
    finally:
        store.close()
    if as_json:
        print_json([{**described(row), "weight": row.weight, "num_jobs": row.num_jobs} for row in rows])
        return
    print_table(
        ("tenant", "weight", "tokens a day", "used today", "jobs today", "jobs wait"),
        [
            (
                row.tenant,
                f"{row.weight:g}",
                "-" if row.tokens_per_day is None else f"{row.tokens_per_day:,}",
                f"{row.used_tokens:,}",
                f"{row.num_jobs:,}",
                "-" if not row.waiting else f"until {row.resumes_at:%Y-%m-%d %H:%M} UTC" if row.resumes_at else "yes",
            )
            for row in rows
        ],
        right=("weight", "tokens a day", "used today", "jobs today"),
    )


def described(row: TenantRow) -> dict[str, object]:
    """A tenant's budget as JSON."""
    return {
        "tenant": row.tenant,
        "tokens_per_day": row.tokens_per_day,
        "used_tokens": row.used_tokens,
        "waiting": row.waiting,
        "over_budget": row.over_budget,
        "resumes_at": row.resumes_at,
    }


def held_up(row: TenantRow) -> str:
    """Why a tenant's jobs wait, and until when."""
    assert row.resumes_at is not None
    return (
        f"tenant {row.tenant} has used {row.used_tokens:,} of {row.tokens_per_day:,} tokens today: "
        f"its jobs wait until {row.resumes_at:%Y-%m-%d %H:%M} UTC (`kvq tenants set` raises the budget)"
    )
