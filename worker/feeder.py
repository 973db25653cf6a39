"""Feeder: looks far ahead in the queue, decides the order, claims a little.

Owns the rows that were tokenised and not reserved, the order in which they are claimed (``fair_share``), and the list
of jobs claimed by this worker that have not ended. Knows neither the engine's inside nor Celery: claimed jobs go to
``deliver``; rows that need no engine (they cannot be run, or their answer is there) are claimed and ended at once.
Invariants: only what will soon be admitted is claimed; once ``stop_admission`` returned, nothing is claimed any more;
crash suspects keep the company rule; no tenant starts jobs beyond its budget.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvq.worker.company import Company, Suspects, admission, company_of
from kvq.worker.errors import LeaseLost, StoreError
from kvq.worker.failpoints import Failpoints
from kvq.worker.fair_share import FairShare, WaitingCost
from kvq.worker.feeder_options import FeederOptions
from kvq.worker.inference import Inference, Prepared
from kvq.worker.jobs import ClaimedJob, JobMetrics, JobOutcome
from kvq.worker.outage import Outage
from kvq.worker.row_reader import Candidate, End, RowReader
from kvq.worker.tenants import Budgets
from kvq.worker.window import Window

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

Deliver = Callable[[ClaimedJob, Prepared], None]
# Rows that need no engine are claimed so many at a time.
_ENDED_PER_CLAIM = 500
_ERROR_PAUSE_S = 1.0
# Claims are for at least this part (1 / 2) of what may wait for admission, not one for every job that leaves.
_CLAIM_PARTS = 2
# When rows come to an idle worker, while more come or are still to be read that should be planned together, no more
# than so many wait for admission, for so long at most: the engine begins with what these share.
_FIRST_AHEAD = 4
_FIRST_S = 1.5
# Unasked, the next look comes after so many times what the last one took.
_LOOK_COST = 10


class Feeder:
    """Moves jobs from the store to the engine, in the order that shares most.

    Args:
        identity: the worker id to claim under, as of now.
        deliver: receives each claimed job once; called on this thread.
        refuse: receives the outcome of a claimed job that cannot be run.
        may_admit: False while this worker must not claim (its lease is in doubt).
        more_is_coming: True for a moment while rows come that should be planned together: few are claimed then.
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
        more_is_coming: Callable[[], bool] = lambda: False,
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
        self._more_is_coming = more_is_coming
        self._on_lease_lost = on_lease_lost
        self._on_fault = on_fault
        self._options = options
        self._failpoints = failpoints or Failpoints()
        self._clock = clock
        self._no_jobs = Outage("cannot take jobs", logger, clock)
        self._thread = threading.Thread(target=self._run, name="kvq-feeder", daemon=True)
        self._bell = threading.Event()
        self._look_now = threading.Event()
        self._stopping = threading.Event()
        # The window; this thread only.
        self._candidates: dict[str, Candidate] = {}
        size, tokens = options.window, options.window_tokens
        self._window = Window(store, queue=options.queue, size=size, tokens=tokens, by_lane=options.fair_share)
        self._reader = RowReader(
            store,
            inference,
            serve_answers=options.serve_answers,
            stopping=lambda: self._stopping.is_set(),
            clock=clock,
        )
        self._share = FairShare(quantum=options.quantum)
        self._first_until_s: float | None = None  # until when what is claimed is chosen among few
        self._suspects = Suspects(patience_s=options.suspect_patience_s, clock=clock)
        self._ends: dict[int, End] = {}  # rows that need no engine
        self._looked_s = -math.inf
        self._look_took_s = 0.0
        # Claimed and not ended; shared.
        self._lock = threading.Lock()
        self._claimed: dict[int, ClaimedJob] = {}
        self._doubtful: set[int] = set()
        self._budgets = Budgets(store)
        self._settled: deque[tuple[str, JobMetrics]] = deque()

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

    def ended(self, seq: int, metrics: JobMetrics | None = None) -> None:
        """A claimed job left the engine, whatever its end; ``metrics`` say what it took, None: nothing."""
        with self._lock:
            job = self._claimed.pop(seq, None)
        if job is not None:
            self._settled.append((job.job_id, metrics or JobMetrics()))
        self._bell.set()

    def note_written(self, outcomes: Sequence[JobOutcome]) -> None:
        """Outcomes of jobs that ended are in SQL, or were refused there."""
        self._budgets.note_committed([outcome.job_id for outcome in outcomes])
        self._bell.set()

    def disown(self, seqs: Sequence[int]) -> None:
        """Claimed jobs were dropped without an outcome: they are to be put back in the queue."""
        with self._lock:
            jobs = [self._claimed.pop(seq) for seq in seqs if seq in self._claimed]
            self._doubtful.update(seqs)
        self._drop([job.job_id for job in jobs])

    def forget_claims(self) -> None:
        """The lease was lost: others own what was claimed."""
        with self._lock:
            jobs = list(self._claimed.values())
            self._claimed.clear()
            self._doubtful.clear()
        self._drop([job.job_id for job in jobs])

    def _drop(self, job_ids: Sequence[str]) -> None:
        """Jobs that were handed out do not run here after all."""
        self._budgets.note_dropped(job_ids)
        self._settled.extend((job_id, JobMetrics()) for job_id in job_ids)
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
        return len(self._window)

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
                    self._no_jobs.met(err)
                    self._stopping.wait(_ERROR_PAUSE_S)
            if not busy:
                self._bell.wait(self._options.poll_s)

    def _turn(self) -> bool:
        """One round; True when another should follow at once."""
        self._settle_doubtful()
        self._settle_costs()
        looked = self._look()
        read = self._read()
        ended = self._end_unrun()
        return self._admit() or looked or read or ended

    def _settle_doubtful(self) -> None:
        """Give back rows that may be ours without our knowing: a claim whose answer was lost, dropped jobs."""
        with self._lock:
            seqs = list(self._doubtful)
        if seqs:
            self._store.release(self._identity(), seqs)
            with self._lock:
                self._doubtful.difference_update(seqs)

    def _settle_costs(self) -> None:
        while self._settled:
            job_id, cost = self._settled.popleft()
            own = cost.served_from is None  # else another computed it
            self._share.settle(
                job_id,
                computed_tokens=cost.computed_tokens if own else 0,
                output_tokens=cost.completion_tokens if own else 0,
            )

    # -- looking ----------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Read more rows into the window; True when there were some."""
        now = self._clock()
        if not (self._look_now.is_set() or self._window.runs_low or now >= self._looked_s + self._pause_s()):
            return False
        self._look_now.clear()
        self._budgets.refresh()
        exhausted = self._budgets.exhausted()
        for job_id in self._share.drop_tenants(exhausted):
            self._window.forget([self._candidates.pop(job_id).row.seq])
        rows = self._window.look(without_tenants=exhausted)
        if rows and not (self._candidates or self._reader or self.num_claimed):
            self._first_until_s = self._clock() + _FIRST_S
        self._reader.give(rows)
        self._looked_s = self._clock()
        self._look_took_s = self._looked_s - now
        return bool(rows)

    def _pause_s(self) -> float:
        """Until the next look unasked: many lanes take time to look at, and may take a small part of this thread's."""
        pause_s = self._options.busy_poll_s if self._inference.num_jobs else self._options.poll_s
        return max(pause_s, _LOOK_COST * self._look_took_s)

    def _read(self) -> bool:
        """Check and tokenise rows for a while; True when some are left."""
        candidates, ends = self._reader.read()
        self._ends.update(ends)
        for candidate in candidates:
            self._add(candidate)
        return bool(self._reader)

    def _add(self, candidate: Candidate) -> None:
        row, params = candidate.row, candidate.prepared.params
        self._candidates[row.job_id] = candidate
        self._window.learn(len(candidate.prepared.token_ids))
        company = company_of(row.crashes)
        if company is Company.FRESH:
            shares = self._options.fair_share or self._budgets.is_limited(row.tenant)
            cost = WaitingCost(
                flow=row.flow if shares else 0,
                tenant=row.tenant,
                num_prompt_tokens=len(candidate.prepared.token_ids),
                max_tokens=None if params.max_tokens is None else params.max_tokens * params.n,
            )
            self._share.add(row.job_id, candidate.prepared.planning_ids, cost, priority=row.priority)
        else:
            self._suspects.add(row.job_id, company)

    # -- claiming ----------------------------------------------------------------------------------------

    def _end_unrun(self) -> bool:
        """Rows that need no engine are claimed like others, then end: their end is fenced as well."""
        seqs = list(self._ends)[:_ENDED_PER_CLAIM]
        ends = {seq: self._ends.pop(seq) for seq in seqs}
        for job in self._claim(seqs) if seqs else ():
            self.ended(job.seq)
            self._refuse(ends[job.seq](job))
        return bool(seqs)

    def _admit(self) -> bool:
        """Claim and deliver what the engine will soon admit; True when something was tried."""
        undelivered = max(0, self.num_claimed - self._inference.num_jobs)
        ahead = self._ahead()
        wanted = self._inference.free_slots(ahead) - undelivered
        slots = min(wanted, self._options.max_claimed - self.num_claimed)
        if slots <= 0 or wanted < ahead // _CLAIM_PARTS:
            return False
        job_ids = self._choose(slots)
        if not job_ids:
            return False
        chosen = {c.row.seq: c for c in (self._candidates.pop(job_id) for job_id in job_ids)}
        strangers = []
        try:
            jobs = self._claim(list(chosen))
        except StoreError:
            self._drop(job_ids)
            raise
        for job in jobs:
            candidate = chosen.pop(job.seq)
            if company_of(job.crashes) is company_of(candidate.row.crashes):
                self._deliver(job, candidate.prepared)
            else:  # it crashed since it was looked at: it belongs in other company
                strangers.append(job.seq)
        self._drop([candidate.row.job_id for candidate in chosen.values()])
        if strangers:
            self.disown(strangers)
        return True

    def _ahead(self) -> int:
        """How many claimed jobs may wait for admission now."""
        if self._first_until_s is None:
            return self._options.claim_ahead
        if (self._reader or self._more_is_coming()) and self._clock() < self._first_until_s:
            return min(_FIRST_AHEAD, self._options.claim_ahead)
        self._first_until_s = None
        self._share.reconsider()
        return self._options.claim_ahead

    def _choose(self, slots: int) -> list[str]:
        """The next jobs, taken out of the plan."""
        with self._lock:
            running = [company_of(job.crashes) for job in self._claimed.values()]
        waiting = self._suspects.companies
        if len(self._share) or (waiting and self._reader.has_fresh):
            waiting.append(Company.FRESH)
        allowed = admission(running, waiting, suspects_overdue=self._suspects.overdue)
        if allowed is None:
            return []
        number = slots if allowed.limit is None else min(slots, allowed.limit)
        if allowed.company is Company.FRESH:
            if self._budgets.is_stale:
                self._budgets.refresh()
            return self._share.take(number, weights=self._budgets.weights, start=self._budgets.start)
        return self._suspects.take(allowed.company, number)

    def _claim(self, seqs: list[int]) -> list[ClaimedJob]:
        """Claim rows of the window; those that were not to be had leave it all the same."""
        self._window.forget(seqs)
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
