"""``kvq export``: a batch as OpenAI's output and error files, in whatever state it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kvq.cli.batches import BATCH_HELP, batch_argument, find_batch, open_store
from kvq.cli.options import FILE_NAME, settings_options
from kvq.cli.output import atomic_file, check_writable, count, json_line, say
from kvq.worker.config import Settings
from kvq.worker.jobs import TERMINAL_STATES, JobState
from kvq.worker.responses import error_line, output_line

if TYPE_CHECKING:
    from kvq.worker.store import Store


@click.command(
    "export",
    help=f"""Write a batch as OpenAI output and error files.

    Works in every state: --output gets the rows that succeeded so far, --errors those that failed, were
    cancelled, expired or given up. A file appears whole or not at all; '-' is stdout.

    {BATCH_HELP}""",
)
@batch_argument
@settings_options("db")
@click.option("--output", "-o", type=FILE_NAME, metavar="FILE", help="Where the rows that succeeded go.")
@click.option("--errors", "-e", type=FILE_NAME, metavar="FILE", help="Where the rows that ended otherwise go.")
def command(batch: str, settings: Settings, output: str | None, errors: str | None) -> None:
    """Write a batch as OpenAI output and error files."""
    if output is None and errors is None:
        raise click.UsageError("nothing to write: give --output FILE, --errors FILE or both")
    for path in (output, errors):
        if path is not None:
            check_writable(path)
    store = open_store(settings)
    try:
        batch_id = find_batch(store, batch)
        for what, path, num_rows in export(store, batch_id, output=output, errors=errors):
            say(f"{path}: {count(num_rows, what)}")
        progress = store.batch_progress(batch_id)
    finally:
        store.close()
    if not progress.finished:
        say(f"the batch goes on: {count(progress.total - progress.done, 'row')} not finished")


def export(store: Store, batch_id: str, *, output: str | None, errors: str | None) -> list[tuple[str, str, int]]:
    """Write the files asked for; returns what was written where, and how many lines."""
    written = []
    if output is not None:
        written.append(("result", output, _write(store, batch_id, output, {JobState.SUCCEEDED})))
    if errors is not None:
        ended_otherwise = TERMINAL_STATES - {JobState.SUCCEEDED}
        written.append(("error", errors, _write(store, batch_id, errors, ended_otherwise)))
    return written


def _write(store: Store, batch_id: str, path: str, states: Iterable[JobState]) -> int:
    num_rows = 0
    with atomic_file(path) as stream:
        for row in store.iter_results(batch_id, states=list(states)):
            line = output_line(row) if row.state is JobState.SUCCEEDED else error_line(row)
            stream.write(json_line(line) + "\n")
            num_rows += 1
    return num_rows
