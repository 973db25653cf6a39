"""``kvq results``: the results of a batch, as a table or as JSON lines."""

from __future__ import annotations

from itertools import islice

import click

from kvq.cli.batches import BATCH_HELP, batch_argument, find_batch, open_store
from kvq.cli.options import settings_options
from kvq.cli.output import json_line, milliseconds, print_table, shorten
from kvq.cli.summary import answer
from kvq.worker.config import Settings
from kvq.worker.jobs import JobState
from kvq.worker.store_records import ResultRow


@click.command("results", help=f"Show the results of a batch, in the order of its lines.\n\n{BATCH_HELP}")
@batch_argument
@settings_options("db")
@click.option(
    "--state", "states", type=click.Choice([s.value for s in JobState]), multiple=True, help="Only rows in this state."
)
@click.option("--limit", type=click.IntRange(min=1), help="At most this many rows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one a row, with everything known of it.")
def command(batch: str, settings: Settings, states: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """Show the results of a batch."""
    store = open_store(settings)
    try:
        rows = store.iter_results(find_batch(store, batch), states=[JobState(s) for s in states] or None)
        chosen = islice(rows, limit)
        if as_json:
            for row in chosen:
                click.echo(json_line(row))
            return
        print_table(
            ("line", "custom id", "state", "ended", "prompt", "reused", "output", "first token", "text or error"),
            (_cells(row) for row in chosen),
            right=("line", "prompt", "reused", "output", "first token"),
        )
    finally:
        store.close()


def _cells(row: ResultRow) -> tuple[object, ...]:
    text = answer(row) if row.error is None else f"{row.error.code}: {row.error.message}"
    return (
        row.line_no,
        row.custom_id,
        row.state.value,
        row.finish_reason,
        row.metrics.prompt_tokens or None,
        row.metrics.cached_tokens or None,
        row.metrics.completion_tokens or None,
        None if row.metrics.ttft_ms is None else milliseconds(row.metrics.ttft_ms),
        shorten(text, 80),
    )
