"""Host: one WorkerService as a guest of a Celery worker.

Owns the store, the service, the intake and the outbox of a ``kvq worker`` with a broker, and the wiring between
them and Celery's pool. Invariant: whichever way the worker is told to stop, one drain runs, off the event loop,
which meanwhile goes on answering; then the worker's exit code says whether it was asked to or had to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from celery.worker import state as celery_state

from kvq.worker.errors import StoreError
from kvq.worker.failpoints import Failpoints
from kvq.worker.intake import Intake
from kvq.worker.jobs import ClaimedJob, JobError, JobOutcome, JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.lease import CANCELLED
from kvq.worker.outbox import Outbox
from kvq.worker.pool import EnginePool, Owner
from kvq.worker.privacy import Privacy
from kvq.worker.service import WorkerService
from kvq.worker.service_options import Hooks
from kvq.worker.stop_signals import Drain
from kvq.worker.store import Store

if TYPE_CHECKING:
    from kvq.worker.app import KvqApp

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1
# A message on its way into SQL is committed in moments; one whose broker is away is not waited for.
_INTAKE_STOP_S = 1.0
# Telling what has ended, when the drain took all its time: the rest is told by others.
_LEAST_OUTBOX_STOP_S = 0.5
_MOST_OUTBOX_STOP_S = 5.0


class Host:
    """Composes what a Celery worker of ours consists of.

    Args:
        worker: Celery's WorkController, with our pool.
    """

    def __init__(self, worker: Any) -> None:
        app: KvqApp = worker.app
        settings = app.settings
        assert settings.broker is not None
        self._worker = worker
        self._pool: EnginePool = worker.pool
        failpoints = Failpoints.from_environment()
        self._store = Store.open(settings.db, create=True, privacy=Privacy.from_settings(settings))
        self.service = WorkerService.from_settings(
            settings,
            self._store,
            deliver=self._pool.hand_over,
            more_is_coming=lambda: self._intake.in_burst,
            failpoints=failpoints,
            with_webhooks=True,
            hooks=Hooks(
                on_committed=self._on_committed,
                on_dropped=self._pool.drop,
                on_tick=self._cancel_revoked,
                on_fault=self._on_fault,
            ),
        )
        self._intake = Intake(
            settings.broker,
            self._store,
            keys=QueueKeys(queue=settings.queue),
            max_queued=settings.max_queued,
            dedup_period_s=settings.dedup_period,
            on_new=self.service.feeder.ring,
            on_fault=self._on_fault,
            is_revoked=lambda task_id: task_id in celery_state.revoked,
            is_busy=lambda: self.service.inference.num_jobs > 0,
            failpoints=failpoints,
        )
        self._outbox = Outbox(
            app,
            self._store,
            identity=lambda: self.service.lease.worker_id,
            on_told=self._pool.note_told,
            on_fault=self._on_fault,
            failpoints=failpoints,
        )
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._revoked: list[str] = []
        self._drain: threading.Thread | None = None

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start; returns while the engine is loading, so that Celery can answer meanwhile."""
        self._pool.attach(
            Owner(
                message_handler=self._message_handler,
                submit=self.service.inference.submit,
                started=self._outbox.note_started,
                refuse=self.service.end_unrun,
                give_back=self._give_back,
                cancel=self._note_revoked,
                time_out=self._time_out,
                info=self.info,
            )
        )
        try:
            self.service.start()
            self._outbox.start()
            self._intake.start()
        finally:
            self._started.set()

    @property
    def when_told_to_stop(self) -> Drain:
        """What a stop signal does."""
        return Drain(
            begin=self.begin_drain,
            hurry=self.service.hurry_drain,
            timeout_s=self.service.options.drain_timeout_s,
        )

    def begin_drain(self, exit_code: int = EXIT_OK) -> None:
        """Start to stop, in the background; once, whoever asks for it."""
        with self._lock:
            if self._drain is not None:
                return
            self._drain = threading.Thread(
                target=self._drain_and_stop, args=(exit_code,), name="kvq-drain", daemon=True
            )
            self._drain.start()

    def close(self) -> None:
        """Celery's blueprint stops: drain if nobody did, and close the store."""
        self.begin_drain()
        assert self._drain is not None
        self._drain.join()
        self._pool.run_inbox()
        self._store.close()

    def _drain_and_stop(self, exit_code: int) -> None:
        self._started.wait()  # what is still being started cannot be stopped
        logger.info("draining")
        until_s = time.monotonic() + self.service.options.drain_timeout_s
        try:
            self._intake.stop(_INTAKE_STOP_S)
            self.service.drain()
            if exit_code == EXIT_OK:
                self._worker.stop_signals.drained()
            left_s = until_s - time.monotonic()
            self._outbox.stop(min(_MOST_OUTBOX_STOP_S, max(_LEAST_OUTBOX_STOP_S, left_s)))
        except Exception:
            logger.exception("the drain failed; what was left is requeued when the lease is over")
            exit_code = EXIT_FAULT
        finally:
            celery_state.should_stop = exit_code
            self._pool.wake()

    # -- figures ---------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """Facts for ``celery inspect stats``."""
        progress = self.service.progress()
        engine = progress.engine
        return {
            "worker_id": self.service.lease.worker_id,
            "ready": progress.ready,
            "claimed": progress.claimed,
            "window": progress.window,
            "uncommitted": progress.uncommitted,
            "ended": {state.value: count for state, count in progress.ended_by_state.items()},
            "engine": None
            if engine is None
            else {
                "running": engine.running,
                "waiting": engine.waiting,
                "kv_usage": engine.kv_usage,
                "prompt_tokens": engine.prompt_tokens,
                "cached_prompt_tokens": engine.cached_prompt_tokens,
                "generated_tokens": engine.generated_tokens,
                "preemptions": engine.preemptions,
                "steps": engine.steps,
            },
        }

    # -- wiring ----------------------------------------------------------------------------------------

    def _message_handler(self) -> Callable[[Any], None] | None:
        consumer = getattr(self._worker, "consumer", None)
        if consumer is None or not consumer.strategies:
            return None
        handler: Callable[[Any], None] = consumer.create_task_handler()
        return handler

    def _on_committed(self, outcomes: Sequence[JobOutcome]) -> None:
        self._pool.note_committed(outcomes)
        self._outbox.ring()

    def _give_back(self, job: ClaimedJob) -> None:
        self.service.feeder.disown([job.seq])

    def _note_revoked(self, job_ids: Sequence[str]) -> None:
        """On the event loop: SQL waits for the next tick, what runs here stops at once."""
        with self._lock:
            self._revoked.extend(job_ids)
        for job_id in job_ids:
            self.service.inference.abort(job_id, JobState.CANCELLED, CANCELLED)

    def _cancel_revoked(self) -> None:
        with self._lock:
            revoked, self._revoked = self._revoked, []
        if not revoked:
            return
        try:
            self._store.cancel_jobs(revoked)
        except StoreError as err:
            logger.warning("cannot store %d revocations yet: %s", len(revoked), err)
            with self._lock:
                self._revoked.extend(revoked)
        else:
            self._outbox.ring()

    def _time_out(self, job_id: str, error: JobError) -> None:
        self.service.inference.abort(job_id, JobState.FAILED, error)

    def _on_fault(self, fault: Exception) -> None:
        logger.critical("this worker cannot go on: %s", fault)
        self.begin_drain(EXIT_FAULT)
