"""Progress of a run: a live bar on a terminal, plain lines elsewhere. All of it is talk, so it goes to stderr.

Knows how to show a run, nothing of how it is done.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvq.cli.output import say

if TYPE_CHECKING:
    from kvq.worker.service_options import ServiceProgress
    from kvq.worker.store_records import BatchProgress

_RATE_WINDOW_S = 10.0
_LINE_INTERVAL_S = 5.0
_LOADING = "loading the model"


class Display(AbstractContextManager["Display"], Protocol):
    """What a run reports to."""

    def update(self, batch: BatchProgress, service: ServiceProgress) -> None:
        """Show the newest figures."""


def open_display(log_level: int) -> Display:
    """The display that fits where stderr goes. Log records of ``log_level`` and above are shown with it."""
    if sys.stderr.isatty():
        return BarDisplay(log_level)
    return LineDisplay(log_level)


class Rate:
    """Output tokens per second over the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int) -> float:
        """Note the total so far; returns the rate."""
        now = self._clock()
        self._samples.append((now, num_tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        return (num_tokens - before) / (now - then) if now > then else 0.0


class Figures:
    """The run in one phrase: tokens per second, KV usage, prefix hits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = Rate(clock)

    def describe(self, service: ServiceProgress) -> str:
        """Empty while the engine loads."""
        stats = service.engine
        if stats is None:
            return ""
        hits = stats.cached_prompt_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        return (
            f"{self._rate.add(stats.generated_tokens):,.0f} tokens/s, KV {stats.kv_usage:.0%}, prefix hits {hits:.0%}"
        )


class BarDisplay:
    """A bar that is redrawn in place."""

    def __init__(self, log_level: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._log_level = log_level
        self._figures = Figures()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rows"),
            TextColumn("{task.fields[figures]}", style="cyan"),
            TimeElapsedColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task(_LOADING, total=None, figures="")

    def __enter__(self) -> Self:
        handler = RichHandler(console=self._console, show_path=False, markup=False)
        logging.basicConfig(level=self._log_level, format="%(message)s", handlers=[handler], force=True)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, batch: BatchProgress, service: ServiceProgress) -> None:
        """Redraw."""
        self._bar.update(
            self._task,
            description="running" if service.ready else _LOADING,
            completed=batch.done,
            total=batch.total,
            figures=self._figures.describe(service),
        )


class LineDisplay:
    """A line now and then, for logs."""

    def __init__(self, log_level: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._log_level = log_level
        self._clock = clock
        self._figures = Figures(clock)
        self._due_s = 0.0
        self._said = ""

    def __enter__(self) -> Self:
        logging.basicConfig(level=self._log_level, format="%(levelname)s %(message)s", stream=sys.stderr, force=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, batch: BatchProgress, service: ServiceProgress) -> None:
        """Say something when it is new, every few seconds and at the end."""
        figures = self._figures.describe(service)
        if self._clock() < self._due_s and not batch.finished:
            return
        self._due_s = self._clock() + _LINE_INTERVAL_S
        line = f"{batch.done:,}/{batch.total:,} rows, {figures}" if service.ready else _LOADING
        if line != self._said:
            say(line)
            self._said = line
