"""``kvq top``: workers, queues and batches at a glance, again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvq.cli.batches import open_store
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import print_json, seconds, stdout_console
from kvq.cli.summary import state_text
from kvq.worker.config import Settings
from kvq.worker.errors import StoreUnavailable
from kvq.worker.urls import masked

if TYPE_CHECKING:
    from kvq.worker.store import Store
    from kvq.worker.store_figures import QueueRow, WorkerSample
    from kvq.worker.store_records import BatchProgress, WorkerRow

# A worker reports every ten seconds; after a minute without a report it has nothing to do.
_FRESH_S = 60.0
# A look adds up all rows: the next one comes after so many times what it took.
_LOOK_COST = 10
_NUM_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything ``top`` shows. ``samples`` are the newest of each live worker that has work."""

    workers: list[WorkerRow]
    samples: dict[str, WorkerSample]
    queues: list[QueueRow]
    batches: list[BatchProgress]


@click.command("top")
@click.option("--once", is_flag=True, help="Print it once and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between looks; more where one takes long.",
)
@settings_options("db")
@json_option
def command(once: bool, interval: float, settings: Settings, as_json: bool) -> None:
    """Watch workers, queues and batches; Ctrl-C ends it.

    With --once, or where standard output is no terminal, it is printed once. --json prints it once as JSON.
    """
    console = stdout_console()
    with open_store(settings) as store:
        if as_json:
            print_json(look(store))
            return
        if once or not console.is_terminal:
            console.print(_view(look(store), settings.db))
            return
        with Live(_view(look(store), settings.db), console=console, screen=True, auto_refresh=False) as live:
            try:
                took_s = 0.0
                while True:
                    time.sleep(max(interval, _LOOK_COST * took_s))
                    began_s = time.monotonic()
                    live.update(_next_view(store, settings.db), refresh=True)
                    took_s = time.monotonic() - began_s
            except KeyboardInterrupt:
                return


def look(store: Store) -> Overview:
    """What is going on now."""
    newest = {sample.worker_id: sample for sample in store.worker_samples(last_s=_FRESH_S)}
    workers = store.live_workers()
    return Overview(
        workers=workers,
        samples={w.worker_id: newest[w.worker_id] for w in workers if w.worker_id in newest},
        queues=store.queues(),
        batches=store.list_batches(_NUM_BATCHES),
    )


def _next_view(store: Store, db: str) -> Group:
    try:
        return _view(look(store), db)
    except StoreUnavailable as err:  # it may come back; a live view waits for it
        return Group(Text(f"the database cannot be reached: {err}", style="red"))


def _view(overview: Overview, db: str) -> Group:
    samples = overview.samples.values()
    head = Text.assemble(
        ("kvq top", "bold"),
        f"  {masked(db)}  ",
        (f"{sum(s.generation_tps for s in samples):,.0f}", "bold green"),
        " output tokens/s  ",
        (f"{sum(s.prompt_tps for s in samples):,.0f}", "bold green"),
        " prompt tokens/s",
    )
    parts: list[Text | Table] = [head, Text(), _workers(overview)]
    if overview.queues:
        parts.append(_queues(overview.queues))
    if overview.batches:
        parts.append(_batches(overview.batches))
    return Group(*parts)


def _workers(overview: Overview) -> Table | Text:
    if not overview.workers:
        return Text("no worker is running\n", style="yellow")
    table = _table(
        "worker",
        "queue",
        "model",
        "running",
        "waiting",
        "out/s",
        "prompt/s",
        "KV",
        "reused",
        "guessed",
        "swap",
        "preempt",
        "seen",
    )
    for worker in overview.workers:
        sample = overview.samples.get(worker.worker_id)
        figures = ["-"] * 9 if sample is None else _figures(sample)
        seen = f"{seconds(worker.heartbeat_age_s)} ago"
        table.add_row(worker.worker_id[:24], worker.queue, worker.model or "-", *figures, seen)
    return table


def _figures(sample: WorkerSample) -> list[str]:
    return [
        f"{sample.running:,}",
        f"{sample.waiting:,}",
        f"{sample.generation_tps:,.0f}",
        f"{sample.prompt_tps:,.0f}",
        f"{sample.kv_usage:.0%}",
        f"{sample.prefix_hit_rate:.0%}",
        "-" if sample.acceptance is None else f"{sample.acceptance:.0%}",
        f"{sample.swapped_in + sample.swapped_out:,}",
        f"{sample.preemptions:,}",
    ]


def _queues(queues: Sequence[QueueRow]) -> Table:
    table = _table("queue", "queued", "running", "dead", "oldest", "workers", "state")
    for q in queues:
        table.add_row(
            q.queue,
            f"{q.queued:,}",
            f"{q.running:,}",
            f"{q.dead:,}",
            seconds(q.oldest_age_s),
            f"{q.num_workers}",
            "paused" if q.paused else "",
        )
    return table


def _batches(batches: Sequence[BatchProgress]) -> Table:
    table = _table("batch", "name", "done", "states")
    for batch in batches:
        share = f"{batch.done / batch.total:.0%}" if batch.total else "-"
        table.add_row(batch.batch_id[:8], Text(batch.name or ""), share, state_text(batch))
    return table


def _table(*columns: str) -> Table:
    left = {"worker", "queue", "model", "state", "batch", "name", "states"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table
