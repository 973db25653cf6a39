"""EngineStep: starts and stops our worker inside a Celery worker.

Belongs to the *worker* blueprint: the *consumer* blueprint restarts at every reconnection to the broker, and a
lease must not end there. Knows only when; the host does the work.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from kvq.worker.host import Host


class EngineStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """A bootstep between Celery's pool and its consumer."""

    name = "kvq"
    label = "kvq"
    requires = frozenset({"celery.worker.components:Hub", "celery.worker.components:Pool"})

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        worker.kvq_host = None

    def start(self, worker: Any) -> None:
        """Register, start loading the engine, start the intake."""
        host = worker.kvq_host = Host(worker)
        worker.stop_signals.hold(host.when_told_to_stop)
        host.start()

    def stop(self, worker: Any) -> None:
        """Drain, unless that has been done already."""
        if worker.kvq_host is not None:
            worker.kvq_host.close()

    terminate = stop

    def info(self, worker: Any) -> dict[str, Any]:
        """Part of ``celery inspect stats``."""
        return {"kvq": worker.kvq_host.info() if worker.kvq_host is not None else {}}
