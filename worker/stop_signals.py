"""Stop signals: how a worker's process learns that it is to end, at any moment of its life, and that it does end.

Owns the process's handlers of SIGTERM, SIGINT and SIGQUIT and the thread that acts on them. Knows not what a drain is.
Python runs a handler on the main thread only, once that thread comes to it: so the handlers do nothing, and the
bytes that the interpreter writes for each signal (``signal.set_wakeup_fd``) are read by a thread, which may lock.
Invariants: before there is anything to give back a signal ends the process at once; afterwards the first one begins
the drain, the second makes it hurry, and the process is gone ``GRACE_S`` after the time it was given.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# What remains to be done when the drain's time is up: giving jobs back, telling what has ended.
GRACE_S = 1.5
_EXIT_OK = 0
_EXIT_FAULT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """What is to happen on a signal; called on a thread of its own.

    Args:
        begin: starts the drain; must not wait for it.
        hurry: makes it wait no longer.
        timeout_s: how long it may take.
    """

    begin: Callable[[], None]
    hurry: Callable[[], None]
    timeout_s: float


def exit_when_told() -> None:
    """Heed stop signals while nothing is running yet: as PID 1 a process gets only those it asked for."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, _exit_at_once)


def _exit_at_once(_signum: int, _frame: FrameType | None) -> None:
    os._exit(_EXIT_OK)


class StopSignals:
    """The stop signals of this process. Make it on the main thread, once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._drain: Drain | None = None
        self._drained = threading.Event()
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        self._thread = threading.Thread(target=self._run, name="kvq-stop", daemon=True)
        self._thread.start()
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            signal.signal(signum, _leave_it_to_the_thread)

    def hold(self, drain: Drain) -> None:
        """There will be something to give back: from now on a signal begins a drain instead of ending the process."""
        with self._lock:
            self._drain = drain

    def drained(self) -> None:
        """The drain is done, whatever the process has still to take apart: it may be ended with success."""
        self._drained.set()

    def _run(self) -> None:
        self._wait_for_signal(None)
        with self._lock:
            drain = self._drain
            if drain is None:
                os._exit(_EXIT_OK)
        deadline_s = self._clock() + drain.timeout_s + GRACE_S
        drain.begin()
        if self._wait_for_signal(deadline_s):
            drain.hurry()
            deadline_s = min(deadline_s, self._clock() + GRACE_S)
            while self._wait_for_signal(deadline_s):
                pass
        if not self._drained.is_set():
            logger.critical("the drain did not end in time; what is left is requeued when the lease is over")
        logging.shutdown()
        os._exit(_EXIT_OK if self._drained.is_set() else _EXIT_FAULT)

    def _wait_for_signal(self, deadline_s: float | None) -> bool:
        """True when one came, False when the time is up."""
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - self._clock())
            if not select.select([self._read_fd], [], [], left_s)[0]:
                return False
            if os.read(self._read_fd, 1)[0] in STOP_SIGNALS:
                return True


def _leave_it_to_the_thread(_signum: int, _frame: FrameType | None) -> None:
    pass
