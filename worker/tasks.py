"""The Celery task ``kvq.generate``, as Celery's tracer sees it.

Owns the task, its answers by job id, and the exception its senders get. The task computes nothing: by the time
the tracer calls it the answer is in SQL, and it hands that out, so that links, chords and the result backend
work as for any task. Safe to run twice: the same id has the same answer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task

from kvq.worker.jobs import JobError
from kvq.worker.messages import TASK_NAME


class GenerationFailed(Exception):
    """A job did not succeed. The only argument is a sentence, ``code: message``.

    Celery sends exceptions as a class name and JSON arguments; a client without kvq gets a class of this name.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the sender of a job gets: a response body, or an error."""

    response: dict[str, Any] | None = None
    error: JobError | None = None

    def failure(self) -> GenerationFailed | None:
        """The exception to be raised; None for a success."""
        if self.error is None:
            return None
        return GenerationFailed(f"{self.error.code}: {self.error.message}")


class Answers:
    """Answers that are being told, by job id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, Answer] = {}

    def put(self, job_id: str, answer: Answer) -> None:
        """Make an answer available to the task."""
        with self._lock:
            self._by_id[job_id] = answer

    def take(self, job_id: str) -> Answer | None:
        """Hand an answer out, once."""
        with self._lock:
            return self._by_id.pop(job_id, None)


def register_generate(app: Celery, answers: Answers) -> Task:
    """Register ``kvq.generate`` with an application."""

    def generate(self: Task, *_args: Any, **_kwargs: Any) -> dict[str, Any] | None:
        answer = answers.take(self.request.id)
        if answer is None:
            raise GenerationFailed(f"not_run: send {TASK_NAME} to the queue that kvq serves, not to Celery's own")
        failure = answer.failure()
        if failure is not None:
            raise failure
        return answer.response

    # ``throws``: failed jobs are expected, and logged without a traceback.
    return app.task(generate, name=TASK_NAME, bind=True, shared=False, throws=(GenerationFailed,))
