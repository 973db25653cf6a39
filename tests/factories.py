"""Jobs, outcomes and workers for tests, with everything a test does not care about filled in."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kvq.worker.jobs import ClaimedJob, Endpoint, JobError, JobMetrics, JobOutcome, JobState, NewJob
from kvq.worker.store import Store

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_AHEAD = datetime(2100, 1, 1, tzinfo=UTC)


def new_job(number: int = 1, **changes: Any) -> NewJob:
    """The job of line ``number``; its id is unique unless given."""
    values: dict[str, Any] = {
        "job_id": uuid.uuid4().hex,
        "custom_id": f"row-{number}",
        "endpoint": Endpoint.CHAT,
        "body": {"messages": [{"role": "user", "content": f"question {number}"}]},
        "line_no": number,
    }
    return NewJob(**(values | changes))


def new_batch(store: Store, jobs: Sequence[NewJob], *, name: str | None = None) -> str:
    """Insert ``jobs`` as a batch; returns its id."""
    batch_id = uuid.uuid4().hex
    store.create_batch(batch_id=batch_id, name=name, source="jobs.jsonl", metadata={"kind": "test"})
    store.insert_jobs(jobs, batch_id=batch_id)
    return batch_id


def new_worker(store: Store, **changes: Any) -> str:
    """Register a worker; returns its id."""
    worker_id = changes.pop("worker_id", None) or uuid.uuid4().hex
    store.register_worker(worker_id, **({"hostname": "host", "pid": 4242} | changes))
    return str(worker_id)


def claim_all(store: Store, worker_id: str, queue: str = "kvq") -> list[ClaimedJob]:
    """Claim everything that waits."""
    return store.claim(worker_id, [job.seq for job in store.peek(queue, limit=100_000)])


def outcome_of(job: ClaimedJob, **changes: Any) -> JobOutcome:
    """A success, or what ``changes`` make of it; without a text given, the text is the job's custom id."""
    values: dict[str, Any] = {
        "seq": job.seq,
        "job_id": job.job_id,
        "attempt": job.attempt,
        "claim_id": job.claim_id,
        "state": JobState.SUCCEEDED,
        "text": job.custom_id,
        "finish_reason": "stop",
        "response": {"id": job.job_id, "choices": []},
        "model": "tiny",
        "metrics": JobMetrics(prompt_tokens=10, cached_tokens=4, computed_tokens=6, completion_tokens=5, seed=7),
    }
    return JobOutcome(**(values | changes))


def failure_of(job: ClaimedJob, code: str = "engine_error") -> JobOutcome:
    """A failure with ``code``."""
    return outcome_of(
        job,
        state=JobState.FAILED,
        text=None,
        finish_reason=None,
        response=None,
        error=JobError(code=code, message=f"{code} in a test"),
        metrics=JobMetrics(),
    )


def state_of(store: Store, job_id: str) -> JobState:
    """The state of a job that is there."""
    row = store.job(job_id)
    assert row is not None
    return row.state
