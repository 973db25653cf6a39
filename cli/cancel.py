"""``kvq cancel``: stop what is not finished of a batch, of a queue, or single jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvq.cli.batches import BATCH_HELP, find_batch, open_store
from kvq.cli.options import settings_options
from kvq.cli.output import count, say
from kvq.worker.config import Settings
from kvq.worker.jobs import JobState

if TYPE_CHECKING:
    from kvq.worker.store import Store


@click.command(
    "cancel",
    help=f"""Cancel what is not finished of a batch, of a queue, or single jobs.

    Waiting rows are cancelled at once, running ones as soon as their worker hears of it; their partial text is kept.
    Finished rows keep their results.

    {BATCH_HELP} Messages that no worker has taken in yet are still the broker's: `kvq cancel --queue` does not see
    them.""",
)
@click.argument("batch", metavar="[BATCH]", required=False)
@click.option("--job", "job_ids", metavar="ID", multiple=True, help="A job by its id; may be given again.")
@click.option("--queue", metavar="NAME", help="All jobs of a queue.")
@settings_options("db")
def command(batch: str | None, job_ids: tuple[str, ...], queue: str | None, settings: Settings) -> None:
    """Cancel what is not finished of a batch, of a queue, or single jobs."""
    if sum((batch is not None, bool(job_ids), queue is not None)) != 1:
        raise click.UsageError("give one of BATCH, --job and --queue")
    store = open_store(settings)
    try:
        if batch is not None:
            num_running = _cancel_batch(store, batch)
        elif queue is not None:
            num_running = _cancel_queue(store, queue)
        else:
            num_running = _cancel_jobs(store, job_ids)
    finally:
        store.close()
    if num_running:
        rows = "1 row still runs: it ends" if num_running == 1 else f"{num_running:,} rows still run: they end"
        say(f"{rows} when the worker hears of it, or another finds that worker dead")


def _cancel_batch(store: Store, batch: str) -> int:
    """Cancel a batch and say so; how many of its rows still run."""
    batch_id = find_batch(store, batch)
    num_cancelled = store.cancel_batch(batch_id)
    progress = store.batch_progress(batch_id)
    say(f"{batch_id}: {count(num_cancelled, 'row')} cancelled, {progress.succeeded:,} had succeeded")
    return progress.running


def _cancel_queue(store: Store, queue: str) -> int:
    """The same for all jobs of a queue."""
    num_cancelled = store.cancel_queue(queue)
    say(f"queue {queue}: {count(num_cancelled, 'row')} cancelled")
    return sum(row.running for row in store.queues() if row.queue == queue)


def _cancel_jobs(store: Store, job_ids: tuple[str, ...]) -> int:
    """The same for single jobs; all of them must be known."""
    for job_id in job_ids:
        if store.job(job_id) is None:
            raise click.BadParameter(f"there is no job {job_id}; nothing was cancelled", param_hint="--job")
    num_cancelled = store.cancel_jobs(job_ids)
    say(f"{count(num_cancelled, 'row')} cancelled")
    states = [row.state for job_id in job_ids if (row := store.job(job_id)) is not None]
    return states.count(JobState.RUNNING)
