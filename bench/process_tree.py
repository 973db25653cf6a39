"""Memory of processes: of this one, and of another with all that it starts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_INTERVAL_S = 0.2


class PeakMemory:
    """Samples the resident memory of ``pid`` and its descendants until stopped; shared pages count twice."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End sampling; the peak in bytes."""
        self._stopped.set()
        self._thread.join()
        return self._peak_bytes

    def _sample(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self._peak_bytes = max(self._peak_bytes, sum(_rss_bytes(pid) for pid in family(self._pid)))


def family(pid: int) -> list[int]:
    """``pid`` and its descendants (Linux)."""
    found = [pid]
    for member in found:
        try:
            for task in Path(f"/proc/{member}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it ended while we looked
            continue
    return found


def peak_rss_bytes() -> int:
    """The most that this process ever held (``ru_maxrss`` would begin with that of the process which started it)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status tells no VmHWM")


def _rss_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
