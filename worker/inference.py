"""Inference: the seam between jobs and the engine, and the only file of the worker that touches it.

Owns the engine, the thread that drives it, and the jobs inside. Knows no SQL and no Celery: jobs come in by
``submit``, each leaves once, as a JobOutcome handed to ``on_outcome`` or by ``discard``.
Invariants: only the engine thread calls the engine (its tokenizer and ``check`` excepted); a job that was
discarded never produces an outcome; an engine that failed for good, or computes nonsense for whatever it is asked, sets
``fault`` and drops nothing silently.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvq.engine.errors import ConfigError, EngineError, ModelError, RequestError, StepFailed
from kvq.engine.request import MAX_SEED, RequestOutput
from kvq.worker.control import Control
from kvq.worker.embeddings import SplitJobs
from kvq.worker.failpoints import Failpoints
from kvq.worker.jobs import ClaimedJob, Endpoint, JobError, JobOutcome, JobState
from kvq.worker.outcomes import Entry, ended_outcome, generation_outcome, unrun_outcome
from kvq.worker.preparation import Prepared, prepare
from kvq.worker.request_key import model_identity, request_key

if TYPE_CHECKING:
    from kvq.engine.engine import Engine
    from kvq.engine.stats import EngineStats

__all__ = ["Inference", "Prepared", "job_seed"]

logger = logging.getLogger(__name__)

# Errors after which every further call into the GPU fails as well: only a new process helps.
_STICKY_ERRORS = ("CUDA error", "device-side assert", "an illegal memory access", "cudaError")
_STATS_INTERVAL_S = 0.25


class Inference:
    """One engine and the thread that owns it.

    Args:
        load: makes the engine; called on the engine thread, since it may take minutes.
        on_outcome: receives the end of every job; called on the engine thread, must not block.
        on_change: called on the engine thread when the engine became ready, finished or admitted something.
        served_model_names: names rows may use for the model, the first is the one answers carry;
            empty: the engine's own name.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        on_outcome: Callable[[JobOutcome], None],
        on_change: Callable[[], None],
        served_model_names: Sequence[str] = (),
        failpoints: Failpoints | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._load = load
        self._on_outcome = on_outcome
        self._on_change = on_change
        self._served_model_names = tuple(served_model_names)
        self._failpoints = failpoints or Failpoints()
        self._clock = clock
        self._wall_clock = wall_clock
        self._thread = threading.Thread(target=self._run, name="kvq-engine", daemon=True)
        self._ready = threading.Event()
        # Guarded by _changed: everything below that other threads write.
        self._changed = threading.Condition()
        self._commands: deque[Callable[[Engine], object]] = deque()
        self._entries: dict[str, Entry] = {}
        self._num_unseen = 0  # submitted, not yet in the engine
        self._stopping = False
        # Written by the engine thread only.
        self._engine: Engine | None = None
        self._identity: str | None = None  # of the engine, where its answers may be given to equal requests
        self._inside: set[str] = set()  # ids of the jobs the engine knows
        self._split = SplitJobs()
        self._control = Control()
        self._lineup: deque[Entry] = deque()  # after a failed step: jobs that run one at a time
        self._num_waiting = 0
        self._stats: EngineStats | None = None
        self._stats_due_s = 0.0
        self._step_started_s: float | None = None
        self._fault: Exception | None = None

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread, which loads the engine first."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the engine thread after the step it is in. Jobs still inside stay without outcome.

        A thread that is still loading the engine is not waited for: it has no jobs, and ends once it has loaded.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._ready.is_set():
            self._thread.join(timeout_s)

    @property
    def ready(self) -> bool:
        """True once the engine is loaded and as long as it works."""
        return self._ready.is_set() and self._fault is None

    @property
    def fault(self) -> Exception | None:
        """Why the engine stopped for good: it could not be loaded, or a step failed beyond repair."""
        return self._fault

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the engine is loaded or failed to load; True where it can be used."""
        self._ready.wait(timeout_s)
        return self.ready

    # -- jobs ------------------------------------------------------------------------------------------

    def prepare(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Prepared:
        """Check and tokenise a body. Any thread, once ready.

        Raises:
            RowError: the body cannot be run by this engine.
        """
        engine = self._loaded()
        names = self._served_model_names or (engine.model_id,)
        prepared = prepare(engine, endpoint, body, names)
        if self._identity is None or prepared.embedding is not None:
            return prepared
        return replace(prepared, request_key=request_key(self._identity, endpoint, prepared))

    def submit(self, job: ClaimedJob, prepared: Prepared) -> None:
        """Hand a claimed job to the engine. It ends in one outcome unless it is discarded.

        A job without a seed gets one that follows from its id, so that a repeated run gives the same answer.
        """
        params = prepared.params
        if params.seed is None:
            seed = job_seed(job.job_id, self._loaded().config.seed)
            prepared = replace(prepared, params=replace(params, seed=seed))
        entry = Entry(job=job, prepared=prepared, submitted_s=self._clock())
        with self._changed:
            assert job.job_id not in self._entries, f"job {job.job_id} is in the engine already"
            self._entries[job.job_id] = entry
            self._num_unseen += 1
            self._commands.append(partial(self._admit, entry=entry))
            self._changed.notify_all()

    def abort(self, job_id: str, state: JobState, error: JobError) -> None:
        """End a job early, in ``state``, keeping the text it has so far. No effect when it is gone already."""
        with self._changed:
            self._commands.append(partial(self._abort, job_id=job_id, state=state, error=error))
            self._changed.notify_all()

    def discard(self, job_ids: Iterable[str] | None = None) -> list[ClaimedJob]:
        """Drop jobs (all of them by default) without an outcome and return those that were inside."""
        with self._changed:
            wanted = list(self._entries) if job_ids is None else [i for i in job_ids if i in self._entries]
            dropped = [self._entries.pop(job_id).job for job_id in wanted]
            self._commands.extend(partial(self._forget, job_id=job.job_id) for job in dropped)
            self._changed.notify_all()
        return dropped

    def jobs(self) -> list[ClaimedJob]:
        """The jobs inside, waiting ones included."""
        with self._changed:
            return [entry.job for entry in self._entries.values()]

    # -- figures ---------------------------------------------------------------------------------------

    @property
    def num_jobs(self) -> int:
        """Jobs inside: running, waiting, and submitted but not yet seen by the engine thread."""
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        """Jobs inside that the engine has not admitted (or has preempted)."""
        return self._num_waiting + self._num_unseen + len(self._lineup)

    def free_slots(self, lookahead: int) -> int:
        """How many more jobs to submit so that ``lookahead`` of them wait for admission."""
        return max(0, lookahead - self.num_waiting)

    def stats(self) -> EngineStats | None:
        """The engine's figures, at most a moment old; None before it is loaded."""
        return self._stats

    @property
    def step_age_s(self) -> float | None:
        """How long the current step has been running; None between steps. For a watchdog."""
        started = self._step_started_s
        return None if started is None else self._clock() - started

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus answer."""
        return self._loaded().max_model_len

    @property
    def model_id(self) -> str:
        """The name answers are given under."""
        return self._served_model_names[0] if self._served_model_names else self._loaded().model_id

    # -- engine thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine = engine = self._load()
            if engine.config.enable_dedup:
                self._identity = model_identity(engine.config, max_model_len=engine.max_model_len)
            self._note(engine)
            self._ready.set()
            self._on_change()
            while self._next_commands(engine):
                if engine.has_unfinished_requests:
                    self._step(engine)
                elif self._lineup:
                    self._admit_next(engine)
        except (ConfigError, ModelError) as err:  # says what to change, and is printed by whoever started the worker
            self._fault = err
        except Exception as err:
            logger.exception("the engine stopped for good")
            self._fault = err
        finally:
            self._step_started_s = None
            self._ready.set()
            self._on_change()

    def _next_commands(self, engine: Engine) -> bool:
        """Carry out what other threads asked for, waiting when there is nothing to do; False: stop."""
        with self._changed:
            while not (self._stopping or self._commands or engine.has_unfinished_requests or self._lineup):
                self._changed.wait()
            commands, self._commands = self._commands, deque()
            stopping = self._stopping
        for command in commands:
            command(engine)
        if commands:
            self._note(engine)
        return not stopping

    def _step(self, engine: Engine) -> None:
        self._failpoints.hit("mid_step")
        self._step_started_s = self._clock()
        try:
            outputs = engine.step()
        except StepFailed as err:
            self._isolate(engine, err)
            outputs = []
        finally:
            self._step_started_s = None
        for job_id, gathered in self._split.gather(outputs):
            self._inside.discard(job_id)
            if job_id == self._control.request_id:
                for failed in self._control.answered(gathered[0]):
                    self._end(*failed)
            elif any(output.error is not None for output in gathered):
                self._control.hold((job_id, gathered))
            else:
                self._control.note_good(gathered[0].prompt_token_ids)
                self._end(job_id, gathered)
        self._control.ask(engine)
        waiting = self._num_waiting
        self._note(engine)
        if outputs or self._num_waiting < waiting:
            self._on_change()

    def _end(self, job_id: str, outputs: Sequence[RequestOutput]) -> None:
        entry = self._take(job_id)
        if entry is not None:
            self._on_outcome(ended_outcome(entry, outputs, created=self._wall_clock()))

    def _admit(self, engine: Engine, entry: Entry) -> None:
        self._num_unseen -= 1
        if self._lineup:  # a sick step is being looked into: nobody joins the one that is tried
            self._lineup.append(entry)
        else:
            self._add(engine, entry)

    def _admit_next(self, engine: Engine) -> None:
        self._add(engine, self._lineup.popleft())
        self._note(engine)

    def _add(self, engine: Engine, entry: Entry) -> None:
        job, prepared = entry.job, entry.prepared
        if job.job_id not in self._entries:
            return  # discarded meanwhile
        try:
            self._start(engine, job, prepared)
        except RequestError as err:
            self._end_requests(engine, job.job_id)
            self._take(job.job_id)
            self._on_outcome(unrun_outcome(entry, JobState.FAILED, JobError(code=err.code, message=str(err))))
            self._on_change()
        else:
            self._inside.add(job.job_id)

    def _abort(self, engine: Engine, job_id: str, state: JobState, error: JobError) -> None:
        entry = self._take(job_id)
        if entry is None:
            return
        output = self._forget(engine, job_id)
        self._on_outcome(generation_outcome(entry, output, state, error, created=self._wall_clock()))
        self._on_change()

    def _forget(self, engine: Engine, job_id: str) -> RequestOutput | None:
        for entry in self._lineup:
            if entry.job.job_id == job_id:
                self._lineup.remove(entry)
                return None
        if job_id not in self._inside:
            return None
        self._inside.remove(job_id)
        return self._end_requests(engine, job_id)

    def _start(self, engine: Engine, job: ClaimedJob, prepared: Prepared) -> None:
        """Make the job one request of the engine, or one for each prompt to be embedded."""
        asked = prepared.embedding
        if asked is None:
            engine.add_request(
                job.job_id, prepared.token_ids, prepared.params, priority=job.priority, lora=prepared.lora
            )
            return
        for request_id, prompt in zip(self._split.split(job.job_id, len(asked.prompts)), asked.prompts, strict=True):
            engine.add_embedding(request_id, prompt, asked.params, priority=job.priority, lora=prepared.lora)

    def _end_requests(self, engine: Engine, job_id: str) -> RequestOutput | None:
        """Take what the engine has of a job out of it; returns what was generated."""
        ended = [engine.abort_request(request_id) for request_id in self._split.drop(job_id)]
        return ended[0] if ended else None

    def _isolate(self, engine: Engine, err: StepFailed) -> None:
        """A step failed and was rolled back: run its jobs one at a time, and fail the one that fails alone."""
        if _is_sticky(err):
            raise err
        inside = [entry for entry in list(self._entries.values()) if entry.job.job_id in self._inside]
        for entry in inside:
            self._forget(engine, entry.job.job_id)
        if len(inside) == 1:
            logger.error("job %s fails the engine's step on its own: %s", inside[0].job.job_id, err)
            self._take(inside[0].job.job_id)
            self._on_outcome(unrun_outcome(inside[0], JobState.FAILED, JobError(code="engine_error", message=str(err))))
        elif inside:
            logger.error("a step of %d jobs failed; they now run one at a time: %s", len(inside), err)
            self._lineup.extendleft(reversed(inside))
        else:
            raise EngineError("a step failed though no job was running") from err

    def _take(self, job_id: str) -> Entry | None:
        with self._changed:
            return self._entries.pop(job_id, None)

    def _note(self, engine: Engine) -> None:
        self._num_waiting = engine.num_waiting
        now = self._clock()
        if now >= self._stats_due_s or not engine.has_unfinished_requests:
            self._stats = engine.stats()
            self._stats_due_s = now + _STATS_INTERVAL_S

    # -- helpers ---------------------------------------------------------------------------------------

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine is not loaded yet; wait_ready() first")
        return self._engine


def job_seed(job_id: str, base_seed: int) -> int:
    """The seed of a job that brings none: the same in every run of the job."""
    digest = hashlib.sha256(f"{base_seed}/{job_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") & MAX_SEED


def _is_sticky(err: BaseException) -> bool:
    """True when the device itself is unusable, by the text of the error and what caused it."""
    cause: BaseException | None = err
    while cause is not None:
        if any(phrase in str(cause) for phrase in _STICKY_ERRORS):
            return True
        cause = cause.__cause__
    return False
