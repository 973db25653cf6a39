"""Finisher: writes the ends of jobs, many in one transaction.

Owns the outcomes that are not committed yet and the thread that commits them. Knows no engine and no Celery.
Invariants: an outcome is kept until the store has accepted or fenced it, however long the database is away or
takes no writes; one that cannot be stored ends its job as failed; ``on_committed`` is called after the commit, in the
order the outcomes came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq.worker.errors import StoreError, ValueRefused
from kvq.worker.failpoints import Failpoints
from kvq.worker.jobs import JobError, JobMetrics, JobOutcome, JobState

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

MAX_PER_COMMIT = 500
_MAX_BACKOFF_S = 5.0
_UNSTORABLE = JobError(code="result_unstorable", message="the database cannot hold the result; see the worker's log")


class Finisher:
    """Group commit of outcomes.

    Args:
        identity: the worker id under which the jobs were claimed, as of now.
        on_committed: receives the accepted outcomes of one transaction; called on this thread.
        on_fenced: receives outcomes the store refused since the job is no longer this worker's.
        on_fault: called when the thread ends by an error of ours.
        is_busy: True while more outcomes are to come; the last ones are committed at once.
        interval_s: how long outcomes are gathered meanwhile, so that many share one transaction.
    """

    def __init__(
        self,
        store: Store,
        *,
        identity: Callable[[], str],
        on_committed: Callable[[Sequence[JobOutcome]], None],
        on_fenced: Callable[[Sequence[JobOutcome]], None],
        on_fault: Callable[[Exception], None],
        is_busy: Callable[[], bool] = lambda: True,
        interval_s: float = 1.0,
        failpoints: Failpoints | None = None,
    ) -> None:
        self._store = store
        self._identity = identity
        self._on_committed = on_committed
        self._on_fenced = on_fenced
        self._on_fault = on_fault
        self._is_busy = is_busy
        self._interval_s = interval_s
        self._failpoints = failpoints or Failpoints()
        self._thread = threading.Thread(target=self._run, name="kvq-finisher", daemon=True)
        self._changed = threading.Condition()
        self._pending: list[JobOutcome] = []
        self._committing = 0
        self._stopping = False

    def start(self) -> None:
        """Start committing."""
        self._thread.start()

    def add(self, outcome: JobOutcome) -> None:
        """Take over an outcome. Any thread, never blocks on the database."""
        with self._changed:
            self._pending.append(outcome)
            self._changed.notify_all()

    @property
    def num_pending(self) -> int:
        """Outcomes not yet accepted or fenced."""
        with self._changed:
            return len(self._pending) + self._committing

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything added so far is committed; False when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and not self._committing, timeout_s)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Commit what is left and end the thread; False when something could not be committed in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if not self._thread.is_alive():
            return self.num_pending == 0
        self._thread.join(timeout_s)
        return self.num_pending == 0

    def _run(self) -> None:
        try:
            while outcomes := self._gather():
                self._commit(outcomes)
        except Exception as err:
            logger.exception("the finisher stopped for good")
            self._on_fault(err)

    def _gather(self) -> list[JobOutcome]:
        """The outcomes of the next transaction; empty: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._stopping)
            self._changed.wait_for(
                lambda: self._stopping or len(self._pending) >= MAX_PER_COMMIT or not self._is_busy(), self._interval_s
            )
            outcomes, self._pending = self._pending[:MAX_PER_COMMIT], self._pending[MAX_PER_COMMIT:]
            self._committing = len(outcomes)
            return outcomes

    def _commit(self, outcomes: list[JobOutcome]) -> None:
        """Commit together, waiting for the database as long as it takes; one by one if it refuses them.

        One outcome that the database will not take must not hold up its neighbours.
        """
        if self._write(outcomes):
            return
        for outcome in outcomes:
            if (len(outcomes) == 1 or not self._write([outcome])) and not self._write([_failure(outcome)]):
                self._drop(outcome)

    def _write(self, outcomes: list[JobOutcome]) -> bool:
        """True: written (or fenced). False: one of them cannot be stored."""
        backoff_s = 0.1
        while True:
            try:
                self._failpoints.hit("before_commit")
                report = self._store.finish(self._identity(), outcomes)
                self._failpoints.hit("after_commit")
            except ValueRefused:
                logger.exception("the database refuses a transaction of %d results", len(outcomes))
                return False
            except StoreError as err:
                logger.warning("cannot write %d results, trying again in %.1f s: %s", len(outcomes), backoff_s, err)
                time.sleep(backoff_s)
                backoff_s = min(_MAX_BACKOFF_S, 2 * backoff_s)
            else:
                self._tell(outcomes, report.accepted)
                return True

    def _tell(self, outcomes: list[JobOutcome], accepted: frozenset[int]) -> None:
        done = [outcome for outcome in outcomes if outcome.seq in accepted]
        fenced = [outcome for outcome in outcomes if outcome.seq not in accepted]
        if fenced:
            logger.warning("%d results were refused: the jobs are no longer this worker's", len(fenced))
            self._on_fenced(fenced)
        if done:
            self._on_committed(done)
        self._forget(len(outcomes))

    def _drop(self, outcome: JobOutcome) -> None:
        # The job stays running and is requeued once this worker is gone: never lost, never silent.
        logger.error("the end of job %s cannot be stored; it is left to the reaper", outcome.job_id)
        self._on_fenced([outcome])
        self._forget(1)

    def _forget(self, count: int) -> None:
        with self._changed:
            self._committing -= count
            self._changed.notify_all()


def _failure(outcome: JobOutcome) -> JobOutcome:
    """What becomes of a job whose end cannot be stored."""
    return replace(
        outcome,
        state=JobState.FAILED,
        text=None,
        finish_reason=None,
        response=None,
        error=_UNSTORABLE,
        model=None,
        model_defaults=None,
        metrics=JobMetrics(),
        request_key=None,
    )
