"""RedisDoor: messages of a queue in Redis, popped so that none is ever in the worker alone.

Owns the Lua scripts, the doorbell and the poison list. Knows no SQL and no Celery application: the pop is one script,
since a pop followed by a note of it loses a message when the process dies in between (kombu's consumer does).
Invariant: a message is in a waiting list, in the unacked hash or in the poison list until ``acknowledge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from kvq.worker.keys import QueueKeys
from kvq.worker.messages import MAX_MESSAGE_BYTES

# Half of a surrogate pair, which Redis's JSON decoder refuses and Celery copies into a header, must not keep a message
# from being read: intake refuses the row, and its sender hears why. Only tag, exchange and routing key are read here.
_DECODE = r"""
local function decode(raw)
  local ok, value = pcall(cjson.decode, raw)
  if not ok then
    local plain = string.gsub(raw, '\\\\', '')
    ok, value = pcall(cjson.decode, (string.gsub(plain, '\\u[dD][89a-fA-F]%x%x', '?')))
  end
  return ok and value
end
"""
# The database clock has no part in this; Redis's own does, so that no machine's clock matters.
# KEYS: unacked, unacked_index, poison, waiting lists in order of urgency. ARGV: how many, most bytes of a message.
# A message over the bound is set aside unread, and a round ends once it holds so many bytes.
# The value is kombu's, by concatenation: encoding the decoded message again would turn [] into {}.
_POP = (
    _DECODE
    + """
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
    local message = #raw <= most and decode(raw)
    local properties = type(message) == 'table' and message.properties
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
)
# Takes over what a dead intake left behind. KEYS: unacked, unacked_index. ARGV: how many, seconds.
# Bumping the score keeps other intakes off while this one commits. The message is cut out of its wrapping by
# length, byte for byte as it came.
_RECLAIM = (
    _DECODE
    + """
local now = redis.call('TIME')
local score = tonumber(now[1]) + tonumber(now[2]) / 1000000
local old = string.format('%.6f', score - tonumber(ARGV[2]))
local taken = {}
for _, tag in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', old, 'LIMIT', 0, ARGV[1])) do
  local value = redis.call('HGET', KEYS[1], tag)
  if value then
    local wrapped = decode(value)
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
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Popped:
    """A message in our hands: what to acknowledge it by, and its bytes in kombu's envelope."""

    tag: bytes
    raw: bytes


class RedisDoor:
    """The messages of one queue. Not thread-safe; connects when first used.

    Raises:
        redis.RedisError: from every method, while Redis is away; nothing is lost by it.
    """

    errors: tuple[type[Exception], ...] = (redis.RedisError,)

    def __init__(self, url: str, keys: QueueKeys) -> None:
        self._keys = keys
        self._client = redis.Redis.from_url(url, socket_timeout=10.0, socket_connect_timeout=5.0)
        self._pop_script = self._client.register_script(_POP)
        self._reclaim_script = self._client.register_script(_RECLAIM)
        self._bell = self._client.pubsub(ignore_subscribe_messages=True)

    @property
    def poison_name(self) -> str:
        """Where messages are that were set aside."""
        return f"the list {self._keys.poison}"

    def pop(self, number: int) -> list[Popped]:
        """Take up to ``number`` messages, most urgent first; they stay in the unacked hash."""
        keys = self._keys
        answer = self._pop_script(
            keys=[keys.unacked, keys.unacked_index, keys.poison, *keys.waiting], args=[number, MAX_MESSAGE_BYTES]
        )
        return _messages(answer)

    def reclaim(self, number: int, idle_s: float) -> list[Popped]:
        """Take over up to ``number`` messages that have been unacknowledged for ``idle_s``."""
        keys = self._keys
        return _messages(self._reclaim_script(keys=[keys.unacked, keys.unacked_index], args=[number, idle_s]))

    def acknowledge(self, popped: Sequence[Popped]) -> None:
        """They are in SQL: forget them."""
        tags = [message.tag for message in popped]
        with self._client.pipeline(transaction=True) as pipe:
            pipe.zrem(self._keys.unacked_index, *tags)
            pipe.hdel(self._keys.unacked, *tags)
            pipe.execute()

    def set_aside(self, message: Popped) -> None:
        """Move one to the poison list."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.lpush(self._keys.poison, message.raw)
            pipe.zrem(self._keys.unacked_index, message.tag)
            pipe.hdel(self._keys.unacked, message.tag)
            pipe.execute()

    def listen(self, seconds: float) -> bool:
        """Wait for the doorbell; True when it rang."""
        if not self._bell.subscribed:
            self._bell.subscribe(self._keys.doorbell)
        return self._bell.get_message(timeout=seconds) is not None

    def close(self) -> None:
        """Close the connections."""
        self._bell.close()
        self._client.close()


def _messages(answer: Any) -> list[Popped]:
    return [Popped(tag=tag, raw=raw) for tag, raw in zip(answer[::2], answer[1::2], strict=True)]
