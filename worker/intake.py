"""Intake: moves messages from Redis into SQL, losing none.

Owns the thread that pops, commits and acknowledges, and the doorbell. Knows no Celery application: the pop is
one Lua script, since a pop followed by a note of it loses a message when the process dies in between
(kombu's consumer does). Invariants: a message is in a waiting list, in the unacked hash or in SQL at every
moment; it is acknowledged after the commit; one that cannot be read at all ends in the poison list.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis

from kvq.worker.backlog import Backlog
from kvq.worker.errors import BrokerError, StoreError, StoreUnavailable
from kvq.worker.failpoints import Failpoints
from kvq.worker.jobs import DEDUP_PERIOD_S, NewJob
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import MAX_MESSAGE_BYTES, read_message

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

MAX_PER_POP = 200
_IDLE_S = 0.1
# Messages are unacked for milliseconds; one that is so for longer belongs to an intake that died.
_RECLAIM_AFTER_S = 15.0
_RECLAIM_INTERVAL_S = 5.0
_ERROR_PAUSE_S = 1.0
# The database clock has no part in this; Redis's own does, so that no machine's clock matters.
# KEYS: unacked, unacked_index, poison, waiting lists in order of urgency. ARGV: how many, most bytes of a message.
# A message over the bound is set aside unread, and a round ends once it holds so many bytes.
# The value is kombu's, by concatenation: encoding the decoded message again would turn [] into {}.
_POP = """
local now = redis.call('TIME')
local score = tonumber(now[1]) + tonumber(now[2]) / 1000000
local left = tonumber(ARGV[1])
local most = tonumber(ARGV[2])
local bytes = 0
local popped = {}
for i = 4, #KEYS do
  while left > 0 and bytes < most do
    local raw = redis.call('RPOP', KEYS[i])
    if not raw then break end
    left = left - 1
    bytes = bytes + #raw
    local ok, message = false, nil
    if #raw <= most then ok, message = pcall(cjson.decode, raw) end
    local properties = ok and type(message) == 'table' and message.properties
    local tag = type(properties) == 'table' and properties.delivery_tag
    if type(tag) == 'string' then
      local info = properties.delivery_info
      if type(info) ~= 'table' then info = {} end
      local exchange = type(info.exchange) == 'string' and info.exchange or ''
      local key = type(info.routing_key) == 'string' and info.routing_key or ''
      redis.call('HSET', KEYS[1], tag, '[' .. raw .. ',' .. cjson.encode(exchange) .. ',' .. cjson.encode(key) .. ']')
      redis.call('ZADD', KEYS[2], score, tag)
      popped[#popped + 1] = tag
      popped[#popped + 1] = raw
    else
      redis.call('LPUSH', KEYS[3], raw)
    end
  end
end
return popped
"""
# Takes over what a dead intake left behind. KEYS: unacked, unacked_index. ARGV: how many, seconds.
# Bumping the score keeps other intakes off while this one commits. The message is cut out of its wrapping by
# length, byte for byte as it came.
_RECLAIM = """
local now = redis.call('TIME')
local score = tonumber(now[1]) + tonumber(now[2]) / 1000000
local old = string.format('%.6f', score - tonumber(ARGV[2]))
local taken = {}
for _, tag in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', old, 'LIMIT', 0, ARGV[1])) do
  local value = redis.call('HGET', KEYS[1], tag)
  if value then
    local wrapped = cjson.decode(value)
    local rest = ',' .. cjson.encode(wrapped[2]) .. ',' .. cjson.encode(wrapped[3]) .. ']'
    redis.call('ZADD', KEYS[2], score, tag)
    taken[#taken + 1] = tag
    taken[#taken + 1] = string.sub(value, 2, -(#rest + 1))
  else
    redis.call('ZREM', KEYS[2], tag)
  end
end
return taken
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Popped:
    tag: bytes
    raw: bytes


class Intake:
    """Takes the messages of one queue into a store, on a thread of its own.

    Args:
        max_queued: most jobs that wait in the store; above it messages are left in Redis.
        on_new: called after new rows were committed, or when somebody rang the doorbell.
        is_revoked: True for task ids that were revoked before their message was taken in.
        dedup_period_s: how old a job may be whose dedup key counts.
    """

    def __init__(
        self,
        redis_url: str,
        store: Store,
        *,
        keys: QueueKeys,
        max_queued: int,
        on_new: Callable[[], None],
        on_fault: Callable[[Exception], None],
        is_revoked: Callable[[str], bool] = lambda _: False,
        dedup_period_s: float = DEDUP_PERIOD_S,
        failpoints: Failpoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._on_new = on_new
        self._on_fault = on_fault
        self._is_revoked = is_revoked
        self._dedup_period_s = dedup_period_s
        self._failpoints = failpoints or Failpoints()
        self._clock = clock
        self._backlog = Backlog(store, keys.queue, bound=max_queued, clock=clock)
        self._client = redis.Redis.from_url(redis_url, socket_timeout=10.0, socket_connect_timeout=5.0)
        self._pop_script = self._client.register_script(_POP)
        self._reclaim_script = self._client.register_script(_RECLAIM)
        self._bell = self._client.pubsub(ignore_subscribe_messages=True)
        self._stopping = threading.Event()
        self._reclaim_due_s = 0.0
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
            redis.RedisError: Redis is away; nothing was lost.
            StoreError: the database is away; nothing was popped.
        """
        popped = self._pop(min(MAX_PER_POP, self._backlog.room()))
        if popped:
            self._backlog.took(len(popped))
            self._failpoints.hit("after_pop")
            self._commit(popped)
        return len(popped)

    def reclaim_once(self, idle_s: float = _RECLAIM_AFTER_S) -> int:
        """Take over messages that have been unacknowledged for ``idle_s``; returns their number."""
        answer = self._reclaim_script(keys=[self._keys.unacked, self._keys.unacked_index], args=[MAX_PER_POP, idle_s])
        popped = _messages(answer)
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
                except StoreUnavailable as err:
                    logger.warning("the database is away, trying again in %.1f s: %s", _ERROR_PAUSE_S, err)
                    self._stopping.wait(_ERROR_PAUSE_S)
                except redis.RedisError as err:
                    logger.warning("the broker is away, trying again in %.1f s: %s", _ERROR_PAUSE_S, err)
                    self._stopping.wait(_ERROR_PAUSE_S)
        except Exception as err:
            logger.exception("the intake stopped for good")
            self._on_fault(err)
        finally:
            self._bell.close()
            self._client.close()

    def _round(self) -> None:
        if self._clock() >= self._reclaim_due_s:
            self._reclaim_due_s = self._clock() + _RECLAIM_INTERVAL_S
            self.reclaim_once()
        if self.take_once() == 0:
            self._listen(_IDLE_S)

    def _listen(self, seconds: float) -> None:
        """Sleep until somebody rings."""
        if not self._bell.subscribed:
            self._bell.subscribe(self._keys.doorbell)
        if self._bell.get_message(timeout=seconds) is not None:
            self._on_new()

    def _pop(self, number: int) -> list[_Popped]:
        if number <= 0:
            return []
        keys = self._keys
        answer = self._pop_script(
            keys=[keys.unacked, keys.unacked_index, keys.poison, *keys.waiting], args=[number, MAX_MESSAGE_BYTES]
        )
        return _messages(answer)

    # -- committing ----------------------------------------------------------------------------------------

    def _commit(self, popped: Sequence[_Popped]) -> None:
        jobs: dict[_Popped, NewJob] = {}
        for message in popped:
            try:
                jobs[message] = read_message(message.raw, self._keys.queue)
            except BrokerError as err:
                self._set_aside(message, err)
        try:
            self._insert(jobs)
        except StoreError:  # it refuses one of them: find it, so that it does not hold up its neighbours
            for message, job in jobs.items():
                try:
                    self._insert({message: job})
                except StoreError as err:
                    self._set_aside(message, err)

    def _insert(self, jobs: dict[_Popped, NewJob]) -> None:
        """Commit, waiting for the database as long as we are not to stop; then acknowledge.

        Raises:
            StoreError: the database is there and refuses them.
        """
        while jobs:
            try:
                inserted = self._store.intake_jobs(jobs.values(), dedup_period_s=self._dedup_period_s)
                revoked = [job_id for job_id in inserted if self._is_revoked(job_id)]
                if revoked:
                    self._store.cancel_jobs(revoked)
            except StoreUnavailable as err:
                # Still in the unacked hash: should this process end now, another intake takes them over.
                logger.warning("the database is away, %d messages wait for it: %s", len(jobs), err)
                if self._stopping.wait(_ERROR_PAUSE_S):
                    return
            else:
                self._failpoints.hit("after_inbox")
                self._acknowledge([message.tag for message in jobs])
                self._on_new()
                return

    def _acknowledge(self, tags: list[bytes]) -> None:
        with self._client.pipeline(transaction=True) as pipe:
            pipe.zrem(self._keys.unacked_index, *tags)
            pipe.hdel(self._keys.unacked, *tags)
            pipe.execute()

    def _set_aside(self, message: _Popped, reason: Exception) -> None:
        logger.error("a message cannot be taken in and is kept in the list %s: %s", self._keys.poison, reason)
        with self._client.pipeline(transaction=True) as pipe:
            pipe.lpush(self._keys.poison, message.raw)
            pipe.zrem(self._keys.unacked_index, message.tag)
            pipe.hdel(self._keys.unacked, message.tag)
            pipe.execute()


def _messages(answer: Any) -> list[_Popped]:
    return [_Popped(tag=tag, raw=raw) for tag, raw in zip(answer[::2], answer[1::2], strict=True)]
