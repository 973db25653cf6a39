"""Client: how a Python program gives work to kvq and reads the answers.

Owns nothing but a store and, with a broker, the bell. A batch is durable once ``submit`` returns, whether
or not a worker is running. Invariant: nothing of a batch is enqueued while one of its requests is bad,
unless the bad ones are to be recorded as failed (``skip_invalid``).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import redis

from kvq.worker.backlog import Backlog
from kvq.worker.early_rows import EarlyRows
from kvq.worker.files import FileReport, InputFile, name_of, open_input, open_requests
from kvq.worker.jobs import DEDUP_PERIOD_S, DEFAULT_TENANT
from kvq.worker.keys import QueueKeys
from kvq.worker.privacy import Keyring, Privacy, parse_keys
from kvq.worker.store import Store
from kvq.worker.store_records import BatchProgress, BatchSummary, InsertReport, ResultRow
from kvq.worker.submission import Submission, deadline_after, enqueue
from kvq.worker.urls import is_redis, verified

logger = logging.getLogger(__name__)

_NAMESPACE = uuid.UUID("5f0bdc1c-9a6e-4b53-8f0e-6f1d3ce24c11")
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_BELL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A submitted batch. ``report`` says what its input held; ``num_new`` is 0 when it was there already."""

    id: str
    name: str | None
    num_jobs: int
    num_new: int
    report: FileReport


