"""``kvq prune``: delete what ended long ago."""

from __future__ import annotations

import click

from kvq.cli.batches import open_store
from kvq.cli.duration import Duration
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import count, print_json, say
from kvq.worker.config import Settings


@click.command("prune")
@settings_options("db")
@click.option("--older-than", metavar="AGE", type=Duration(), required=True, help="An age such as 30d, 12h or 90m.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be deleted.")
@json_option
def command(settings: Settings, older_than: float, dry_run: bool, as_json: bool) -> None:
    """Delete what ended long ago: prompts, answers, errors and figures.

    A batch goes whole, once its last row ended that long ago. Rows that are not finished, and answers that a Celery
    sender has not been told yet, always stay. Workers may go on meanwhile.
    """
    store = open_store(settings)
    try:
        report = store.prune(older_than_s=older_than, dry_run=dry_run)
    finally:
        store.close()
    if as_json:
        print_json(report)
    verb = "would be deleted" if dry_run else "deleted"
    batches = count(report.batches, "batch").replace("batchs", "batches")
    say(f"{batches} and {count(report.jobs, 'job')} {verb}")
