"""What the log is told of a server that is away, while somebody tries it every second.

Knows neither the server nor how often it is tried. Used by one thread. Invariant: the same reason is told once a
minute, however long it lasts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_TELL_EVERY_S = 60.0


class Outage:
    """Tells a logger that something is away.

    Args:
        what: what is said before the reason: "the broker is away".
    """

    def __init__(self, what: str, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._logger = logger
        self._clock = clock
        self._told = ""
        self._due_s = 0.0

    def met(self, err: Exception) -> None:
        """It was tried in vain, and will be tried again."""
        reason, now = str(err), self._clock()
        if reason == self._told and now < self._due_s:
            return
        self._told, self._due_s = reason, now + _TELL_EVERY_S
        self._logger.warning("%s, trying again until it answers: %s", self._what, reason)
