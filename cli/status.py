"""``kvq status``: the newest batches and the workers, or one batch in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvq.cli.batches import BATCH_HELP, db_flag, find_batch, open_store
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import jsonable, print_json, print_table, say, seconds, stdout_console
from kvq.cli.summary import print_summary, state_counts
from kvq.cli.tenants import described, held_up
from kvq.worker.config import Settings

if TYPE_CHECKING:
    from kvq.worker.store import Store, TenantRow


@click.command("status", help=f"Show batches and workers, or one batch in detail.\n\n{BATCH_HELP}")
@click.argument("batch", metavar="[BATCH]", required=False)
@settings_options("db")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many batches to list.")
@json_option
def command(batch: str | None, settings: Settings, limit: int, as_json: bool) -> None:
    """Show batches and workers, or one batch in detail."""
    store = open_store(settings)
    try:
        if batch is not None:
            summary = store.summary(find_batch(store, batch))
            tenants = store.tenants_of_batch(summary.progress.batch_id)
            waiting = [row for row in _over_budget(store) if row.tenant in tenants and summary.progress.queued]
            if as_json:
                print_json({**jsonable(summary), "tenants": tenants, "over_budget": list(map(described, waiting))})
            else:
                print_summary(stdout_console(), summary, db=settings.db, db_flag=db_flag(settings))
                for row in waiting:
                    say(held_up(row))
            return
        batches, workers, waiting = store.list_batches(limit), store.live_workers(), _over_budget(store)
    finally:
        store.close()
    if as_json:
        print_json({"batches": batches, "workers": workers, "over_budget": list(map(described, waiting))})
        return
    print_table(
        ("batch", "name", "created", "rows", "done", "states", "prompt", "reused", "output"),
        [
            (
                b.batch_id[:8],
                b.name,
                f"{b.created_at.astimezone():%Y-%m-%d %H:%M}",
                f"{b.total:,}",
                f"{b.done / b.total:.0%}" if b.total else "-",
                state_counts(b),
                f"{b.prompt_tokens:,}",
                f"{b.cached_tokens / b.prompt_tokens:.0%}" if b.prompt_tokens else "-",
                f"{b.completion_tokens:,}",
            )
            for b in batches
        ],
        right=("rows", "done", "prompt", "reused", "output"),
    )
    if workers:
        print_table(
            ("worker", "host", "pid", "queue", "model", "last seen"),
            [
                (w.worker_id[:8], w.hostname, w.pid, w.queue, w.model, f"{seconds(w.heartbeat_age_s)} ago")
                for w in workers
            ],
            right=("pid",),
        )
    else:
        say("no worker is running")
    for row in waiting:
        say(held_up(row))


def _over_budget(store: Store) -> list[TenantRow]:
    return [row for row in store.tenants() if row.over_budget and row.waiting]
