"""``kvq resume``: take jobs of a paused queue again."""

from __future__ import annotations

import click

from kvq.cli.batches import open_store
from kvq.cli.options import settings_options
from kvq.cli.output import say
from kvq.worker.config import Settings


@click.command("resume")
@click.argument("name", metavar="[QUEUE]", required=False)
@settings_options("db", "queue")
def command(name: str | None, settings: Settings) -> None:
    """Take jobs of a paused queue again. QUEUE is the configured one where it is left out."""
    store = open_store(settings)
    try:
        store.resume_queue(name or settings.queue)
    finally:
        store.close()
    say(f"queue {name or settings.queue} is running")
