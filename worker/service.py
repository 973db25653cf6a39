"""WorkerService: one worker, put together: store, engine, feeder, finisher, lease.

Owns the order in which they start and stop. Knows no Celery: its pool and bootstep hand in ``deliver`` and
listen to what was committed; without them jobs go straight to the engine (the embedded path).
Invariant: after ``drain`` every job this worker claimed is finished and committed, or back in the queue
without being charged.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq.worker.errors import StoreError
from kvq.worker.failpoints import Failpoints
from kvq.worker.feeder import Deliver, Feeder
from kvq.worker.feeder_options import FeederOptions
from kvq.worker.finisher import Finisher
from kvq.worker.inference import Inference, Prepared
from kvq.worker.jobs import ClaimedJob, JobError, JobOutcome, JobState
from kvq.worker.lease import Lease, LeaseOptions
from kvq.worker.service_options import DrainReport, Hooks, ServiceOptions, ServiceProgress, nothing
from kvq.worker.watchdog import Watchdog
from kvq.worker.webhooks import WebhookSender

if TYPE_CHECKING:
    from kvq.engine.engine import Engine
    from kvq.worker.config import Settings
    from kvq.worker.store import Store
    from kvq.worker.store_records import BatchProgress

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 10.0
# A delivery that takes longer is left to another worker, which sends it again.
_WEBHOOK_STOP_S = 0.5
# A thread in the middle of a step or a long prompt is waited for while the drain has time left, then no longer:
# nothing that it still brings is taken.
_LEAST_STOP_S = 0.3
_MOST_STOP_S = 10.0
_DRAIN_POLL_S = 0.05
# To count a large batch reads all its rows: the next count comes after so many times what the last one took.
_COUNT_COST = 50


class WorkerService:
    """Runs jobs of one queue on one engine.

    Args:
        store: open; stays the caller's to close.
        load_engine: makes the engine, on the engine's thread.
        deliver: where claimed jobs go; by default straight to the engine.
        more_is_coming: True for a moment while jobs come that should be planned together.
    """

    def __init__(
        self,
        store: Store,
        load_engine: Callable[[], Engine],
        *,
        options: ServiceOptions,
        deliver: Deliver | None = None,
        more_is_coming: Callable[[], bool] = lambda: False,
        failpoints: Failpoints | None = None,
    ) -> None:
        self.store = store
        self.options = options
        self._failpoints = failpoints or Failpoints()
        self._counting = threading.Lock()
        self._ended: Counter[JobState] = Counter()
        self._moved = threading.Event()  # something was committed, or the engine stopped
        self._in_a_hurry = False  # a drain must not wait any longer; no lock, as a signal handler sets it
        self._draining = threading.Lock()
        self._drained: DrainReport | None = None
        self._fault: Exception | None = None
        self.inference = Inference(
            load_engine,
            on_outcome=self._on_outcome,
            on_change=self._on_change,
            served_model_names=options.served_model_names,
            failpoints=self._failpoints,
        )
        self._watchdog = Watchdog(
            lambda: self.inference.step_age_s, timeout_s=options.step_timeout_s, on_stuck=self._on_fault
        )
        self.lease = Lease(
            store,
            self.inference,
            options=LeaseOptions(
                queue=options.queue, model=options.model, heartbeat_s=options.heartbeat_s, lease_s=options.lease_s
            ),
            on_lost=self._on_lease_lost,
            on_tick=self._on_tick,
            on_fault=self._on_fault,
        )
        self.finisher = Finisher(
            store,
            identity=self._identity,
            on_committed=self._on_committed,
            on_fenced=self._on_fenced,
            on_fault=self._on_fault,
            is_busy=lambda: self.inference.num_jobs > 0,
            failpoints=self._failpoints,
        )
        self.feeder = Feeder(
            store,
            self.inference,
            identity=self._identity,
            deliver=deliver or self._submit,
            refuse=self.finisher.add,
            may_admit=lambda: self.lease.firm,
            more_is_coming=more_is_coming,
            on_lease_lost=self.lease.check_now,
            on_fault=self._on_fault,
            options=FeederOptions(
                queue=options.queue,
                window=options.window,
                window_tokens=options.window_tokens,
                claim_ahead=options.claim_ahead,
                max_claimed=options.max_claimed,
                fair_share=options.fair_share,
                serve_answers=options.serve_answers,
            ),
            failpoints=self._failpoints,
        )

        self.webhooks: WebhookSender | None = None
        if options.webhooks is not None:
            self.webhooks = WebhookSender(
                store,
                identity=self._identity,
                options=options.webhooks,
                on_fault=self._on_fault,
                failpoints=self._failpoints,
            )

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        store: Store,
        *,
        deliver: Deliver | None = None,
        more_is_coming: Callable[[], bool] = lambda: False,
        hooks: Hooks | None = None,
        failpoints: Failpoints | None = None,
        with_webhooks: bool = False,
    ) -> WorkerService:
        """A service as the settings say, on the engine they configure; ``with_webhooks``: it delivers them, too.

        Raises:
            SettingsError: the engine settings are invalid.
        """
        # The order is the feeder's, who knows the whole window: sorted once more by what the engine happens to hold of
        # it, a job of a small batch would be overtaken by thousands of a large one.
        config = replace(settings.engine_config(), scheduling_policy="fcfs")

        def load_engine() -> Engine:
            from kvq.engine.engine import Engine  # torch takes seconds to import

            return Engine.load(config)

        return cls(
            store,
            load_engine,
            deliver=deliver,
            more_is_coming=more_is_coming,
            failpoints=failpoints or Failpoints.from_environment(),
            options=ServiceOptions.from_settings(settings, hooks=hooks or Hooks(), with_webhooks=with_webhooks),
        )

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register and start; returns while the engine is still loading (see ``wait_ready``).

        Raises:
            StoreError: the database cannot be used.
        """
        self.lease.start()
        self.inference.start()
        self.finisher.start()
        self.feeder.start()
        if self.webhooks is not None:
            self.webhooks.start()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the engine is loaded; False when it is not by then, or failed (see ``fault``)."""
        return self.inference.wait_ready(timeout_s)

    @property
    def fault(self) -> Exception | None:
        """Why this worker cannot go on; it should be drained, and its process end with an error."""
        return self._fault or self.inference.fault

    def stop_admission(self) -> None:
        """Claim nothing more. What is claimed goes on."""
        self.feeder.stop_admission()

    def hurry_drain(self) -> None:
        """A drain under way (or to come) waits no longer: what still runs is released now. Signal-safe."""
        self._in_a_hurry = True

    def drain(self, timeout_s: float | None = None) -> DrainReport:
        """Stop: claim nothing more, let what runs finish for ``timeout_s``, release the rest, commit, retire.

        Safe to call more than once and from several threads; every caller gets the same report.
        """
        with self._draining:
            if self._drained is None:
                self._drained = self._drain(self.options.drain_timeout_s if timeout_s is None else timeout_s)
            return self._drained

    def _drain(self, timeout_s: float) -> DrainReport:
        until = time.monotonic() + timeout_s

        def left_s() -> float:
            left = 0.0 if self._in_a_hurry else until - time.monotonic()
            return min(_MOST_STOP_S, max(_LEAST_STOP_S, left))

        ended_before = self._ended_by_state().total()
        self.feeder.stop_admission(left_s())
        self._failpoints.hit("during_drain")
        while self.feeder.num_claimed and self.fault is None and not self._in_a_hurry and time.monotonic() < until:
            time.sleep(_DRAIN_POLL_S)
        self.inference.discard()
        self.inference.stop(left_s() if self.fault is None else 0)  # a stuck engine thread never ends
        flushed = self.finisher.stop(_RELEASE_TIMEOUT_S)
        dropped = [job.job_id for job in self.feeder.claimed()]
        if self.webhooks is not None:
            self.webhooks.stop(_WEBHOOK_STOP_S)
        self.lease.stop()
        released = 0
        try:
            if self.fault is None:
                released = self.store.release(self.lease.worker_id)
                self.lease.retire()
            else:
                self.lease.bury()
        except StoreError as err:
            # Not lost: the reaper gives them to others once the lease is over.
            logger.error("cannot release %d jobs: %s", len(dropped), err)
        self.options.hooks.on_dropped(dropped)
        report = DrainReport(finished=self._ended_by_state().total() - ended_before, released=released, flushed=flushed)
        logger.info("drained: %d jobs finished, %d released", report.finished, report.released)
        return report

    # -- running a batch to its end ------------------------------------------------------------------------

    def run_until_idle(
        self,
        batch_id: str,
        *,
        on_progress: Callable[[BatchProgress, ServiceProgress], None] = nothing,
        interval_s: float = 0.5,
    ) -> BatchProgress:
        """Wait until every job of the batch is in a terminal state, whoever runs it.

        Raises:
            Exception: the engine's fault, when it stopped for good.
            StoreError: the database cannot be read, or not be written to for a whole lease: what ran was dropped.
        """
        due_s = -math.inf
        while True:
            self._moved.clear()
            began_s = time.monotonic()
            if began_s >= due_s or self.store.batch_finished(batch_id):
                ended = self._ended_by_state()
                counted = self.store.batch_progress(batch_id)
                due_s = time.monotonic() + _COUNT_COST * (time.monotonic() - began_s)
            on_progress(_advanced(counted, self._ended_by_state() - ended), self.progress())
            if counted.finished:
                return counted
            if self.fault is not None:
                raise self.fault
            if self.lease.lost_to is not None:
                raise self.lease.lost_to
            if self._moved.wait(interval_s):
                time.sleep(min(interval_s, 0.1))  # not a look at every commit

    def progress(self) -> ServiceProgress:
        """What this worker is doing now."""
        return ServiceProgress(
            ready=self.inference.ready,
            claimed=self.feeder.num_claimed,
            window=self.feeder.num_window,
            uncommitted=self.finisher.num_pending,
            ended_by_state=dict(self._ended_by_state()),
            engine=self.inference.stats(),
        )

    def end_unrun(self, job: ClaimedJob, state: JobState, error: JobError) -> None:
        """End a claimed job that will not be run."""
        self._on_outcome(
            JobOutcome(
                seq=job.seq,
                job_id=job.job_id,
                attempt=job.attempt,
                claim_id=job.claim_id,
                state=state,
                error=error,
            )
        )

    # -- wiring ----------------------------------------------------------------------------------------

    def _identity(self) -> str:
        return self.lease.worker_id

    def _submit(self, job: ClaimedJob, prepared: Prepared) -> None:
        self.inference.submit(job, prepared)

    def _on_change(self) -> None:
        self.feeder.wake()
        if self.inference.fault is not None:
            self._on_fault(self.inference.fault)

    def _on_tick(self) -> None:
        self._watchdog.look()
        self.options.hooks.on_tick()

    def _on_fault(self, fault: Exception) -> None:
        if self._fault is None:
            self._fault = fault
            self._moved.set()
            self.options.hooks.on_fault(fault)

    def _on_outcome(self, outcome: JobOutcome) -> None:
        self.finisher.add(outcome)
        self.feeder.ended(outcome.seq, outcome.metrics)

    def _on_committed(self, outcomes: Sequence[JobOutcome]) -> None:
        self.feeder.note_written(outcomes)
        with self._counting:
            self._ended.update(outcome.state for outcome in outcomes)
        self._moved.set()
        if self.webhooks is not None:
            self.webhooks.ring()
        self.options.hooks.on_committed(outcomes)

    def _on_fenced(self, outcomes: Sequence[JobOutcome]) -> None:
        self.feeder.note_written(outcomes)
        self._moved.set()
        self.options.hooks.on_dropped([outcome.job_id for outcome in outcomes])

    def _on_lease_lost(self) -> None:
        """Drop everything. Should the rows still be ours (the database was only away), they are given back."""
        seqs = [job.seq for job in self.feeder.claimed()]
        jobs = self.inference.discard()
        self.feeder.disown(seqs)
        self.options.hooks.on_dropped([job.job_id for job in jobs])

    def _ended_by_state(self) -> Counter[JobState]:
        with self._counting:
            return self._ended.copy()


def _advanced(counted: BatchProgress, ended: Counter[JobState]) -> BatchProgress:
    """A count, moved on by the jobs that have ended here since; only a count says that nothing is left."""
    if not ended:
        return counted
    ends = {state.value: getattr(counted, state.value) + number for state, number in ended.items()}
    return replace(counted, queued=max(1, counted.queued - ended.total()), **ends)
