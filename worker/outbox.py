"""Outbox: tells Celery's result backend and links how jobs ended, after the commit, at least once.

Owns the thread that reads outbox rows, tells them and deletes them. Knows no engine and no hub: what is told is
reported to ``on_told``. A row is told through Celery's own tracer, so that results, links, chains and chords
happen as for any task; answers that nothing hangs on are stored as it would, many at a time. Telling one twice stores
the same result under the same id. That a job has started is told when there is time, and never after its end.
Invariant: a row is deleted only after the backend has taken it, or when nobody could ever take it; rows of dead workers
are told by the living.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery import signals, states
from celery.app.task import Context
from celery.app.trace import trace_task
from kombu.exceptions import OperationalError

from kvq.worker.errors import StoreError
from kvq.worker.failpoints import Failpoints
from kvq.worker.jobs import ClaimedJob, JobError, JobState
from kvq.worker.messages import TASK_NAME, request_context
from kvq.worker.outage import Outage
from kvq.worker.store_records import OutboxRow
from kvq.worker.tasks import Answer

if TYPE_CHECKING:
    from kvq.worker.app import KvqApp
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

_MAX_PER_ROUND = 200
_IDLE_S = 1.0
# What is told together costs the two databases the round trips of one.
_GATHER_S = 0.1
_BACKEND_PAUSE_S = 1.0
# Of a row whose sender's links or headers are at fault, not a server that is away: about a minute.
_MAX_TRIES = 5
_REASON_BY_STATE = {JobState.CANCELLED: "revoked", JobState.EXPIRED: "expired"}


class Outbox:
    """Tells what the store says is to be told.

    Args:
        identity: the worker id whose rows are ours, as of now.
        on_told: called with the job id, its state and the error, once the backend has the result.
    """

    def __init__(
        self,
        app: KvqApp,
        store: Store,
        *,
        identity: Callable[[], str],
        on_told: Callable[[str, JobState, JobError | None], None],
        on_fault: Callable[[Exception], None],
        failpoints: Failpoints | None = None,
    ) -> None:
        self._app = app
        self._store = store
        self._identity = identity
        self._on_told = on_told
        self._on_fault = on_fault
        self._failpoints = failpoints or Failpoints()
        self._task = app.tasks[TASK_NAME]
        self._away: tuple[type[Exception], ...] = (*app.backend.connection_errors, OperationalError, OSError)
        self._no_backend = Outage("the result backend is away", logger)
        self._no_outbox = Outage("cannot read the outbox", logger)
        self._trace_error: Exception | None = None
        self._lock = threading.Lock()
        self._started: dict[str, dict[str, Any]] = {}  # job id -> its Celery headers
        self._thread = threading.Thread(target=self._run, name="kvq-outbox", daemon=True)
        self._bell = threading.Event()
        self._look_now = threading.Event()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start telling, what earlier workers left first."""
        signals.task_internal_error.connect(self._note_trace_error, sender=self._task, weak=False)
        self._thread.start()

    def note_started(self, job: ClaimedJob) -> None:
        """A job of a Celery sender runs now (Celery's state STARTED)."""
        with self._lock:
            self._started[job.job_id] = job.celery or {}
        self._bell.set()

    def ring(self) -> None:
        """Something was committed."""
        self._look_now.set()
        self._bell.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Tell what is there, for at most ``timeout_s``, and end the thread. The rest is told by others."""
        self._stopping.set()
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        signals.task_internal_error.disconnect(self._note_trace_error, sender=self._task)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            looked_s = -math.inf
            while True:
                stopping = self._stopping.is_set()
                self._bell.clear()
                self._tell_started()
                told = 0
                if stopping or self._look_now.is_set() or time.monotonic() >= looked_s + _IDLE_S:
                    self._look_now.clear()
                    told = self._round()
                    looked_s = time.monotonic()
                if told == _MAX_PER_ROUND:  # there may be more
                    self._look_now.set()
                elif stopping and not told:
                    return
                elif not stopping and self._bell.wait(_IDLE_S):
                    self._stopping.wait(_GATHER_S)
        except Exception as err:
            logger.exception("the outbox stopped for good")
            self._on_fault(err)
        finally:
            self._app.backend.client.close()  # Celery's backends are one per thread

    def _tell_started(self) -> None:
        """News, not a promise: what the backend does not take now is not told again."""
        with self._lock:
            started, self._started = self._started, {}
        backend = self._app.backend
        metas = {}
        for job_id, celery in started.items():
            try:
                context = request_context(job_id, TASK_NAME, celery)
                if not context.get("ignore_result"):
                    metas[backend.get_key_for_task(job_id)] = backend.encode(
                        _meta(job_id, context, states.STARTED, _here())
                    )
            except Exception:  # headers are the sender's: anything may be wrong with them
                logger.exception("the start of job %s could not be told", job_id)
        try:
            self._store_all(metas)
        except backend.connection_errors as err:
            self._no_backend.met(err)
        except Exception:  # or with what lies under the keys
            logger.exception("the start of %d jobs could not be told", len(metas))

    def _store_all(self, metas: dict[bytes, str]) -> None:
        """What the backend's ``store_result`` does for each, in two round trips for all: a success stays."""
        if not metas:
            return
        backend = self._app.backend
        known = backend.client.mget(list(metas))
        with backend.client.pipeline(transaction=False) as pipe:
            for (key, meta), old in zip(metas.items(), known, strict=True):
                if old is None or backend.decode(old)["status"] != states.SUCCESS:
                    pipe.set(key, meta, ex=backend.expires or None)
                    pipe.publish(key, meta)
            pipe.execute()

    def _round(self) -> int:
        """Tell one round of rows; the number told."""
        try:
            rows = self._store.outbox_pending(_MAX_PER_ROUND, worker_id=self._identity())
            if not rows:
                return 0
            if not self._backend_answers():
                for row in rows:
                    self._store.outbox_failed(row.id, "the result backend is away")
                self._stopping.wait(_BACKEND_PAUSE_S)
                return 0
            at_once = self._tell_at_once(rows)
            told = [row for row in rows if row.id in at_once or self._tell(row)]
            self._failpoints.hit("after_backend")
            self._store.outbox_done([row.id for row in told])
        except StoreError as err:
            self._no_outbox.met(err)
            self._stopping.wait(_BACKEND_PAUSE_S)
            return 0
        for row in told:
            self._on_told(row.job_id, JobState(row.payload["state"]), _error_of(row))
        return len(told)

    def _backend_answers(self) -> bool:
        """Asked before the tracer runs: it would store its own failure in place of the answer."""
        try:
            self._app.backend.client.ping()
        except self._app.backend.connection_errors as err:
            self._no_backend.met(err)
            return False
        return True

    def _tell_at_once(self, rows: Sequence[OutboxRow]) -> set[int]:
        """Tell the successes that nothing hangs on, together; the ids of those told, none where that fails."""
        backend = self._app.backend
        metas, ids = {}, set()
        try:
            for row in rows:
                celery = row.payload["celery"] or {}
                context = request_context(row.job_id, TASK_NAME, celery)
                if row.payload["state"] != JobState.SUCCEEDED or any((celery.get("links") or {}).values()):
                    continue
                with self._lock:
                    self._started.pop(row.job_id, None)
                if not context.get("ignore_result"):
                    meta = _meta(row.job_id, context, states.SUCCESS, row.payload["response"], self._app.now())
                    metas[backend.get_key_for_task(row.job_id)] = backend.encode(meta)
                ids.add(row.id)
            self._store_all(metas)
        except Exception:  # one by one it shows whose headers, or what under whose key, is at fault
            logger.exception("%d answers could not be told together", len(metas))
            return set()
        return ids

    def _tell(self, row: OutboxRow) -> bool:
        """Tell one row; False when it is to be tried again later."""
        with self._lock:
            self._started.pop(row.job_id, None)
        try:
            self._tell_as(row, request_context(row.job_id, TASK_NAME, row.payload["celery"] or {}))
        except Exception as err:  # links and headers are the sender's: anything may be wrong with them
            logger.exception("the end of job %s could not be told", row.job_id)
            tries = self._store.outbox_failed(row.id, f"{type(err).__name__}: {err}")
            if tries < _MAX_TRIES or isinstance(err, self._away):
                return False
            return self._tell_without_links(row)
        return True

    def _tell_without_links(self, row: OutboxRow) -> bool:
        """Its links or headers will not make sense next time either: the answer alone, else nothing."""
        headers = (row.payload["celery"] or {}).get("headers") or {}
        kept = {"ignore_result": True} if headers.get("ignore_result") is True else {}
        try:
            self._tell_as(row, request_context(row.job_id, TASK_NAME, {"headers": kept}))
        except self._away:
            return False
        except Exception:
            logger.exception("the end of job %s cannot be told at all: given up after %d tries", row.job_id, _MAX_TRIES)
        else:
            logger.error("job %s was told without its links and headers, which make no sense", row.job_id)
        return True

    def _tell_as(self, row: OutboxRow, context: dict[str, Any]) -> None:
        state = JobState(row.payload["state"])
        if state in _REASON_BY_STATE:
            self._app.backend.mark_as_revoked(
                row.job_id,
                _REASON_BY_STATE[state],
                request=Context(context),
                store_result=not context.get("ignore_result"),
            )
        else:
            self._trace(row, context)

    def _trace(self, row: OutboxRow, context: dict[str, Any]) -> None:
        self._trace_error = None
        self._app.answers.put(row.job_id, Answer(response=row.payload["response"], error=_error_of(row)))
        trace_task(self._task, row.job_id, (), {}, context, app=self._app)
        if self._trace_error is not None:
            raise self._trace_error

    def _note_trace_error(self, exception: Exception, **_: Any) -> None:
        self._trace_error = exception


def _meta(
    job_id: str, context: dict[str, Any], status: str, result: Any, date_done: datetime | None = None
) -> dict[str, Any]:
    """As Celery's backends keep it."""
    group, parent_id = context.get("group"), context.get("parent_id")
    return {
        "status": status,
        "result": result,
        "traceback": None,
        "children": [],
        "date_done": date_done and date_done.isoformat(),
        **({"group_id": group} if group else {}),
        **({"parent_id": parent_id} if parent_id else {}),
        "task_id": job_id,
    }


def _here() -> dict[str, Any]:
    """What Celery's state STARTED says."""
    return {"pid": os.getpid(), "hostname": socket.gethostname()}


def _error_of(row: OutboxRow) -> JobError | None:
    error = row.payload["error"]
    if error is not None:
        return JobError(code=error["code"], message=error["message"] or "")
    state = row.payload["state"]
    return None if state == JobState.SUCCEEDED else JobError(code=state, message=f"the job is {state}")
