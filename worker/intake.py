"""Intake: moves messages from the broker into SQL, losing none.

Owns the thread that pops, commits and acknowledges. Knows no Celery application; how a broker is asked is its door's
business. Invariants: a message is with the broker or in SQL at every moment; it is acknowledged after the commit; one
that cannot be read at all is set aside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvq.worker.backlog import Backlog
from kvq.worker.errors import BrokerError, StoreError, ValueRefused
from kvq.worker.failpoints import Failpoints
from kvq.worker.jobs import DEDUP_PERIOD_S, NewJob
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import read_message
from kvq.worker.outage import Outage
from kvq.worker.redis_door import Popped, RedisDoor
from kvq.worker.urls import is_redis

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

MAX_PER_POP = 200
_IDLE_S = 0.1
# While jobs run, looking costs them time, and what comes would hardly be run earlier.
_BUSY_S = 0.5
# Messages that come one by one are committed together.
_GATHER_S = 0.05
# Messages that follow each other so closely are a burst, for so long at most. Few jobs run meanwhile, which slows a
# sender on the same machine.
_BURST_GAP_S = 0.1
_BURST_S = 1.0
_BURST_LOOK_S = 0.02
# Messages are unacked for milliseconds; one that is so for longer belongs to an intake that died.
_RECLAIM_AFTER_S = 15.0
_RECLAIM_INTERVAL_S = 5.0
_ERROR_PAUSE_S = 1.0


class Door(Protocol):
    """How the messages of one queue are had from a broker; used by one thread.

    ``errors`` are what its methods raise while the broker is away; nothing is lost then.
    """

    errors: tuple[type[Exception], ...]

    @property
    def poison_name(self) -> str:
        """Where messages are that were set aside."""

    def pop(self, number: int) -> list[Popped]:
        """Take up to ``number`` messages, which the broker keeps until they are acknowledged."""

    def reclaim(self, number: int, idle_s: float) -> list[Popped]:
        """Take over messages of readers that died."""

    def acknowledge(self, popped: Sequence[Popped]) -> None:
        """They are in SQL."""

    def set_aside(self, message: Popped) -> None:
        """Nobody can read it: keep it for people."""

    def listen(self, seconds: float) -> bool:
        """Wait; True when somebody rang."""

    def close(self) -> None:
        """Let go of the broker."""


def open_door(url: str, keys: QueueKeys) -> Door:
    """The door of a broker, by its URL. Connects later."""
    if is_redis(url):
        return RedisDoor(url, keys)
    from kvq.worker.plain_door import PlainDoor

    return PlainDoor(url, keys)


class Intake:
    """Takes the messages of one queue into a store, on a thread of its own.

    Args:
        max_queued: most jobs that wait in the store; above it messages are left in Redis.
        on_new: called after new rows were committed, when a burst is over, or when somebody rang the doorbell.
        is_revoked: True for task ids that were revoked before their message was taken in.
        is_busy: True while jobs run here.
        dedup_period_s: how old a job may be whose dedup key counts.
    """

    def __init__(
        self,
        broker_url: str,
        store: Store,
        *,
        keys: QueueKeys,
        max_queued: int,
        on_new: Callable[[], None],
        on_fault: Callable[[Exception], None],
        is_revoked: Callable[[str], bool] = lambda _: False,
        is_busy: Callable[[], bool] = lambda: False,
        dedup_period_s: float = DEDUP_PERIOD_S,
        failpoints: Failpoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._on_new = on_new
        self._on_fault = on_fault
        self._is_revoked = is_revoked
        self._is_busy = is_busy
        self._dedup_period_s = dedup_period_s
        self._failpoints = failpoints or Failpoints()
        self._clock = clock
        self._backlog = Backlog(store, keys.queue, bound=max_queued, clock=clock)
        self._door = open_door(broker_url, keys)
        self._stopping = threading.Event()
        self._no_broker = Outage("the broker is away", logger, clock)
        self._no_database = Outage("the database cannot be used", logger, clock)
        self._reclaim_due_s = 0.0
        self._burst_until_s: float | None = None  # None: nothing comes, or jobs ran when it began to come
        self._came_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvq-intake", daemon=True)

    def start(self) -> None:
        """Start taking messages in."""
        self._thread.start()

    def stop(self, timeout_s: float = 15.0) -> None:
        """Take no more messages; those popped are committed first, if the database allows it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def take_once(self) -> int:
        """Pop, commit and acknowledge one round; returns the number of messages taken, 0 while the store is full.

        Raises:
            one of the door's errors: the broker is away; nothing was lost.
            StoreError: the database cannot be used; nothing was popped.
        """
        popped = self._pop(min(MAX_PER_POP, self._backlog.room()))
        self._note_burst(going_on=bool(popped))
        if popped:
            self._backlog.took(len(popped))
            self._failpoints.hit("after_pop")
            self._commit(popped)
        return len(popped)

    @property
    def in_burst(self) -> bool:
        """A sender is just sending, and nothing ran before: what is seen together can be planned together."""
        until_s = self._burst_until_s
        return until_s is not None and self._clock() < until_s

    def _note_burst(self, *, going_on: bool) -> None:
        now_s = self._clock()
        if going_on:
            self._came_s = now_s
            if self._burst_until_s is None and not self._is_busy():
                self._burst_until_s = now_s + _BURST_S
        elif self._burst_until_s is not None and now_s >= self._came_s + _BURST_GAP_S:
            self._burst_until_s = None
            self._on_new()

    def reclaim_once(self, idle_s: float = _RECLAIM_AFTER_S) -> int:
        """Take over messages that have been unacknowledged for ``idle_s``; returns their number."""
        popped = self._door.reclaim(MAX_PER_POP, idle_s)
        if popped:
            logger.warning("%d messages were left by an intake that died; taking them in", len(popped))
            self._commit(popped)
        return len(popped)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._round()
                except StoreError as err:
                    self._no_database.met(err)
                    self._stopping.wait(_ERROR_PAUSE_S)
                except self._door.errors as err:
                    self._no_broker.met(err)
                    self._stopping.wait(_ERROR_PAUSE_S)
        except Exception as err:
            logger.exception("the intake stopped for good")
            self._on_fault(err)
        finally:
            self._door.close()

    def _round(self) -> None:
        if self._clock() >= self._reclaim_due_s:
            self._reclaim_due_s = self._clock() + _RECLAIM_INTERVAL_S
            self.reclaim_once()
        num_taken = self.take_once()
        if num_taken == MAX_PER_POP:
            return
        if self.in_burst:
            self._stopping.wait(_BURST_LOOK_S)
        elif num_taken:
            self._stopping.wait(_GATHER_S)
        else:
            self._listen(_BUSY_S if self._is_busy() else _IDLE_S)

    def _listen(self, seconds: float) -> None:
        """Sleep until somebody rings."""
        if self._door.listen(seconds):
            self._on_new()

    def _pop(self, number: int) -> list[Popped]:
        if number <= 0:
            return []
        return self._door.pop(number)

    # -- committing ----------------------------------------------------------------------------------------

    def _commit(self, popped: Sequence[Popped]) -> None:
        jobs: dict[Popped, NewJob] = {}
        for message in popped:
            try:
                jobs[message] = read_message(message.raw, self._keys.queue)
            except BrokerError as err:
                self._set_aside(message, err)
            except Exception as err:  # one that nobody foresaw would end every intake that takes it over
                logger.exception("a message cannot be read")
                self._set_aside(message, err)
        try:
            self._insert(jobs)
        except ValueRefused:  # of one of them: find it, so that it does not hold up its neighbours
            for message, job in jobs.items():
                try:
                    self._insert({message: job})
                except ValueRefused as err:
                    self._set_aside(message, err)

    def _insert(self, jobs: dict[Popped, NewJob]) -> None:
        """Commit, waiting for the database as long as we are not to stop; then acknowledge.

        Raises:
            ValueRefused: one of them cannot be stored.
        """
        while jobs:
            try:
                self._store.intake_jobs(jobs.values(), dedup_period_s=self._dedup_period_s)
                revoked = [job.job_id for job in jobs.values() if self._is_revoked(job.job_id)]
                if revoked:
                    self._store.cancel_jobs(revoked)
            except ValueRefused:
                raise
            except StoreError as err:
                # Still in the unacked hash: should this process end now, another intake takes them over.
                self._no_database.met(err)
                if self._stopping.wait(_ERROR_PAUSE_S):
                    return
            else:
                self._failpoints.hit("after_inbox")
                self._door.acknowledge(list(jobs))
                self._on_new()
                return

    def _set_aside(self, message: Popped, reason: Exception) -> None:
        logger.error("a message cannot be taken in and is kept in %s: %s", self._door.poison_name, reason)
        self._door.set_aside(message)
