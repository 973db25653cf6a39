"""The ends of jobs that need no engine: the stored answer of an equal job, or an error.

Knows OpenAI's response bodies and what of them belongs to the job that asked: its ids, the time, the name of the
model. Invariant: nothing is said to have been computed, and ``served_from`` says by whom it was.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvq.worker.jobs import ClaimedJob, Endpoint, JobError, JobMetrics, JobOutcome, JobState, StoredAnswer

if TYPE_CHECKING:
    from kvq.worker.inference import Prepared


def served_outcome(job: ClaimedJob, *, answer: StoredAnswer, prepared: Prepared) -> JobOutcome:
    """``answer`` as the end of ``job``. All of its prompt was reused; the tokens are those of the answer."""
    own = {} if job.endpoint is Endpoint.EMBEDDINGS else _own_fields(job, answer)
    return JobOutcome(
        seq=job.seq,
        job_id=job.job_id,
        attempt=job.attempt,
        claim_id=job.claim_id,
        state=JobState.SUCCEEDED,
        text=answer.text,
        finish_reason=answer.finish_reason,
        response={**answer.response, "model": prepared.model, **own},
        model=prepared.model,
        model_defaults=answer.model_defaults,
        metrics=JobMetrics(
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seed=answer.seed,
            served_from=answer.job_id,
        ),
    )


def _own_fields(job: ClaimedJob, answer: StoredAnswer) -> dict[str, Any]:
    prefix = "chatcmpl" if job.endpoint is Endpoint.CHAT else "cmpl"
    usage = answer.response.get("usage") or {}
    return {
        "id": f"{prefix}-{job.job_id}",
        "created": int(time.time()),
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": answer.prompt_tokens}},
    }


def failed_outcome(job: ClaimedJob, *, error: JobError) -> JobOutcome:
    """The end of a job that cannot be run."""
    return JobOutcome(
        seq=job.seq,
        job_id=job.job_id,
        attempt=job.attempt,
        claim_id=job.claim_id,
        state=JobState.FAILED,
        error=error,
    )
