"""Lease: the worker's sign of life, and the chores that follow the clock.

Owns the worker's identity (a random id that lives as long as its lease) and the thread of periodic work:
heartbeat, reaping the dead, cancel requests, deadlines, figures every ten seconds. Knows no Celery.
Invariants: a worker that cannot renew its lease stops admitting and, once the lease is over, drops what it
runs; after a lost lease it goes on under a new id, so that nothing it did before can be mistaken for its own.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kvq.engine.stats import acceptance
from kvq.worker.errors import StoreError
from kvq.worker.jobs import JobError, JobState
from kvq.worker.outage import Outage

if TYPE_CHECKING:
    from kvq.engine.stats import EngineStats
    from kvq.worker.inference import Inference
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

CANCELLED = JobError(code="cancelled", message="cancelled on request while running")
EXPIRED = JobError(code="expired", message="its deadline passed while it was running")

_TICK_S = 1.0
_EXPIRE_INTERVAL_S = 5.0
_REAP_INTERVAL_S = 10.0
_TIDY_INTERVAL_S = 30.0
STATS_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """How the worker presents itself and how often.

    Args:
        heartbeat_s: seconds between two heartbeats.
        lease_s: a worker silent for longer is dead.
        info: further facts to be shown about the worker.
    """

    queue: str
    model: str
    heartbeat_s: float = 5.0
    lease_s: float = 60.0
    info: dict[str, Any] = field(default_factory=dict)


class Lease:
    """Keeps the worker registered and does the periodic chores, on a thread of its own.

    Args:
        on_lost: called when what this worker runs is no longer its own; it must drop it all.
        on_tick: further chores, called about once a second on this thread.
        on_fault: called when the thread ends by an error of ours.
    """

    def __init__(
        self,
        store: Store,
        inference: Inference,
        *,
        options: LeaseOptions,
        on_lost: Callable[[], None],
        on_tick: Callable[[], None],
        on_fault: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._inference = inference
        self._options = options
        self._on_lost = on_lost
        self._on_tick = on_tick
        self._on_fault = on_fault
        self._clock = clock
        self._no_database = Outage("cannot reach the database", logger, clock)
        self._thread = threading.Thread(target=self._run, name="kvq-lease", daemon=True)
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._worker_id = new_worker_id()
        self._renewed_s = clock()
        self._back_s = -math.inf  # since when the lease has been renewed in time, every time
        self._lost_to: StoreError | None = None
        self._due_s = dict.fromkeys(("heartbeat", "expire", "reap", "stats", "tidy"), 0.0)
        self._meter = Meter(clock)

    @property
    def worker_id(self) -> str:
        """The id of the current lease."""
        return self._worker_id

    @property
    def lost_to(self) -> StoreError | None:
        """Why the lease could not be renewed in time, and what ran was dropped; None once it is renewed again."""
        return self._lost_to

    @property
    def firm(self) -> bool:
        """True while the lease was renewed recently enough to claim under it."""
        return self._clock() - self._renewed_s < max(self._options.lease_s / 2, 2 * self._options.heartbeat_s)

    def start(self) -> None:
        """Register, take back at once what dead workers of this machine ran, start the thread.

        Raises:
            StoreError: the database cannot be used.
        """
        bury_local_dead(self._store)
        self._register()
        self._reap()
        self._thread.start()

    def check_now(self) -> None:
        """There is reason to doubt the lease: renew it without waiting for the next heartbeat."""
        self._due_s["heartbeat"] = 0.0
        self._hurry.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread. The registration stays until ``retire``."""
        self._stopping.set()
        self._hurry.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def retire(self) -> None:
        """End the lease in good order: what this worker still holds is given back uncharged.

        A last sample says what the engine held once its jobs were gone: anything then is a leak (see the audit).
        """
        stats = self._inference.stats()
        if stats is not None:
            self._store.record_stats(self._worker_id, self._meter.sample(stats) or held(stats))
        self._store.retire_worker(self._worker_id)

    def bury(self) -> None:
        """End the lease after a fault: what was running is suspect and requeued as after a crash."""
        self._store.bury_worker(self._worker_id)
        self._reap()

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as err:
            logger.exception("the lease is no longer kept")
            self._on_fault(err)

    def _keep(self) -> None:
        while not self._stopping.is_set():
            try:
                self._tick()
            except StoreError as err:
                self._no_database.met(err)
                self._drop_if_over(err)
            self._on_tick()
            self._hurry.wait(_TICK_S)
            self._hurry.clear()

    def _tick(self) -> None:
        if self._due("heartbeat", self._options.heartbeat_s):
            self._renew()
        self._cancel_requested()
        self._expire_running()
        if self._due("expire", _EXPIRE_INTERVAL_S):
            self._store.expire_due()
        if self._due("reap", min(_REAP_INTERVAL_S, self._options.lease_s / 2)):
            self._reap(bury_silent=self._hears_others())
        if self._due("stats", STATS_INTERVAL_S):
            self._report()
        if self._due("tidy", _TIDY_INTERVAL_S):
            self._store.tidy()

    def _due(self, chore: str, interval_s: float) -> bool:
        now = self._clock()
        if now < self._due_s[chore]:
            return False
        self._due_s[chore] = now + interval_s
        return True

    def _renew(self) -> None:
        asked_s = self._clock()
        if not self.firm:
            self._back_s = asked_s
        try:
            alive = self._store.heartbeat(self._worker_id)
        except StoreError:
            self._due_s["heartbeat"] = 0.0  # try again at the next tick
            raise
        if not alive:
            logger.error(
                "worker %s was declared dead while it was silent: dropping %d jobs, others run them",
                self._worker_id,
                self._inference.num_jobs,
            )
            self._on_lost()
            self._worker_id = new_worker_id()
            self._register()
        self._renewed_s = asked_s
        self._lost_to = None

    def _drop_if_over(self, reason: StoreError) -> None:
        if self._lost_to is None and self._clock() - self._renewed_s > self._options.lease_s:
            logger.error("the lease could not be renewed for %.0f s: dropping what runs", self._options.lease_s)
            self._on_lost()
            self._lost_to = reason

    def _register(self) -> None:
        self._store.register_worker(
            self._worker_id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            pid_started=process_birth(os.getpid()),
            model=self._options.model,
            queue=self._options.queue,
            info=self._options.info,
        )
        self._renewed_s = self._clock()

    def _hears_others(self) -> bool:
        """Whether a neighbour's silence means something.

        After an outage of the database, or of the machine, everybody was silent, and the first who is back would
        charge all the others' jobs with a crash; they get half a lease to be heard.
        """
        return self._clock() - self._back_s >= self._options.lease_s / 2

    def _reap(self, *, bury_silent: bool = True) -> None:
        report = self._store.reap(lease_s=self._options.lease_s, bury_silent=bury_silent)
        if report.requeued or report.dead:
            logger.warning(
                "jobs of dead workers: %d requeued, %d given up after too many crashes", report.requeued, report.dead
            )

    def _cancel_requested(self) -> None:
        for _seq, job_id in self._store.cancel_requests(self._worker_id):
            self._inference.abort(job_id, JobState.CANCELLED, CANCELLED)

    def _expire_running(self) -> None:
        now = datetime.now(UTC)
        for job in self._inference.jobs():
            if job.deadline is not None and job.deadline <= now:
                self._inference.abort(job.job_id, JobState.EXPIRED, EXPIRED)

    def _report(self) -> None:
        stats = self._inference.stats()
        if stats is None:
            return
        sample = self._meter.sample(stats)
        if sample is not None:
            logger.info("%s", describe(sample))
            self._store.record_stats(self._worker_id, sample)


