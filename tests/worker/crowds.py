"""A crowd of rows around one that is tried, on the real engine thread, so that a test can say what it did to them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvq.engine.engine import Engine
from kvq.worker.errors import RowError
from kvq.worker.inference import Inference
from kvq.worker.jobs import ClaimedJob, Endpoint, JobError, JobOutcome

# Greedy, drawn, of several samples, in a form, long enough to be there from before the bad row until after it.
NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"prompt": [11, 12, 13], "temperature": 0, "max_tokens": 24, "ignore_eos": True},
    {"prompt": "tell me", "temperature": 1.0, "seed": 7, "max_tokens": 16},
    {"prompt": list(range(20, 70)), "temperature": 0.8, "seed": 3, "n": 2, "top_p": 0.9, "max_tokens": 8},
    {"prompt": "code:", "seed": 5, "guided_regex": "[a-f]{12}", "max_tokens": 16},
)


def claimed(endpoint: Endpoint, body: dict[str, Any], *, job_id: str | None = None) -> ClaimedJob:
    """A job as a worker has it once it has claimed it."""
    return ClaimedJob(
        seq=1,
        job_id=job_id or uuid.uuid4().hex,
        batch_id="b",
        custom_id="c",
        endpoint=endpoint,
        body=body,
        priority=0,
        attempt=1,
        claim_id=1,
        crashes=0,
        queue_ms=0.0,
    )


class Crowd:
    """An engine thread, and rows that share its batch."""

    def __init__(self, engine: Engine, neighbours: tuple[dict[str, Any], ...] = NEIGHBOURS) -> None:
        self.engine = engine
        self._neighbours = neighbours
        self._ended: dict[str, JobOutcome] = {}
        self._changed = threading.Condition()
        self._inference = Inference(lambda: engine, on_outcome=self._end, on_change=self._wake)
        self._inference.start()
        assert self._inference.wait_ready(60)
        self._undisturbed = self._answers(neighbours)

    def stop(self) -> None:
        """End the engine thread."""
        self._inference.stop()

    def try_row(self, endpoint: Endpoint, body: dict[str, Any]) -> JobOutcome | JobError:
        """How a row ends among the neighbours, or why it is refused before it starts.

        Asserts that the neighbours answer as they do without it, and that the engine is whole and goes on.
        """
        ends: JobOutcome | JobError
        half = len(self._neighbours) // 2
        before = [self._submit(Endpoint.COMPLETIONS, row) for row in self._neighbours[:half]]
        try:
            tried = self._submit(endpoint, body)
        except RowError as err:
            tried, ends = None, JobError(code=err.code, message=str(err))
        after = [self._submit(Endpoint.COMPLETIONS, row) for row in self._neighbours[half:]]
        if tried is not None:
            ends = self._wait(tried)
        assert [_answer(self._wait(job_id)) for job_id in before + after] == self._undisturbed
        assert self._inference.fault is None
        assert not self.engine.has_unfinished_requests
        self.engine.check_integrity()
        return ends

    def _answers(self, rows: tuple[dict[str, Any], ...]) -> list[Any]:
        return [_answer(self._wait(job_id)) for job_id in [self._submit(Endpoint.COMPLETIONS, row) for row in rows]]

    def _submit(self, endpoint: Endpoint, body: dict[str, Any]) -> str:
        prepared = self._inference.prepare(endpoint, body)
        job = claimed(endpoint, body)
        self._inference.submit(job, prepared)
        return job.job_id

    def _wait(self, job_id: str) -> JobOutcome:
        with self._changed:
            done = self._changed.wait_for(lambda: job_id in self._ended or self._inference.fault is not None, 120)
            assert self._inference.fault is None, self._inference.fault
            assert done, "the row has not ended in two minutes"
            return self._ended.pop(job_id)

    def _end(self, outcome: JobOutcome) -> None:
        with self._changed:
            self._ended[outcome.job_id] = outcome
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _answer(outcome: JobOutcome) -> Any:
    assert outcome.error is None, outcome.error
    assert outcome.response is not None
    return outcome.response["choices"]


@contextmanager
def crowd_on(engine: Engine, neighbours: tuple[dict[str, Any], ...] = NEIGHBOURS) -> Iterator[Crowd]:
    """A crowd whose thread ends with the block."""
    crowd = Crowd(engine, neighbours)
    try:
        yield crowd
    finally:
        crowd.stop()
