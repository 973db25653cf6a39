"""Watchdog: ends a worker whose engine is stuck in a step.

Knows how long a step takes, not why. What a stuck thread holds cannot be freed from outside it, so the remedy is
a new process: the jobs go back to the queue as after a crash (one of them may be the cause), and the process ends
with the reason. Invariant: it barks once.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import sys
from collections.abc import Callable

from kvq.worker.errors import EngineStuck

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks, when asked to, whether the engine's current step takes too long.

    Args:
        step_age_s: how long the current step has been running, None between steps.
        timeout_s: longer than this is stuck.
        on_stuck: called once, with the reason.
    """

    def __init__(
        self, step_age_s: Callable[[], float | None], *, timeout_s: float, on_stuck: Callable[[EngineStuck], None]
    ) -> None:
        self._step_age_s = step_age_s
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._barked = False

    def look(self) -> None:
        """Bark where the step is over its time."""
        age_s = self._step_age_s()
        if self._barked or age_s is None or age_s <= self._timeout_s:
            return
        self._barked = True
        stuck = EngineStuck(age_s=age_s, timeout_s=self._timeout_s)
        logger.critical("%s; what every thread is doing follows", stuck)
        try:
            faulthandler.dump_traceback(sys.stderr)
        except (AttributeError, io.UnsupportedOperation, ValueError, OSError):  # no real file to write to
            logger.warning("the threads' stacks cannot be written: standard error is not a file")
        self._on_stuck(stuck)
