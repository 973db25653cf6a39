"""``kvq status``: the newest batches and the workers, or one batch in detail."""

from __future__ import annotations

import click

from kvq.cli.batches import BATCH_HELP, find_batch, open_store
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import print_json, print_table, say, seconds, stdout_console
from kvq.cli.summary import print_summary, state_counts
from kvq.worker.config import Settings


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
            if as_json:
                print_json(summary)
            else:
                print_summary(stdout_console(), summary, db=settings.db)
            return
        batches, workers = store.list_batches(limit), store.live_workers()
    finally:
        store.close()
    if as_json:
        print_json({"batches": batches, "workers": workers})
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
