"""Audit: the promises of the store and of the broker, each checked against what is there now.

Owns the list of invariants. Changes nothing, and may run beside workers: what is only on its way is not held against
anybody. Knows which questions to ask; the answers are the store's and Redis's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from kvq.worker.config import Settings
from kvq.worker.errors import BrokerError
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from kvq.worker.urls import is_redis


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """One invariant; ``problems`` are sentences, none where it holds. ``note`` is no fault, but worth a look."""

    invariant: str
    problems: tuple[str, ...]
    note: str | None = None

    @property
    def holds(self) -> bool:
        """True when nothing contradicts it."""
        return not self.problems


def audit(store: Store, settings: Settings, *, wall_clock: Callable[[], float] = time.time) -> list[AuditCheck]:
    """Check everything.

    Raises:
        StoreError, BrokerError: what is to be checked cannot be reached.
    """
    checks = [
        AuditCheck(
            invariant="a job has one result exactly when it is in a terminal state, and one open attempt when it runs",
            problems=tuple(store.check_integrity()),
        ),
        AuditCheck(
            invariant="every running job has a live owner", problems=tuple(store.check_owners(lease_s=settings.lease_s))
        ),
        AuditCheck(
            invariant="no job succeeded twice, and the counts of every batch sum to its total",
            problems=tuple(store.check_counts()),
        ),
        AuditCheck(
            invariant="what ended was told to its sender: the outbox is drained",
            problems=tuple(store.check_outbox(lease_s=settings.lease_s)),
        ),
        AuditCheck(invariant="no KV block is held by a worker without jobs", problems=tuple(store.check_blocks())),
    ]
    if settings.broker is not None and is_redis(settings.broker):
        checks.append(_check_broker(settings, settings.broker, is_served=_is_served(store, settings), now=wall_clock()))
    return checks


def _is_served(store: Store, settings: Settings) -> bool:
    return any(worker.queue == settings.queue for worker in store.live_workers())


def _check_broker(settings: Settings, broker: str, *, is_served: bool, now: float) -> AuditCheck:
    """A message that was popped is committed and removed within moments, or given back after a lease."""
    keys = QueueKeys(queue=settings.queue)
    client = redis.Redis.from_url(broker)
    try:
        tags = {_text(tag) for tag in client.hkeys(keys.unacked)}
        popped_s = {_text(tag): score for tag, score in client.zrange(keys.unacked_index, 0, -1, withscores=True)}
        num_poison = int(client.llen(keys.poison))
    except redis.RedisError as err:
        raise BrokerError(f"the broker cannot be asked: {err}") from err
    finally:
        client.close()
    in_flight = {t for t in tags if is_served and t in popped_s and now - popped_s[t] < settings.lease_s}
    problems = []
    if stuck := tags - in_flight:
        problems.append(
            f"{len(stuck)} messages were taken from queue {settings.queue} and never stored ({keys.unacked})"
        )
    if lost := set(popped_s) - tags:
        problems.append(f"{len(lost)} entries of {keys.unacked_index} have no message")
    note = f"{num_poison} messages could not be read; they lie in {keys.poison}" if num_poison else None
    return AuditCheck(
        invariant=f"no message of queue {settings.queue} is between Redis and SQL", problems=tuple(problems), note=note
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
