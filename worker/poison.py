"""Poison: the messages of a queue that nobody could read, kept in Redis for people to look at.

Owns looking, trying again and deleting. Knows no SQL. Invariant: a message that is tried again moves from the list
to the queue in one step, so that none is lost between.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

import redis

from kvq.worker.errors import BrokerError
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import MAX_MESSAGE_BYTES, read_message

_SHOWN_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonMessage:
    """One of them: its size, why it cannot be read, and how it begins."""

    num_bytes: int
    reason: str
    begins: str


class PoisonList:
    """The poison list of one queue. A context manager.

    Raises:
        BrokerError: from every method, when Redis cannot be reached.
    """

    def __init__(self, redis_url: str, queue: str) -> None:
        self._keys = QueueKeys(queue=queue)
        self._client = redis.Redis.from_url(redis_url, socket_timeout=10.0, socket_connect_timeout=5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._client.close()

    def messages(self, limit: int) -> list[PoisonMessage]:
        """The newest first."""
        try:
            raws = self._client.lrange(self._keys.poison, 0, limit - 1)
        except redis.RedisError as err:
            raise BrokerError(f"the broker cannot be asked: {err}") from err
        return [self._described(raw) for raw in raws]

    def retry(self) -> int:
        """Put all of them back into the queue, the oldest first; returns how many."""
        try:
            number = int(self._client.llen(self._keys.poison))
            moved = 0
            while moved < number and self._client.lmove(self._keys.poison, self._keys.queue, "RIGHT", "LEFT"):
                moved += 1
        except redis.RedisError as err:
            raise BrokerError(f"the broker cannot be asked: {err}") from err
        return moved

    def drop(self) -> int:
        """Delete all of them; returns how many."""
        try:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.llen(self._keys.poison)
                pipe.delete(self._keys.poison)
                return int(pipe.execute()[0])
        except redis.RedisError as err:
            raise BrokerError(f"the broker cannot be asked: {err}") from err

    def _described(self, raw: bytes) -> PoisonMessage:
        begins = raw[:_SHOWN_BYTES].decode("utf-8", "replace")
        return PoisonMessage(num_bytes=len(raw), reason=_reason(raw, self._keys.queue), begins=begins)


def _reason(raw: bytes, queue: str) -> str:
    if len(raw) > MAX_MESSAGE_BYTES:
        return f"it is larger than {MAX_MESSAGE_BYTES >> 20} MiB"
    try:
        read_message(raw, queue)
    except BrokerError as err:
        return str(err)
    except Exception as err:  # noqa: BLE001, as the intake said when it set the message aside
        return f"{type(err).__name__}: {err}"
    if not isinstance((json.loads(raw).get("properties") or {}).get("delivery_tag"), str):
        return "it has no delivery tag"
    return "it can be read now, or the database refused it: try it again"
