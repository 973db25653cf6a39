"""Feeder: looks far ahead in the queue, decides the order, claims a little.

Owns the look-ahead window (rows read, tokenised, not reserved), the prefix plan over it, and the list of jobs
claimed by this worker that have not ended. Knows neither the engine's inside nor Celery: claimed jobs go to
``deliver``. Invariants: only what will soon be admitted is claimed; once ``stop_admission`` returned, nothing
is claimed any more; crash suspects keep the company rule.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq.engine.planner import PrefixPlanner
from kvq.worker.company import Company, admission, company_of
from kvq.worker.errors import LeaseLost, RowError, StoreError
from kvq.worker.failpoints import Failpoints
from kvq.worker.inference import Inference, Prepared
from kvq.worker.jobs import ClaimedJob, JobError, JobOutcome, JobState, WaitingJob

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

Deliver = Callable[[ClaimedJob, Prepared], None]

# With a full window this many rows are looked at for ones that are more urgent than what is in it.
_URGENT_ROWS = 64
# Rows are tokenised for at most this long before the engine is fed again.
_TOKENISE_S = 0.4
_ERROR_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    row: WaitingJob
    prepared: Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederOptions:
    """How far to look and how much to take.

    Args:
        queue: the queue served.
        window: most rows held for planning.
        claim_ahead: claimed jobs that may wait for admission; small, so that other workers get their share.
        max_claimed: most jobs claimed at a time. Jobs equal to one that runs wait for its answer without
            waiting for admission, so ``claim_ahead`` does not bound them.
        poll_s: how often to look for new rows when nobody rings.
        suspect_patience_s: how long fresh jobs may keep crash suspects waiting.
    """

    queue: str
    window: int = 4096
    claim_ahead: int = 16
    max_claimed: int = 512
    poll_s: float = 0.5
    suspect_patience_s: float = 60.0


class Feeder:
    """Moves jobs from the store to the engine, in the order that shares most.

    Args:
        identity: the worker id to claim under, as of now.
        deliver: receives each claimed job once; called on this thread.
        refuse: receives the outcome of a claimed job that cannot be run.
        may_admit: False while this worker must not claim (its lease is in doubt).
        on_lease_lost: called when the store says that this worker holds no lease.
        on_fault: called when the thread ends by an error of ours.
    """

    def __init__(
        self,
        store: Store,
        inference: Inference,
        *,
        identity: Callable[[], str],
        deliver: Deliver,
        refuse: Callable[[JobOutcome], None],
        may_admit: Callable[[], bool],
        on_lease_lost: Callable[[], None],
        on_fault: Callable[[Exception], None],
        options: FeederOptions,
        failpoints: Failpoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._inference = inference
        self._identity = identity
        self._deliver = deliver
        self._refuse = refuse
        self._may_admit = may_admit
        self._on_lease_lost = on_lease_lost
        self._on_fault = on_fault
        self._options = options
        self._failpoints = failpoints or Failpoints()
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="kvq-feeder", daemon=True)
        self._bell = threading.Event()
        self._look_now = threading.Event()
        self._stopping = threading.Event()
        # The window; this thread only.
        self._unread: deque[WaitingJob] = deque()
        self._candidates: dict[str, _Candidate] = {}
        self._planner = PrefixPlanner()
        self._suspects: dict[Company, dict[str, float]] = {}  # company -> job id -> since when
        self._refused: dict[int, RowError] = {}
        self._known_seqs: set[int] = set()
        self._more_expected = True
        self._next_look_s = 0.0
        # Claimed and not ended; shared.
        self._lock = threading.Lock()
        self._claimed: dict[int, ClaimedJob] = {}
        self._doubtful: set[int] = set()

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start looking and claiming; waits by itself until the engine is ready."""
        self._thread.start()

    def stop_admission(self, timeout_s: float = 30.0) -> None:
        """Claim nothing more, from the moment this returns. What is claimed goes on."""
        self._stopping.set()
        self._bell.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def ring(self) -> None:
        """New rows may be there: look now rather than at the next poll."""
        self._look_now.set()
        self._bell.set()

    def wake(self) -> None:
        """The engine has room, or is ready: think again."""
        self._bell.set()

    # -- what is claimed ---------------------------------------------------------------------------------

    def ended(self, seq: int) -> None:
        """A claimed job left the engine, whatever its end."""
        with self._lock:
            self._claimed.pop(seq, None)
        self._bell.set()

    def disown(self, seqs: Sequence[int]) -> None:
        """Claimed jobs were dropped without an outcome: they are to be put back in the queue."""
        with self._lock:
            for seq in seqs:
                self._claimed.pop(seq, None)
            self._doubtful.update(seqs)
        self._bell.set()

    def forget_claims(self) -> None:
        """The lease was lost: others own what was claimed."""
        with self._lock:
            self._claimed.clear()
            self._doubtful.clear()
        self._bell.set()

    def claimed(self) -> list[ClaimedJob]:
        """Jobs claimed by this worker that have not ended."""
        with self._lock:
            return list(self._claimed.values())

    @property
    def num_claimed(self) -> int:
        """Number of claimed jobs that have not ended."""
        return len(self._claimed)

    @property
    def num_window(self) -> int:
        """Rows in the look-ahead window."""
        return len(self._known_seqs)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._feed()
        except Exception as err:
            logger.exception("the feeder stopped for good")
            self._on_fault(err)

    def _feed(self) -> None:
        while not self._stopping.is_set():
            self._bell.clear()
            busy = False
            if self._inference.ready and self._may_admit():
                try:
                    busy = self._turn()
                except LeaseLost as err:
                    logger.warning("%s", err)
                    self._on_lease_lost()
                    self._bell.wait(_ERROR_PAUSE_S)
                except StoreError as err:
                    logger.warning("cannot take jobs, trying again in %.1f s: %s", _ERROR_PAUSE_S, err)
                    self._stopping.wait(_ERROR_PAUSE_S)
            if not busy:
                self._bell.wait(self._options.poll_s)

    def _turn(self) -> bool:
        """One round; True when another should follow at once."""
        self._settle_doubtful()
        looked = self._look()
        read = self._read()
        refused = self._claim_refused()
        admitted = self._admit()
        return looked or read or refused or admitted

    def _settle_doubtful(self) -> None:
        """Give back rows that may be ours without our knowing: a claim whose answer was lost, dropped jobs."""
        with self._lock:
            seqs = list(self._doubtful)
        if seqs:
            self._store.release(self._identity(), seqs)
            with self._lock:
                self._doubtful.difference_update(seqs)

    # -- looking ----------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Read more rows into the window; True when there may be still more."""
        now = self._clock()
        due = self._look_now.is_set() or now >= self._next_look_s
        room = self._options.window - len(self._known_seqs)
        if not (due or (self._more_expected and room > self._options.window // 4)):
            return False
        self._look_now.clear()
        self._next_look_s = now + self._options.poll_s
        if room <= 0:
            self._look_for_urgent()
            return False
        rows = self._store.peek(self._options.queue, limit=room, exclude_seqs=self._known_seqs)
        self._more_expected = len(rows) == room
        self._take_in(rows)
        return bool(rows)

    def _look_for_urgent(self) -> None:
        worst = max(
            (candidate.row.priority for candidate in self._candidates.values()),
            default=max((row.priority for row in self._unread), default=0),
        )
        rows = self._store.peek(self._options.queue, limit=_URGENT_ROWS, exclude_seqs=self._known_seqs)
        self._take_in([row for row in rows if row.priority < worst])

    def _take_in(self, rows: Sequence[WaitingJob]) -> None:
        self._unread.extend(rows)
        self._known_seqs.update(row.seq for row in rows)

    def _read(self) -> bool:
        """Check and tokenise rows for a while; True when some are left."""
        until = self._clock() + _TOKENISE_S
        while self._unread and self._clock() < until and not self._stopping.is_set():
            row = self._unread.popleft()
            try:
                prepared = self._inference.prepare(row.endpoint, row.body)
            except RowError as err:
                self._refused[row.seq] = err
            except Exception as err:  # a tokenizer or template may raise anything on one row's text
                logger.exception("job %s could not be prepared", row.job_id)
                self._refused[row.seq] = RowError("invalid_value", f"the request could not be prepared: {err}")
            else:
                self._add(_Candidate(row=row, prepared=prepared))
        return bool(self._unread)

    def _add(self, candidate: _Candidate) -> None:
        row, params = candidate.row, candidate.prepared.params
        self._candidates[row.job_id] = candidate
        company = company_of(row.crashes)
        if company is Company.FRESH:
            self._planner.add(
                row.job_id,
                candidate.prepared.token_ids,
                priority=row.priority,
                max_tokens=(params.max_tokens or 0) * params.n,
            )
        else:
            self._suspects.setdefault(company, {})[row.job_id] = self._clock()

    # -- claiming ----------------------------------------------------------------------------------------

    def _claim_refused(self) -> bool:
        """Rows that cannot be run are claimed like others, then fail: their end is fenced as well."""
        if not self._refused:
            return False
        refused, self._refused = self._refused, {}
        for job in self._claim(list(refused)):
            err = refused[job.seq]
            self.ended(job.seq)
            self._refuse(_failed(job, JobError(code=err.code, message=err.message)))
        return True

    def _admit(self) -> bool:
        """Claim and deliver what the engine will soon admit; True when something was tried."""
        undelivered = max(0, self.num_claimed - self._inference.num_jobs)
        slots = min(
            self._inference.free_slots(self._options.claim_ahead) - undelivered,
            self._options.max_claimed - self.num_claimed,
        )
        if slots <= 0:
            return False
        job_ids = self._choose(slots)
        if not job_ids:
            return False
        chosen = {c.row.seq: c for c in (self._candidates.pop(job_id) for job_id in job_ids)}
        strangers = []
        for job in self._claim(list(chosen)):
            candidate = chosen[job.seq]
            if company_of(job.crashes) is company_of(candidate.row.crashes):
                self._deliver(job, candidate.prepared)
            else:  # it crashed since it was looked at: it belongs in other company
                strangers.append(job.seq)
        if strangers:
            self.disown(strangers)
        return True

    def _choose(self, slots: int) -> list[str]:
        """The next jobs, taken out of the plan."""
        with self._lock:
            running = [company_of(job.crashes) for job in self._claimed.values()]
        waiting = [company for company, jobs in self._suspects.items() if jobs]
        if len(self._planner) or (waiting and any(row.crashes == 0 for row in self._unread)):
            waiting.append(Company.FRESH)
        allowed = admission(running, waiting, suspects_overdue=self._suspects_overdue())
        if allowed is None:
            return []
        number = slots if allowed.limit is None else min(slots, allowed.limit)
        if allowed.company is Company.FRESH:
            return self._planner.take(number)
        suspects = self._suspects[allowed.company]
        chosen = list(suspects)[:number]
        for job_id in chosen:
            del suspects[job_id]
        return chosen

    def _suspects_overdue(self) -> bool:
        since = min((s for jobs in self._suspects.values() for s in jobs.values()), default=None)
        return since is not None and self._clock() - since > self._options.suspect_patience_s

    def _claim(self, seqs: list[int]) -> list[ClaimedJob]:
        """Claim rows of the window; those that were not to be had leave it all the same."""
        self._known_seqs.difference_update(seqs)
        if self._stopping.is_set():
            return []
        try:
            jobs = self._store.claim(self._identity(), seqs)
        except StoreError:
            with self._lock:
                self._doubtful.update(seqs)  # the claim may have been committed before its answer was lost
            raise
        with self._lock:
            self._claimed.update((job.seq, job) for job in jobs)
        if jobs:
            self._failpoints.hit("after_claim")
        return jobs


def _failed(job: ClaimedJob, error: JobError) -> JobOutcome:
    return JobOutcome(
        seq=job.seq,
        job_id=job.job_id,
        attempt=job.attempt,
        claim_id=job.claim_id,
        state=JobState.FAILED,
        error=error,
    )
