"""``kvq dead``: the jobs that were given up since they took their workers down with them."""

from __future__ import annotations

import click

from kvq.cli.batches import BATCH_HELP, find_batch, open_store, say_forgotten
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import count, print_json, print_table, say, shorten
from kvq.worker.config import Settings
from kvq.worker.filters import Condition, parse_filter
from kvq.worker.jobs import JobState

_batch = click.option("--batch", metavar="BATCH", help=f"Only those of a batch. {BATCH_HELP}")
_where = click.option("--where", metavar="CONDITIONS", help="Only those that meet these conditions; see `kvq retry`.")


@click.group("dead")
def command() -> None:
    """Jobs that were given up after three crashes.

    A worker that dies while running a job costs it a crash; after three the job is set aside, so that it cannot take
    the fleet down. Look at the workers' logs, then retry it (alone in its worker until it ends) or drop it.
    """


@command.command("list")
@settings_options("db")
@_batch
@_where
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most this many.")
@json_option
def list_(settings: Settings, batch: str | None, where: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, newest first."""
    conditions = _conditions(where)
    store = open_store(settings)
    try:
        letters = store.dead_letters(
            batch_id=None if batch is None else find_batch(store, batch), where=conditions, limit=limit
        )
    finally:
        store.close()
    if as_json:
        print_json(letters)
        return
    print_table(
        ("job", "batch", "line", "custom id", "crashes", "died", "error"),
        (
            (
                letter.job_id,
                (letter.batch_id or "-")[:8],
                letter.line_no,
                shorten(letter.custom_id, 40),
                letter.crashes,
                f"{letter.finished_at:%Y-%m-%d %H:%M:%S}",
                shorten(letter.error_message, 80),
            )
            for letter in letters
        ),
        right=("line", "crashes"),
    )


@command.command()
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@settings_options("db")
@_batch
@_where
@click.option("--all", "everything", is_flag=True, help="All of them.")
def retry(jobs: tuple[str, ...], settings: Settings, batch: str | None, where: str | None, everything: bool) -> None:
    """Queue dead letters again, their crashes forgiven."""
    _one_choice(jobs, batch, where, everything)
    conditions = _conditions(where)
    store = open_store(settings)
    try:
        batch_id = None if batch is None else find_batch(store, batch)
        num_forgotten = sum(
            store.num_forgotten(batch_id=batch_id, states=[JobState.DEAD], where=chosen)
            for chosen in _by_job(jobs, conditions)
        )
        number = sum(
            store.retry_where(batch_id=batch_id, states=[JobState.DEAD], where=chosen)
            for chosen in _by_job(jobs, conditions)
        )
    finally:
        store.close()
    say(f"{count(number, 'job')} queued again")
    say_forgotten(num_forgotten)


@command.command()
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@settings_options("db")
@_batch
@_where
@click.option("--all", "everything", is_flag=True, help="All of them.")
def drop(jobs: tuple[str, ...], settings: Settings, batch: str | None, where: str | None, everything: bool) -> None:
    """Delete dead letters for good: their rows, prompts and errors. The total of their batch shrinks.

    One that came by Celery stays until its sender was told of its end, which a worker with the broker does.
    """
    _one_choice(jobs, batch, where, everything)
    conditions = _conditions(where)
    store = open_store(settings)
    try:
        batch_id = None if batch is None else find_batch(store, batch)
        chosen = _by_job(jobs, conditions)
        number = sum(store.drop_dead(batch_id=batch_id, where=where) for where in chosen)
        num_left = sum(store.num_dead(batch_id=batch_id, where=where) for where in chosen)
    finally:
        store.close()
    say(f"{count(number, 'job')} dropped")
    if num_left:
        say(f"{count(num_left, 'job')} left: Celery senders who are still to be told, by a worker with the broker")


def _conditions(where: str | None) -> tuple[Condition, ...]:
    return parse_filter(where) if where else ()


def _by_job(jobs: tuple[str, ...], conditions: tuple[Condition, ...]) -> list[tuple[Condition, ...]]:
    from kvq.worker.filters import Operator

    if not jobs:
        return [conditions]
    return [(*conditions, Condition(field="job_id", operator=Operator.EQUAL, value=job)) for job in jobs]


def _one_choice(jobs: tuple[str, ...], batch: str | None, where: str | None, everything: bool) -> None:
    """Nothing is retried or dropped by leaving something out."""
    if everything == bool(jobs or batch or where):
        raise click.UsageError("name jobs, or give --batch, --where or --all")
