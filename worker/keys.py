"""Every Redis key and channel of kvq, with its type.

Owns the names; talks to no server. The lists are kombu's own (its priority steps and separator), the unacked
pair has kombu's format but a name of ours: the keys of that name are shared by every Celery application of a
Redis database, and the shortest visibility timeout among them would strike the others' messages.
"""

from __future__ import annotations

from dataclasses import dataclass

# kombu.transport.redis: Channel.priority_steps and Channel.sep. Of Celery's priorities 0 is served first.
PRIORITY_STEPS = (0, 3, 6, 9)
_SEPARATOR = "\x06\x16"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueKeys:
    """The keys of one queue."""

    queue: str

    @property
    def waiting(self) -> tuple[str, ...]:
        """list per priority step, most urgent first: messages as kombu pushes them (left in, right out)."""
        return tuple(f"{self.queue}{_SEPARATOR}{step}" if step else self.queue for step in PRIORITY_STEPS)

    @property
    def unacked(self) -> str:
        """hash, delivery tag -> JSON [message, exchange, routing key]: popped, not yet committed to SQL."""
        return f"{self.queue}:unacked"

    @property
    def unacked_index(self) -> str:
        """sorted set, delivery tag -> seconds since the epoch at which it was popped."""
        return f"{self.queue}:unacked_index"

    @property
    def poison(self) -> str:
        """list: messages that cannot be read at all, as they came; for people to look at."""
        return f"{self.queue}:poison"

    @property
    def doorbell(self) -> str:
        """channel: something was put into SQL for this queue; the content does not matter."""
        return f"{self.queue}:doorbell"

    @property
    def control(self) -> str:
        """list: the queue that Celery's own consumer reads instead of ours; nobody sends to it."""
        return f"{self.queue}.control"
