"""Interrupts: what Ctrl-C does while a command has nothing to put in order, before it begins and after it has ended.

Owns the handler of SIGINT at those times. Python's own raises an exception wherever the program happens to be, which
out of an import, or out of the last cleaning up, is pages of traceback. Knows no command and imports next to nothing.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def end_when_interrupted() -> None:
    """From now on Ctrl-C ends the process at once, unless somebody else minds it (or it is ignored, as under nohup)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def raise_when_interrupted() -> None:
    """From now on Ctrl-C is a ``KeyboardInterrupt`` again, for a command that can be left half-way."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once(_signum: int, _frame: FrameType | None) -> None:
    """A handler of signals: one line, and no more of this process."""
    os.write(2, b"\nkvq: interrupted\n")  # after the terminal's ^C, as click has it
    os._exit(EXIT_INTERRUPTED)
