"""CeleryWorker: Celery's worker program with our signals and our logging.

Knows when signals come, not what a drain is. Celery's own soft shutdown sleeps inside the signal handler, where
its event loop stands still and finished jobs cannot be told; so the signals are ours.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from celery.apps.worker import Worker

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class CeleryWorker(Worker):  # type: ignore[misc]
    """A worker that drains when told to stop."""

    kvq_host: Any  # set by the bootstep

    def install_platform_tweaks(self, worker: Any) -> None:
        """Instead of Celery's handlers."""
        for signum in _STOP_SIGNALS:
            signal.signal(signum, self._on_stop_signal)

    def setup_logging(self, colorize: bool | None = None) -> bool:
        """The process has configured it; True: Celery leaves it alone."""
        return True

    def _on_stop_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self.kvq_host is not None:
            self.kvq_host.begin_drain()
            return
        raise SystemExit(0)  # nothing is running yet
