"""EnginePool: where Celery hands its requests over, and where it learns how they ended.

Owns the requests Celery knows of and the way onto Celery's event loop. It computes nothing: the engine does, on
threads of ours. Knows no SQL. Invariants: Celery's objects are touched on the event loop's thread only; every
claimed job handed to Celery either reaches ``submit`` or is reported to ``refuse``; a request leaves Celery's
list of active ones when its end is known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.concurrency.base import BasePool, apply_target
from celery.worker import state as celery_state

from kvq.worker.inference import Prepared
from kvq.worker.jobs import ClaimedJob, JobError, JobOutcome, JobState
from kvq.worker.messages import TASK_NAME, handler_message
from kvq.worker.tasks import Answer

logger = logging.getLogger(__name__)

_REVOKE_SWEEP_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What the pool needs of the worker it is part of; called on the event loop, so nothing may block.

    Args:
        message_handler: Celery's task handler of the present connection; None while there is none.
        submit: takes a job that Celery has accepted.
        started: takes a job whose sender may want to know that it runs.
        refuse: takes a job that Celery will not run, and how it ends.
        give_back: takes a job that cannot be handed to Celery, as it is shutting down.
        cancel: takes ids of jobs that somebody revoked.
        time_out: takes the id of a job that ran past a time limit, and what to say.
        info: facts for ``inspect stats``.
    """

    message_handler: Callable[[], Callable[[Any], None] | None]
    submit: Callable[[ClaimedJob, Prepared], None]
    started: Callable[[ClaimedJob], None]
    refuse: Callable[[ClaimedJob, JobState, JobError], None]
    give_back: Callable[[ClaimedJob], None]
    cancel: Callable[[Sequence[str]], None]
    time_out: Callable[[str, JobError], None]
    info: Callable[[], dict[str, Any]]


@dataclass(eq=False, kw_only=True)
class Hosted:
    """A request in our care. Celery keeps only a weak reference to it and calls ``terminate``."""

    job_id: str
    request: Any
    awaited: bool  # somebody waits for its answer in Celery, so it ends once that is told
    callback: Callable[[tuple[int, Any, float]], None]
    on_terminate: Callable[[str], None]
    timeout_s: float | None
    soft_timeout_s: float | None
    started_s: float = field(default_factory=time.monotonic)

    def terminate(self, _signum: int) -> None:
        """``revoke(terminate=True)`` reached this request; Celery has announced it as revoked."""
        self.on_terminate(self.job_id)


