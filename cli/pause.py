"""``kvq pause``: stop taking jobs of a queue."""

from __future__ import annotations

import click

from kvq.cli.batches import open_store
from kvq.cli.options import settings_options
from kvq.cli.output import print_json, say
from kvq.worker.config import Settings


@click.command("pause")
@click.argument("name", metavar="[QUEUE]", required=False)
@settings_options("db", "queue")
@click.option("--list", "listing", is_flag=True, help="List the paused queues instead.")
@click.option("--json", "as_json", is_flag=True, help="With --list: print JSON.")
def command(name: str | None, settings: Settings, listing: bool, as_json: bool) -> None:
    """Stop taking jobs of a queue, in all workers.

    What runs goes on; what is submitted waits. `kvq resume` undoes it. QUEUE is the configured one where it is left
    out.
    """
    if as_json and not listing:
        raise click.UsageError("--json goes with --list: nothing was paused")
    store = open_store(settings)
    try:
        if listing:
            paused = store.paused_queues()
            if as_json:
                print_json(paused)
            else:
                click.echo("".join(f"{queue}\n" for queue in paused), nl=False)
                if not paused:
                    say("no queue is paused")
            return
        store.pause_queue(name or settings.queue)
    finally:
        store.close()
    say(f"queue {name or settings.queue} is paused")
