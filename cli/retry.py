"""``kvq retry``: run again what did not succeed of a batch, changed if need be."""

from __future__ import annotations

import json
from typing import Any

import click

from kvq.cli.batches import BATCH_HELP, batch_argument, find_batch, open_store, say_forgotten
from kvq.cli.options import settings_options
from kvq.cli.output import count, say
from kvq.worker.config import Settings
from kvq.worker.filters import FIELDS, parse_filter
from kvq.worker.jobs import LEGAL_MOVES, JobState

_RETRIABLE = tuple(state.value for state, moves in LEGAL_MOVES.items() if moves == {JobState.QUEUED})


class BodyChange(click.ParamType[tuple[str, Any]]):
    """``max_tokens=200``: a field of the body and its new value, as JSON where it is JSON, else as text."""

    name = "field=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        field, sign, text = str(value).partition("=")
        if not sign or not field.strip():
            self.fail(f"{value!r} is not FIELD=VALUE, as in max_tokens=200", param, ctx)
        try:
            return field.strip(), json.loads(text)
        except json.JSONDecodeError:
            return field.strip(), text


@click.command(
    "retry",
    help=f"""Run again what did not succeed of a batch.

    Failed and dead rows are queued again unless --state says otherwise; rows that succeeded never are. Their errors
    are forgotten, and so are crashes and deadlines. {BATCH_HELP}

    \b
    kvq retry mine --where "error_code = context_length_exceeded and line_no < 1000"
    kvq retry mine --set max_tokens=200 --set temperature=0
    kvq retry mine --set seed=null                 removes the field

    Fields of --where: {", ".join(FIELDS)}. Compared by =, !=, <, <=, >, >= or like (with % and _), joined by 'and'.
    """,
)
@batch_argument
@settings_options("db")
@click.option(
    "--state",
    "states",
    type=click.Choice(_RETRIABLE),
    multiple=True,
    help="Rows in this state.  [default: failed, dead]",
)
@click.option("--where", metavar="CONDITIONS", help="Only rows that meet these conditions.")
@click.option("--set", "changes", metavar="FIELD=VALUE", type=BodyChange(), multiple=True, help="Change their bodies.")
def command(
    batch: str, settings: Settings, states: tuple[str, ...], where: str | None, changes: tuple[tuple[str, Any], ...]
) -> None:
    """Run again what did not succeed of a batch."""
    from kvq.worker.bodies import changed_body

    conditions = parse_filter(where) if where else ()
    store = open_store(settings)
    try:
        batch_id = find_batch(store, batch)
        chosen = [JobState(state) for state in states or ("failed", "dead")]
        num_forgotten = store.num_forgotten(batch_id=batch_id, states=chosen, where=conditions)
        num_queued = store.retry_where(
            batch_id=batch_id,
            states=chosen,
            where=conditions,
            rewrite=(lambda endpoint, body: changed_body(endpoint, body, dict(changes))) if changes else None,
        )
    finally:
        store.close()
    say(f"{batch_id}: {count(num_queued, 'row')} queued again")
    say_forgotten(num_forgotten)
