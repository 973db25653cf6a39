"""``kvq cancel``: stop what is not finished of a batch."""

from __future__ import annotations

import click

from kvq.cli.batches import BATCH_HELP, batch_argument, find_batch, open_store
from kvq.cli.options import settings_options
from kvq.cli.output import count, say
from kvq.worker.config import Settings


@click.command(
    "cancel",
    help=f"""Cancel what is not finished of a batch.

    Waiting rows are cancelled at once, running ones as soon as their worker hears of it. Finished rows keep
    their results.

    {BATCH_HELP}""",
)
@batch_argument
@settings_options("db")
def command(batch: str, settings: Settings) -> None:
    """Cancel what is not finished of a batch."""
    store = open_store(settings)
    try:
        batch_id = find_batch(store, batch)
        num_cancelled = store.cancel_batch(batch_id)
        progress = store.batch_progress(batch_id)
    finally:
        store.close()
    say(f"{batch_id}: {count(num_cancelled, 'row')} cancelled, {progress.succeeded:,} had succeeded")