class Meter:
    """Turns the engine's totals into rates between two samples."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, EngineStats] | None = None

    def sample(self, stats: EngineStats) -> dict[str, float | int] | None:
        """Figures since the last sample; None when nothing happened, or for the very first."""
        now = self._clock()
        last, self._last = self._last, (now, stats)
        if last is None:
            return None
        then, before = last
        if stats.steps == before.steps and not stats.running and not stats.waiting:
            return None
        seconds = max(1e-6, now - then)
        prompt = stats.prompt_tokens - before.prompt_tokens
        cached = stats.cached_prompt_tokens - before.cached_prompt_tokens
        return held(stats) | {
            "prompt_tps": prompt / seconds,
            "generation_tps": (stats.generated_tokens - before.generated_tokens) / seconds,
            "prefix_hit_rate": cached / prompt if prompt else 0.0,
            "swapped_in": stats.swapped_in - before.swapped_in,
            "swapped_out": stats.swapped_out - before.swapped_out,
            "preemptions": stats.preemptions - before.preemptions,
            "steps": stats.steps - before.steps,
            "num_draft_tokens": stats.num_draft_tokens - before.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens - before.num_accepted_tokens,
        }


def held(stats: EngineStats) -> dict[str, float | int]:
    """What the engine holds now, as part of a sample."""
    return {"running": stats.running, "waiting": stats.waiting, "kv_usage": stats.kv_usage}


def describe(sample: dict[str, float | int]) -> str:
    """A sample as a log line, in the words people know from vLLM."""
    num_drafts, num_accepted = sample.get("num_draft_tokens", 0), sample.get("num_accepted_tokens", 0)
    share, guesses = acceptance(num_accepted, num_drafts), ""
    if share is not None:
        guesses = f", Draft tokens: {num_drafts}, accepted: {num_accepted} ({share:.1%})"
    return (
        f"Avg prompt throughput: {sample['prompt_tps']:.1f} tokens/s, "
        f"Avg generation throughput: {sample['generation_tps']:.1f} tokens/s, "
        f"Running: {sample['running']} reqs, Waiting: {sample['waiting']} reqs, "
        f"KV cache usage: {100 * sample['kv_usage']:.1f}%, "
        f"Prefix cache hit rate: {100 * sample['prefix_hit_rate']:.1f}%, "
        f"Swapped in/out: {sample['swapped_in']}/{sample['swapped_out']} blocks, "
        f"Preemptions: {sample['preemptions']}{guesses}"
    )


def new_worker_id() -> str:
    """A random id that tells a person which machine and process it was."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:12]}"


def bury_local_dead(store: Store) -> int:
    """Declare dead those workers of this machine whose process is gone, without waiting for their lease."""
    hostname = socket.gethostname()
    buried = 0
    for worker in store.live_workers():
        if worker.hostname == hostname and is_gone(worker.pid, worker.pid_started):
            logger.warning("worker %s is gone (process %d): its jobs are requeued", worker.worker_id, worker.pid)
            store.bury_worker(worker.worker_id)
            buried += 1
    return buried


def process_birth(pid: int) -> str | None:
    """What tells a process from an earlier one with the same number; None where it cannot be known.

    Boot of the machine, PID namespace (two containers may share a host name) and start time in clock ticks.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything; start time is field 22.
    start_ticks = stat.rpartition(")")[2].split()[19]
    return f"{boot_id}/{namespace}/{start_ticks}"


def is_gone(pid: int, birth: str | None) -> bool:
    """True when the process registered with this number and birth certainly runs no more on this machine."""
    here = process_birth(os.getpid())
    if birth is None or here is None or birth.rpartition("/")[0] != here.rpartition("/")[0]:
        return False  # another boot or container: only its lease can tell
    return process_birth(pid) != birth
