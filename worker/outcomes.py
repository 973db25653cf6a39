"""Outcomes: how a job that was in the engine ended, as it is stored.

Owns the translation of engine outputs into JobOutcome: response body, text column and metrics. Knows no thread and no
SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.engine.request import RequestOutput
from kvq.worker.embeddings import embedding_response
from kvq.worker.jobs import ClaimedJob, JobError, JobMetrics, JobOutcome, JobState
from kvq.worker.preparation import Prepared
from kvq.worker.responses import response_body


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A job inside the engine. ``submitted_s``: monotonic."""

    job: ClaimedJob
    prepared: Prepared
    submitted_s: float


def unrun_outcome(entry: Entry, state: JobState, error: JobError | None) -> JobOutcome:
    """The end of a job that has nothing to show."""
    job, prepared = entry.job, entry.prepared
    return JobOutcome(
        seq=job.seq,
        job_id=job.job_id,
        attempt=job.attempt,
        claim_id=job.claim_id,
        state=state,
        error=error,
        model=prepared.model,
        metrics=JobMetrics(prompt_tokens=len(prepared.token_ids), queue_ms=job.queue_ms),
    )


def ended_outcome(entry: Entry, outputs: Sequence[RequestOutput], *, created: float) -> JobOutcome:
    """The end of a job whose requests all ended by themselves. ``created``: seconds since the epoch."""
    failure = next((output.error for output in outputs if output.error is not None), None)
    error = None if failure is None else JobError(code="generation_failed", message=failure)
    state = JobState.SUCCEEDED if error is None else JobState.FAILED
    if entry.prepared.embedding is None:
        return generation_outcome(entry, outputs[0], state, error, created=created)
    return _embedding_outcome(entry, outputs) if error is None else unrun_outcome(entry, state, error)


def generation_outcome(
    entry: Entry, output: RequestOutput | None, state: JobState, error: JobError | None, *, created: float
) -> JobOutcome:
    """The end of a job with the answer it has so far; None: it never ran."""
    job, prepared = entry.job, entry.prepared
    if output is None or not output.outputs or output.metrics.completion_tokens == 0:
        return unrun_outcome(entry, state, error)
    first, echo = output.outputs[0], prepared.echo
    text = first.text
    if echo is not None:
        text = echo.text if echo.only else echo.text + text
    return JobOutcome(
        seq=job.seq,
        job_id=job.job_id,
        attempt=job.attempt,
        claim_id=job.claim_id,
        state=state,
        text=text,
        finish_reason=first.finish_reason.value,
        response=response_body(
            endpoint=job.endpoint,
            job_id=job.job_id,
            model=prepared.model,
            created=created,
            output=output,
            echo=echo,
            tool_use=prepared.tool_use,
        ),
        error=error,
        model=prepared.model,
        model_defaults=dict(prepared.model_defaults) or None,
        metrics=_metrics(entry, output),
        request_key=prepared.request_key if state is JobState.SUCCEEDED and output.served_from is None else None,
    )


def _embedding_outcome(entry: Entry, outputs: Sequence[RequestOutput]) -> JobOutcome:
    """No text and no tokens per second: the vectors are in the response."""
    job, prepared = entry.job, entry.prepared
    assert prepared.embedding is not None
    return JobOutcome(
        seq=job.seq,
        job_id=job.job_id,
        attempt=job.attempt,
        claim_id=job.claim_id,
        state=JobState.SUCCEEDED,
        response=embedding_response(
            model=prepared.model, outputs=outputs, encoding_format=prepared.embedding.encoding_format
        ),
        model=prepared.model,
        metrics=_embedding_metrics(entry, outputs),
    )


def _metrics(entry: Entry, output: RequestOutput) -> JobMetrics:
    """Queue time ends when the engine first schedules the job; end-to-end time begins when it was enqueued."""
    cost = output.metrics
    waited_s = max(0.0, cost.first_scheduled_s - entry.submitted_s)
    tpot_s = cost.tpot_s
    return JobMetrics(
        prompt_tokens=cost.prompt_tokens,
        cached_tokens=cost.cached_tokens,
        computed_tokens=cost.computed_tokens,
        completion_tokens=cost.completion_tokens,
        queue_ms=entry.job.queue_ms + waited_s * 1e3,
        ttft_ms=cost.ttft_s * 1e3,
        tpot_ms=None if tpot_s is None else tpot_s * 1e3,
        e2e_ms=entry.job.queue_ms + max(0.0, cost.finished_s - entry.submitted_s) * 1e3,
        prefill_ms=(cost.first_token_s - cost.first_scheduled_s) * 1e3,
        decode_ms=(cost.finished_s - cost.first_token_s) * 1e3,
        preemptions=cost.preemptions,
        seed=cost.seed,
        served_from=output.served_from,
        num_draft_tokens=cost.num_draft_tokens,
        num_accepted_tokens=cost.num_accepted_tokens,
    )


def _embedding_metrics(entry: Entry, outputs: Sequence[RequestOutput]) -> JobMetrics:
    """Sums over the inputs; times from the first one scheduled to the last vector, which stands for the first token."""
    costs = [output.metrics for output in outputs]
    scheduled_s, finished_s = min(c.first_scheduled_s for c in costs), max(c.first_token_s for c in costs)
    return JobMetrics(
        prompt_tokens=sum(c.prompt_tokens for c in costs),
        cached_tokens=sum(c.cached_tokens for c in costs),
        computed_tokens=sum(c.computed_tokens for c in costs),
        queue_ms=entry.job.queue_ms + max(0.0, scheduled_s - entry.submitted_s) * 1e3,
        ttft_ms=(finished_s - min(c.arrival_s for c in costs)) * 1e3,
        e2e_ms=entry.job.queue_ms + max(0.0, finished_s - entry.submitted_s) * 1e3,
        prefill_ms=(finished_s - scheduled_s) * 1e3,
        preemptions=sum(c.preemptions for c in costs),
        served_from=outputs[0].served_from if len(outputs) == 1 else None,
    )
