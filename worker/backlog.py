"""Backlog: how many more jobs a queue may take in before those who bring them have to wait.

Owns the measuring: an exact count costs a walk over the waiting rows, so it is made now and then and reckoned
with in between. Knows no Redis. Several processes measure for themselves, so the bound may be overstepped by what
they bring between two counts. Invariant: waiting is never silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INTERVAL_S = 1.0
# Counting takes at most this share of the time.
_COST_SHARE = 0.05


class Backlog:
    """The room of one queue, for one thread.

    Args:
        bound: most jobs that may wait in the queue.
        on_full: called with a sentence when waiting begins.
    """

    def __init__(
        self,
        store: Store,
        queue: str,
        *,
        bound: int,
        on_full: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._queue = queue
        self._bound = bound
        self._on_full = on_full
        self._clock = clock
        self._sleep = sleep
        self._room = 0
        self._due_s = clock()
        self._changed = True  # jobs were brought in since the last count, or there was no room for them
        self._said = False

    def room(self) -> int:
        """How many jobs may come in now; 0 when the queue is full.

        Raises:
            StoreError: the database cannot be read.
        """
        began_s = self._clock()
        if self._changed and began_s >= self._due_s:
            self._room = max(0, self._bound - self._store.num_queued(self._queue, at_most=self._bound))
            ended_s = self._clock()
            self._due_s = ended_s + max(_INTERVAL_S, (ended_s - began_s) / _COST_SHARE)
            self._changed = self._room == 0
        if self._room > 0:
            self._said = False
        elif not self._said:
            self._said = True
            self._on_full(
                f"queue {self._queue} holds {self._bound:,} waiting jobs (max_queued): no more are taken in until "
                f"workers have run some"
            )
        return self._room

    def took(self, number: int) -> None:
        """So many jobs came in."""
        self._room = max(0, self._room - number)
        self._changed = True

    def paced(self, jobs: Iterable[T]) -> Iterator[T]:
        """The jobs, held back while the queue is full."""
        for job in jobs:
            while self.room() <= 0:
                self._sleep(_INTERVAL_S)
            self.took(1)
            yield job
