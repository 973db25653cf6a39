"""Runner: the process behind ``kvq worker``, with a broker inside a Celery worker, or alone.

Owns the process's exit code. Invariants: SIGTERM, SIGINT and SIGQUIT mean the same: claim nothing
more, finish what runs within the drain timeout, release the rest, exit 0; a second one releases at once. A worker
that cannot go on exits with 1, for a supervisor to start it again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import warnings
from typing import NoReturn

from kvq.worker.config import Settings
from kvq.worker.errors import StoreError
from kvq.worker.privacy import Privacy
from kvq.worker.service import WorkerService
from kvq.worker.service_options import Hooks
from kvq.worker.stop_signals import Drain, StopSignals
from kvq.worker.store import Store

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1
# How long a thread keeps Python's lock from one that waits for it. The engine's thread gives it up in every kernel, and
# with the default of 5 ms would wait so long for it again whenever another thread had something to do.
_SWITCH_S = 0.0005
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_worker(settings: Settings) -> int:
    """Serve the queue until told to stop; the process's exit code.

    With ``settings.broker`` as a Celery worker, without it straight from SQL. Only from the main thread.

    Raises:
        SettingsError, StoreError: the worker cannot start as it is configured.
    """
    stop_signals = StopSignals()
    configure_logging(settings.log_level)
    sys.setswitchinterval(_SWITCH_S)
    if settings.broker is None:
        return _run_embedded(settings, stop_signals)
    return _run_celery(settings, stop_signals)


def leave(exit_code: int) -> NoReturn:
    """End the process of a worker that has stopped, without taking the interpreter apart.

    Its last garbage collection walks all that torch and transformers made, for seconds; a supervisor's grace
    period is better spent on jobs. Nothing is lost: the store is closed and the logs are flushed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def configure_logging(level: str) -> None:
    """Log to standard error, unless the process has its own way of logging already."""
    if not logging.getLogger().handlers:
        logging.basicConfig(format=_LOG_FORMAT)
    logging.getLogger().setLevel(level.upper())
    # They write a line for every job, with the whole answer in it.
    for name in ("celery.worker.strategy", "celery.app.trace", "alembic.runtime.migration", "alembic.runtime.plugins"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _run_embedded(settings: Settings, stop_signals: StopSignals) -> int:
    stopping = threading.Event()
    with Store.open(settings.db, create=True, privacy=Privacy.from_settings(settings)) as store:
        hooks = Hooks(on_fault=lambda _: stopping.set(), on_tick=lambda: _leave_answers(store, service))
        service = WorkerService.from_settings(settings, store, hooks=hooks, with_webhooks=True)
        stop_signals.hold(
            Drain(begin=stopping.set, hurry=service.hurry_drain, timeout_s=service.options.drain_timeout_s)
        )
        service.start()
        stopping.wait()
        service.drain()
        stop_signals.drained()
        if service.fault is not None:
            logger.critical("this worker cannot go on: %s", service.fault)
            return EXIT_FAULT
    return EXIT_OK


def _leave_answers(store: Store, service: WorkerService) -> None:
    """Without a broker Celery's senders cannot be told: their answers are for any worker that has one."""
    try:
        num_left = store.outbox_leave(service.lease.worker_id)
    except StoreError as err:
        logger.warning("cannot leave answers to other workers yet: %s", err)
        return
    if num_left:
        logger.warning(
            "%d jobs that ended here came by Celery: their senders are told by the next worker with a broker", num_left
        )


def _run_celery(settings: Settings, stop_signals: StopSignals) -> int:
    # Celery takes half a second to import, which the embedded worker need not pay.
    from celery.platforms import SecurityWarning

    from kvq.worker.app import control_queue, create_app
    from kvq.worker.celery_worker import CeleryWorker

    # It warns root of pickled messages, which this worker refuses.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app = create_app(settings)
    # A wrong schema, or a key that is none, is reported before Celery wraps the error.
    Store.open(settings.db, create=True, privacy=Privacy.from_settings(settings)).close()
    worker = CeleryWorker(
        app=app,
        hostname=f"{settings.queue}-{os.getpid()}@{socket.gethostname()}",
        queues=[control_queue(settings)],
        loglevel=settings.log_level.upper(),
        quiet=True,
        without_mingle=True,
        without_gossip=True,
    )
    worker.stop_signals = stop_signals
    worker.start()
    return EXIT_OK if worker.exitcode is None else int(worker.exitcode)