class Client:
    """Submit requests, wait for them, read what came out. Where no batch is named, the last one submitted is meant.

    Args:
        db: where jobs and results are: a SQLite file (created when it is not there) or a ``postgresql://`` URL.
        broker: the ``redis://`` URL under which idle workers listen; without it they look every second.
        queue: the queue whose workers are to run the jobs.
        max_queued: most jobs that may wait in it; a submission is held back while there are more.
        on_full: called with a sentence when that begins.
        dedup_period: seconds for which the dedup key of a job is remembered.
        encryption_key: encrypts and reads prompts and answers, as the setting of that name does.
        encryption_key_file: the same from a file.
        store_prompts: False forgets the prompts submitted here when their jobs have ended.
        store_outputs: False never stores their answers.

    Raises:
        SettingsError: a key is none, or a broker's certificate cannot be verified as its URL says.
        SchemaOutOfDate: when the database needs ``kvq db upgrade``.
    """

    def __init__(
        self,
        db: str = "kvq.db",
        broker: str | None = None,
        queue: str = "kvq",
        *,
        max_queued: int | None = None,
        on_full: Callable[[str], None] = logger.warning,
        dedup_period: float = DEDUP_PERIOD_S,
        encryption_key: str | None = None,
        encryption_key_file: str | None = None,
        store_prompts: bool = True,
        store_outputs: bool = True,
    ) -> None:
        keys = parse_keys(encryption_key, encryption_key_file)
        privacy = Privacy(
            keyring=Keyring(keys) if keys else None,
            forget_prompts=not store_prompts,
            forget_answers=not store_outputs,
        )
        self._store = Store.open(db, create=True, privacy=privacy)
        self._broker = None if broker is None else verified("broker", broker)
        self._queue = queue
        self._dedup_period_s = dedup_period
        self._last_id: str | None = None  # the batch meant where none is named
        self._backlog = None
        if max_queued is not None:
            self._backlog = Backlog(self._store, queue, bound=max_queued, on_full=on_full)

    def submit(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        name: str | None = None,
        priority: int = 0,
        skip_invalid: bool = False,
        idempotency_key: str | None = None,
        webhook: str | None = None,
        tenant: str = DEFAULT_TENANT,
        completion_window: float | None = None,
    ) -> Batch:
        """Enqueue requests: lines of OpenAI's batch format, or the short form (``prompt``, ``messages`` or ``input``).

        A smaller ``priority`` runs earlier. With an ``idempotency_key`` the call may be repeated until it
        succeeds: the same key is the same batch, and its rows are inserted once. ``webhook`` is a URL to which a worker
        POSTs when the batch has ended, see docs/security.md. ``tenant``: whose budget and share the batch counts to.
        ``completion_window``: seconds after which what is not finished expires; what is finished stays.
        A request with a ``dedup_key`` is not run where a job with that key is queued, running or succeeded: it gets
        that job's answer.

        Raises:
            SettingsError: when the tenant's name cannot be one, or the window is none.
            WebhookRefused: when no worker would call that URL.
            FileInvalid: when requests are bad and ``skip_invalid`` is not set; nothing is enqueued then.
        """
        with open_requests(requests) as source:
            return self._submit(
                [source],
                [None],
                name=name,
                skip_invalid=skip_invalid,
                idempotency_key=idempotency_key,
                priority=priority,
                webhook=webhook,
                tenant=tenant,
                deadline=deadline_after(completion_window),
            )[0]

    def submit_files(
        self,
        paths: Sequence[str],
        *,
        name: str | None = None,
        priority: int = 0,
        skip_invalid: bool = False,
        idempotency_key: str | None = None,
        webhook: str | None = None,
        tenant: str = DEFAULT_TENANT,
        completion_window: float | None = None,
    ) -> list[Batch]:
        """The same for files of JSON lines, a batch each; ``-`` is standard input.

        Without a ``name`` a batch has its file's.
        Every file is read to its end before anything of any of them is enqueued.

        Raises:
            FileUnreadable, FileInvalid: see :meth:`submit`.
        """
        with ExitStack() as stack:
            sources = [stack.enter_context(open_input(path)) for path in paths]
            return self._submit(
                sources,
                paths,
                name=name,
                skip_invalid=skip_invalid,
                idempotency_key=idempotency_key,
                priority=priority,
                webhook=webhook,
                tenant=tenant,
                deadline=deadline_after(completion_window),
            )

    def _submit(
        self,
        sources: Sequence[InputFile],
        paths: Sequence[str | None],
        *,
        name: str | None,
        skip_invalid: bool,
        idempotency_key: str | None,
        **of_each: Any,
    ) -> list[Batch]:
        """``of_each``: what the submissions of all of them say."""
        submissions = [
            Submission(
                batch_id=str(
                    uuid.uuid4() if idempotency_key is None else uuid.uuid5(_NAMESPACE, f"{idempotency_key}#{i}")
                ),
                queue=self._queue,
                name=name or (None if path is None else name_of(path)),
                source=path,
                dedup_period_s=self._dedup_period_s,
                **of_each,
            )
            for i, path in enumerate(paths)
        ]
        early = EarlyRows(self._store, backlog=self._backlog, on_open=self._ring)
        reports = early.check(sources, submissions, skip_invalid=skip_invalid)
        batches: list[Batch] = []
        for source, submission, report in zip(sources, submissions, reports, strict=True):
            inserted = self._enqueue(source, submission, repeatable=idempotency_key is not None)
            batches.append(
                Batch(
                    id=submission.batch_id,
                    name=submission.name,
                    num_jobs=report.num_rows,
                    num_new=inserted.inserted + (0 if batches else early.num_inserted),
                    report=report,
                )
            )
        self._last_id = batches[-1].id
        self._ring()
        return batches

    def _enqueue(self, source: InputFile, submission: Submission, *, repeatable: bool) -> InsertReport:
        """Half a batch that nobody can complete must not run: it is cancelled when the submission breaks off."""
        try:
            return enqueue(self._store, source, submission, backlog=self._backlog)
        except BaseException:
            if not repeatable:
                self._store.cancel_batch(submission.batch_id)
            raise

    def status(self, batch: Batch | str | None = None) -> BatchProgress:
        """How far a batch is; a name or the beginning of an id will do.

        Raises:
            UnknownBatch: when no batch, or more than one, goes by that name.
        """
        return self._store.batch_progress(self._id(batch))

    def wait(self, batch: Batch | str | None = None, timeout: float | None = None) -> BatchProgress:
        """Block until nothing of a batch is left to do.

        Raises:
            TimeoutError: after ``timeout`` seconds; the batch goes on.
        """
        batch_id = self._id(batch)
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = _FIRST_WAIT_S
        while not self._store.batch_finished(batch_id):
            left_s = _LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                progress = self._store.batch_progress(batch_id)
                raise TimeoutError(
                    f"batch {batch_id} is not finished after {timeout} s: {progress.done} of {progress.total} jobs are"
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        return self._store.batch_progress(batch_id)

    def summary(self, batch: Batch | str | None = None) -> BatchSummary:
        """What a batch cost: tokens, reuse, latencies, errors."""
        return self._store.summary(self._id(batch))

    def results(self, batch: Batch | str | None = None) -> Iterator[ResultRow]:
        """Every job of a batch in the order of its lines, finished or not; memory stays flat."""
        return self._store.iter_results(self._id(batch))

    def cancel(self, batch: Batch | str) -> int:
        """Cancel what is not finished: waiting jobs at once, running ones soon. Returns their number."""
        return self._store.cancel_batch(self._id(batch))

    def cancel_jobs(self, job_ids: Iterable[str]) -> int:
        """The same for jobs by their ids, of whatever batch; one that is unknown or finished is not counted."""
        return self._store.cancel_jobs(job_ids)

    def cancel_queue(self, queue: str | None = None) -> int:
        """The same for all jobs of a queue, this client's by default."""
        return self._store.cancel_queue(self._queue if queue is None else queue)

    def close(self) -> None:
        """Let go of the database."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _id(self, batch: Batch | str | None) -> str:
        if batch is None:
            if self._last_id is None:
                raise ValueError("no batch was named, and this client has submitted none")
            return self._last_id
        return batch.id if isinstance(batch, Batch) else self._store.find_batch(batch)

    def _ring(self) -> None:
        """Wake idle workers. The jobs are safe already, so an unreachable broker only costs them a second."""
        if self._broker is None or not is_redis(self._broker):
            return
        bell = redis.Redis.from_url(
            self._broker, socket_connect_timeout=_BELL_TIMEOUT_S, socket_timeout=_BELL_TIMEOUT_S
        )
        try:
            bell.publish(QueueKeys(queue=self._queue).doorbell, "")
        except redis.RedisError as err:
            logger.warning("the jobs are enqueued, but no worker could be woken through the broker: %s", err)
        finally:
            bell.close()
