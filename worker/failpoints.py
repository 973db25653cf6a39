"""Failpoints: places where a test may kill the process, by name.

Owns the names and the counting. Knows nothing of what happens there. Off unless asked for: with an empty
specification ``hit`` does nothing. Invariant: a hit kills with SIGKILL, so nothing is flushed or cleaned up.
"""

from __future__ import annotations

import os
import signal
import threading

from kvq.worker.errors import SettingsError

VARIABLE = "KVQ_FAILPOINTS"
NAMES = frozenset(
    {
        "after_pop",
        "after_inbox",
        "after_claim",
        "mid_step",
        "before_commit",
        "after_commit",
        "after_backend",
        "during_drain",
        "during_migrate",
        "before_webhook",
        "after_webhook",
    }
)


class Failpoints:
    """Counts hits and kills the process at the one asked for.

    Args:
        spec: ``name:n`` pairs joined by commas: die at the n-th hit of that name (n is 1 where left out).

    Raises:
        SettingsError: for an unknown name or a count that is not a positive number.
    """

    def __init__(self, spec: str | None = None) -> None:
        self._lock = threading.Lock()
        self._hits_left = dict(_parse(part) for part in (spec or "").split(",") if part.strip())

    @classmethod
    def from_environment(cls) -> Failpoints:
        """The failpoints asked for by KVQ_FAILPOINTS; none where it is not set."""
        return cls(os.environ.get(VARIABLE))

    def hit(self, name: str) -> None:
        """Note that the place called ``name`` was reached; the process may end here."""
        assert name in NAMES, name
        if name not in self._hits_left:
            return
        with self._lock:
            self._hits_left[name] -= 1
            if self._hits_left[name] == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _parse(part: str) -> tuple[str, int]:
    name, _, count = part.strip().partition(":")
    if name not in NAMES:
        raise SettingsError(VARIABLE, f"{name!r} is not one of {', '.join(sorted(NAMES))}", source="environment")
    if count and not (count.isdecimal() and int(count) >= 1):
        raise SettingsError(VARIABLE, f"{part!r}: the count must be a positive number", source="environment")
    return name, int(count or 1)
