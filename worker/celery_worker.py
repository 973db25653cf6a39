"""CeleryWorker: Celery's worker program with our signals and our logging.

Knows neither when signals come nor what a drain is. Celery's own soft shutdown sleeps inside the signal handler, where
its event loop stands still and finished jobs cannot be told; so the signals are ours.
"""

from __future__ import annotations

from typing import Any

from celery.apps.worker import Worker

from kvq.worker.stop_signals import StopSignals


class CeleryWorker(Worker):  # type: ignore[misc]
    """A worker that drains when told to stop. ``stop_signals`` is set by whoever makes it."""

    stop_signals: StopSignals

    def install_platform_tweaks(self, worker: Any) -> None:
        """The process has its handlers already."""

    def setup_logging(self, colorize: bool | None = None) -> bool:
        """The process has configured it; True: Celery leaves it alone."""
        return True
