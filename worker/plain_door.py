"""PlainDoor: messages of a queue of any broker that keeps what is not acknowledged, such as RabbitMQ.

Owns one connection and the messages it holds unacknowledged. Knows no SQL. Messages are asked for one by one
(``basic.get``), as many as the store has room for: nothing is prefetched, so back-pressure is not asking.
Invariant: a message is acknowledged after its row was committed; one whose connection breaks before that is delivered
again by the broker, and the row that is there already makes it a duplicate.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from typing import Any

from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.message import Message

from kvq.worker.keys import QueueKeys
from kvq.worker.messages import MAX_MESSAGE_BYTES
from kvq.worker.redis_door import Popped
from kvq.worker.urls import amqp_tls

_CONNECT_TIMEOUT_S = 5.0
_HIGHEST_PRIORITY = 9


class PlainDoor:
    """The messages of one queue. Not thread-safe; connects when first used, and again after an error.

    Raises:
        one of ``errors``: from every method, while the broker is away; nothing is lost by it.
    """

    def __init__(self, url: str, keys: QueueKeys) -> None:
        self._keys = keys
        plain_url, tls = amqp_tls(url)
        self._connection = Connection(plain_url, ssl=tls or False, connect_timeout=_CONNECT_TIMEOUT_S)
        self._queue: Any = None
        self._held: dict[bytes, Message] = {}
        self.errors: tuple[type[Exception], ...] = (
            *self._connection.connection_errors,
            *self._connection.channel_errors,
            OperationalError,  # what kombu makes of them when it cannot even connect
        )

    @property
    def poison_name(self) -> str:
        """Where messages are that were set aside."""
        return f"the queue {self._keys.poison}"

    def pop(self, number: int) -> list[Popped]:
        """Take up to ``number`` messages; the broker keeps them until they are acknowledged."""
        popped: list[Popped] = []
        try:
            queue = self._open()
            num_bytes = 0
            while len(popped) < number and num_bytes < MAX_MESSAGE_BYTES:
                message = queue.get(no_ack=False)
                if message is None:
                    break
                raw = _envelope(message)
                num_bytes += len(raw)
                tag = str(message.delivery_tag).encode()
                self._held[tag] = message
                popped.append(Popped(tag=tag, raw=raw))
        except self.errors:
            self._abandon()
            raise
        return popped

    def reclaim(self, number: int, idle_s: float) -> list[Popped]:
        """None: the broker delivers again what a connection that broke had not acknowledged."""
        return []

    def acknowledge(self, popped: Sequence[Popped]) -> None:
        """They are in SQL: the broker may forget them."""
        try:
            for message in popped:
                if (held := self._held.pop(message.tag, None)) is not None:
                    held.ack()
        except self.errors:
            self._abandon()
            raise

    def set_aside(self, message: Popped) -> None:
        """Move one to a queue for people to look at."""
        try:
            held = self._held.pop(message.tag, None)
            if held is None:
                return
            poison = Queue(self._keys.poison, durable=True)(self._connection.default_channel)
            poison.declare()
            with self._connection.Producer() as producer:
                producer.publish(message.raw, routing_key=self._keys.poison, content_type="application/data")
            held.ack()
        except self.errors:
            self._abandon()
            raise

    def listen(self, seconds: float) -> bool:
        """Wait: such a broker has no doorbell of ours."""
        time.sleep(seconds)
        return False

    def close(self) -> None:
        """Close the connection; what it holds is delivered again."""
        self._abandon()

    def _open(self) -> Any:
        if self._queue is None:
            queue = Queue(self._keys.queue, Exchange(self._keys.queue, type="direct"), routing_key=self._keys.queue)
            bound = queue(self._channel())
            try:
                bound.declare()
            except self._connection.channel_errors:
                # It is there, with properties somebody else has chosen: it will do.
                self._abandon()
                bound = queue(self._channel())
            self._queue = bound
        return self._queue

    def _channel(self) -> Any:
        channel = self._connection.default_channel
        channel.Message = sealed(type(channel).Message)
        return channel

    def _abandon(self) -> None:
        self._queue = None
        self._held.clear()
        self._connection.close()


def sealed(kind: type[Message]) -> type[Message]:
    """Messages that kombu leaves packed: it would unpack them whatever they become, and refuse those it cannot."""

    class Sealed(kind):  # type: ignore[misc]
        errors: Any = (None,)  # with one it looks no further

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.errors = []

    return Sealed


def _envelope(message: Message) -> bytes:
    """The message as it would lie in Redis."""
    properties = dict(message.properties)
    if isinstance(properties.get("priority"), int):
        # Of AMQP's priorities the highest is served first, of ours the lowest.
        properties["priority"] = _HIGHEST_PRIORITY - min(_HIGHEST_PRIORITY, max(0, properties["priority"]))
    properties["delivery_tag"] = str(message.delivery_tag)
    properties.pop("body_encoding", None)
    body = message.body
    if isinstance(body, bytes) and message.headers.get("compression"):
        properties["body_encoding"], body = "base64", base64.b64encode(body).decode()
    return json.dumps(
        {
            "body": body.decode("utf-8", "surrogateescape") if isinstance(body, bytes) else body,
            "content-type": message.content_type,
            "content-encoding": message.content_encoding,
            "headers": dict(message.headers),
            "properties": {name: value for name, value in properties.items() if value is not None},
        },
        default=str,
    ).encode()
