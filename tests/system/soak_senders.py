"""Those who bring the jobs of a soak: batches into SQL, messages into Redis, a file for ``kvq run``.

Owns which job comes which way, and what was sent. Invariant: what is expected in the end follows from what was sent,
never from what the store says it has. Whoever cannot send tries again, as a client would.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from kvq.worker.errors import StoreUnavailable
from kvq.worker.jobs import NewJob
from kvq.worker.store import Store
from tests.system.calm import body, job
from tests.system.soak_plan import Plan, job_id

_NUM_BATCHES = 20
_MESSAGES_AT_ONCE = 50
# All has been sent when so much of the breaking is done.
_SENT_BY = 0.8
_PAUSE_S = 0.2


class Senders:
    """Sends in step with the breaking, so that there is something to break to the end.

    Args:
        progress: how much of the breaking is done, 0 to 1.
    """

    def __init__(self, plan: Plan, *, progress: Callable[[], float]) -> None:
        self._plan = plan
        self._progress = progress
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self.counts: Counter[str] = Counter()

    def submit(self, store: Store, numbers: Sequence[int]) -> None:
        """Batches into SQL, every other one twice; in the background."""
        size = max(1, -(-len(numbers) // _NUM_BATCHES))
        chunks = [numbers[start : start + size] for start in range(0, len(numbers), size)]

        def insert(place: int, chunk: Sequence[int]) -> None:
            jobs = [job_of(number, self._plan) for number in chunk]
            for _ in range(1 + place % 2):
                self._until_taken(lambda: store.create_batch(batch_id=f"batch-{place}"))
                self._until_taken(lambda: store.insert_jobs(jobs, batch_id=f"batch-{place}"))
            self.counts["jobs by SQL"] += len(chunk)
            self.counts["jobs by SQL, a second time"] += len(chunk) * (place % 2)

        self._begin(chunks, insert)

    def send(self, broker: str, numbers: Sequence[int]) -> None:
        """Messages, every tenth of them twice, the second one some time later; in the background."""
        draw = random.Random(self._plan.seed + 1)
        chunks = [numbers[start : start + _MESSAGES_AT_ONCE] for start in range(0, len(numbers), _MESSAGES_AT_ONCE)]

        def deliver(place: int, chunk: Sequence[int]) -> None:
            self.deliver(broker, chunk)
            again = [draw.choice(numbers[: place * _MESSAGES_AT_ONCE + len(chunk)]) for _ in chunk[::10]]
            self.deliver(broker, again)
            self.counts["jobs by Celery"] += len(chunk)
            self.counts["duplicate messages"] += len(again)

        self._begin(chunks, deliver)

    def deliver(self, broker: str, numbers: Sequence[int]) -> None:
        """Send these now, each until Redis has taken it."""
        with Celery("sender", broker=broker, set_as_current=False) as app:
            for number in numbers:
                kwargs = body(number % self._plan.num_bodies)
                while not self._done.is_set():
                    with suppress(OperationalError, redis.RedisError, OSError):
                        app.send_task("kvq.generate", kwargs=kwargs, queue="kvq", task_id=job_id(number), retry=False)
                        break
                    self._done.wait(_PAUSE_S)

    def join(self, timeout_s: float) -> None:
        """Wait until all is sent.

        Raises:
            BaseException: whatever ended a sender.
        """
        for thread in self._threads:
            thread.join(timeout_s)
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        self._done.set()

    def _begin(self, chunks: Sequence[Sequence[int]], send: Callable[[int, Sequence[int]], None]) -> None:
        def work() -> None:
            try:
                for place, chunk in enumerate(chunks):
                    while self._progress() < _SENT_BY * place / len(chunks) and not self._done.is_set():
                        self._done.wait(_PAUSE_S)
                    send(place, chunk)
            except BaseException as err:
                self._failures.append(err)
                raise

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _until_taken(self, call: Callable[[], object]) -> None:
        while not self._done.is_set():
            try:
                call()
            except StoreUnavailable:
                self._done.wait(_PAUSE_S)
            else:
                return


def job_of(number: int, plan: Plan) -> NewJob:
    return job(job_id(number), number % plan.num_bodies)