class EnginePool(BasePool):  # type: ignore[misc]
    """A Celery pool whose slots are the engine's."""

    uses_semaphore = False
    is_green = False
    signal_safe = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner: Owner | None = None
        self._expected: dict[str, tuple[ClaimedJob, Prepared]] = {}
        self._hosted: dict[str, Hosted] = {}
        self._revoked_seen: set[str] = set()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake_lock = threading.Lock()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)

    # -- for our threads ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Say who owns this pool; before any job is handed over."""
        self._owner = owner

    def hand_over(self, job: ClaimedJob, prepared: Prepared) -> None:
        """Give a claimed job to Celery's task handler, which gives it back to ``submit``."""
        self._on_loop(partial(self._hand_over, job, prepared))

    def note_committed(self, outcomes: Sequence[JobOutcome]) -> None:
        """These ends are durable: Celery takes note of those that nobody waits for, the others are told first."""
        self._on_loop(partial(self._note_committed, tuple(outcomes)))

    def note_told(self, job_id: str, state: JobState, error: JobError | None) -> None:
        """The end of a job is durable and its sender was told: let Celery take note."""
        self._on_loop(partial(self._settle, job_id, state, error))

    def drop(self, job_ids: Sequence[str]) -> None:
        """Jobs are no longer ours and ended without a result: let Celery forget them."""
        self._on_loop(partial(self._drop, tuple(job_ids)))

    def wake(self) -> None:
        """Make the event loop turn once, so that it looks at its flags."""
        with self._wake_lock:
            try:
                os.write(self._write_fd, b"!")
            except BlockingIOError:
                return  # it has enough reasons to wake up

    # -- what Celery calls -------------------------------------------------------------------------------

    def register_with_event_loop(self, hub: Any) -> None:
        """Called at every (re)connection to the broker: the loop has forgotten what it watched."""
        hub.add_reader(self._read_fd, self._on_readable)
        hub.call_repeatedly(_REVOKE_SWEEP_S, self._sweep)
        self.wake()

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        callback: Callable[[Any], None],
        accept_callback: Callable[[int, float], None],
        correlation_id: str | None = None,
        timeout: float | None = None,
        soft_timeout: float | None = None,
        **_options: Any,
    ) -> Hosted | None:
        """Celery has accepted a request: submit its job."""
        expected = self._expected.pop(correlation_id or "", None)
        if expected is None:
            # Not from our queue (Celery's own small tasks, or one sent to the control queue): run it here.
            apply_target(target, args, kwargs, callback=callback, accept_callback=accept_callback)
            return None
        job, prepared = expected
        hosted = Hosted(
            job_id=job.job_id,
            awaited=job.celery is not None,
            request=accept_callback.__self__,  # type: ignore[attr-defined]  # the celery Request
            callback=callback,
            on_terminate=self._cancel_one,
            timeout_s=timeout,
            soft_timeout_s=soft_timeout,
        )
        self._hosted[job.job_id] = hosted
        accept_callback(os.getpid(), time.monotonic())
        owner = self._of_owner()
        if hosted.awaited:
            owner.started(job)
        owner.submit(job, prepared)
        return hosted

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Nothing to kill: ``Hosted.terminate`` cancels."""

    def on_stop(self) -> None:
        """The owner has drained by now."""

    def on_terminate(self) -> None:
        """The owner has drained by now."""

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        return {**info, **(self._owner.info() if self._owner else {})}

    # -- what Celery's handler calls on the messages we give it -------------------------------------------

    no_ack_consumers = None

    def basic_ack(self, job_id: str, multiple: bool = False) -> None:
        """A request was acknowledged: accepted, or, if it never came to ``on_apply``, revoked."""
        if (expected := self._expected.pop(job_id, None)) is not None:
            error = JobError(code="cancelled", message="revoked before it was run")
            self._of_owner().refuse(expected[0], JobState.CANCELLED, error)

    def basic_reject(self, job_id: str, requeue: bool = False) -> None:
        """A request was rejected: Celery cannot make sense of its headers."""
        if (expected := self._expected.pop(job_id, None)) is not None:
            error = JobError(code="invalid_value", message="the headers of its Celery message are invalid")
            self._of_owner().refuse(expected[0], JobState.FAILED, error)

    # -- on the event loop ---------------------------------------------------------------------------------

    def _on_loop(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self.wake()

    def _on_readable(self, *_: Any) -> None:
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        self.run_inbox()

    def run_inbox(self) -> None:
        """Do what our threads asked for. On the event loop's thread, or when there is no loop any more."""
        for _ in range(len(self._inbox)):
            action = self._inbox.popleft()
            try:
                action()
            except Exception:  # an error of one request must not end the event loop
                logger.exception("an action on the event loop failed")

    def _hand_over(self, job: ClaimedJob, prepared: Prepared) -> None:
        owner = self._of_owner()
        handler = owner.message_handler()
        if handler is None:
            owner.give_back(job)
            return
        self._expected[job.job_id] = (job, prepared)
        handler(handler_message(job, TASK_NAME, self))

    def _note_committed(self, outcomes: Sequence[JobOutcome]) -> None:
        for outcome in outcomes:
            hosted = self._hosted.get(outcome.job_id)
            if hosted is not None and not hosted.awaited:
                self._settle(outcome.job_id, outcome.state, outcome.error)

    def _settle(self, job_id: str, state: JobState, error: JobError | None) -> None:
        hosted = self._hosted.pop(job_id, None)
        if hosted is None:
            return
        if state in (JobState.CANCELLED, JobState.EXPIRED):
            self._announce_revoked(hosted.request, expired=state is JobState.EXPIRED)
            return
        runtime_s = time.monotonic() - hosted.started_s
        failure = Answer(error=error).failure()
        if failure is None:
            hosted.callback((0, state.value, runtime_s))
        else:
            hosted.callback((1, _exception_info(failure), runtime_s))

    def _announce_revoked(self, request: Any, *, expired: bool) -> None:
        """What ``Request._announce_revoked`` does, without the result backend: the outbox has told it."""
        celery_state.task_ready(request)
        if request._already_revoked:
            return
        request._already_revoked = True
        request.send_event("task-revoked", terminated=False, signum=None, expired=expired)
        signals.task_revoked.send(
            sender=request.task, request=request._context, terminated=False, signum=None, expired=expired
        )

    def _drop(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._expected.pop(job_id, None)
            if (hosted := self._hosted.pop(job_id, None)) is not None:
                celery_state.task_ready(hosted.request)

    def _sweep(self) -> None:
        """Find what was revoked and what ran past its time limits since the last sweep."""
        revoked = celery_state.revoked.as_dict() if celery_state.revoked else {}
        if fresh := [task_id for task_id in revoked if task_id not in self._revoked_seen]:
            self._revoked_seen = set(revoked)
            self._of_owner().cancel(fresh)
        now = time.monotonic()
        for hosted in self._hosted.values():
            limits = [limit for limit in (hosted.soft_timeout_s, hosted.timeout_s) if limit]
            if limits and now - hosted.started_s > min(limits):
                message = f"it ran longer than its time limit of {min(limits):g} s"
                self._of_owner().time_out(hosted.job_id, JobError(code="time_limit_exceeded", message=message))

    def _cancel_one(self, job_id: str) -> None:
        self._of_owner().cancel([job_id])

    def _of_owner(self) -> Owner:
        assert self._owner is not None, "the bootstep attaches the pool before any job is claimed"
        return self._owner


def _exception_info(failure: Exception) -> ExceptionInfo:
    try:
        raise failure
    except type(failure):
        return ExceptionInfo()
