"""Records to column values and back: what every database can hold.

Knows the columns, not the statements. Invariant: no value that a job brings can make a statement fail for its
neighbours: NUL and lone surrogates, which PostgreSQL refuses, become U+FFFD in text columns (JSON columns keep
them as escapes), and NaN or infinity become null.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import RowMapping

from kvq.worker.jobs import ClaimedJob, Endpoint, JobError, JobMetrics, JobOutcome, JobState, NewJob
from kvq.worker.store_records import ResultRow

if TYPE_CHECKING:
    from kvq.worker.privacy import Privacy

MAX_BIGINT = 2**63 - 1

# Column -> PostgreSQL type of one element.
JOB_COLUMNS = {
    "job_id": "text",
    "custom_id": "text",
    "line_no": "integer",
    "queue": "text",
    "endpoint": "text",
    "model": "text",
    "priority": "integer",
    "state": "text",
    "not_before": "timestamptz",
    "deadline": "timestamptz",
    "body": "json",
    "celery": "json",
    "error_code": "text",
    "error_message": "text",
    "flow": "bigint",
    "dedup_key": "text",
}

OUTCOME_COLUMNS = {
    "seq": "bigint",
    "attempt": "integer",
    "claim_id": "bigint",
    "state": "text",
    "text": "text",
    "finish_reason": "text",
    "response": "json",
    "error_code": "text",
    "error_message": "text",
    "model": "text",
    "prompt_tokens": "bigint",
    "cached_tokens": "bigint",
    "computed_tokens": "bigint",
    "completion_tokens": "bigint",
    "queue_ms": "double precision",
    "ttft_ms": "double precision",
    "tpot_ms": "double precision",
    "e2e_ms": "double precision",
    "prefill_ms": "double precision",
    "decode_ms": "double precision",
    "preemptions": "integer",
    "seed": "bigint",
    "served_from": "text",
    "model_defaults": "json",
    "request_key": "text",
    "num_draft_tokens": "integer",
    "num_accepted_tokens": "integer",
}

METRIC_COLUMNS = tuple(JobMetrics.__dataclass_fields__)


def job_values(job: NewJob, flow: int) -> dict[str, Any]:
    """The values of JOB_COLUMNS; times are still datetimes."""
    return {
        "job_id": clean_text(job.job_id),
        "custom_id": clean_text(job.custom_id),
        "line_no": job.line_no,
        "queue": clean_text(job.queue),
        "endpoint": job.endpoint.value,
        "model": clean_text(job.model),
        "priority": job.priority,
        "state": (JobState.QUEUED if job.error is None else JobState.FAILED).value,
        "not_before": job.not_before,
        "deadline": job.deadline,
        "body": json_text(job.body),
        "celery": None if job.celery is None else json_text(job.celery),
        "error_code": None if job.error is None else clean_text(job.error.code),
        "error_message": None if job.error is None else clean_text(job.error.message),
        "flow": flow,
        "dedup_key": clean_text(job.dedup_key),
    }


def outcome_values(outcome: JobOutcome) -> dict[str, Any]:
    """The values of OUTCOME_COLUMNS."""
    metrics = outcome.metrics
    error = outcome.error
    if error is None and outcome.state is not JobState.SUCCEEDED:
        error = JobError(code=outcome.state.value, message=f"the worker ended it as {outcome.state.value}")
    return {
        "seq": outcome.seq,
        "attempt": outcome.attempt,
        "claim_id": outcome.claim_id,
        "state": outcome.state.value,
        "text": clean_text(outcome.text),
        "finish_reason": clean_text(outcome.finish_reason),
        "response": None if outcome.response is None else json_text(outcome.response),
        "error_code": None if error is None else clean_text(error.code),
        "error_message": None if error is None else clean_text(error.message),
        "model": clean_text(outcome.model),
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "computed_tokens": metrics.computed_tokens,
        "completion_tokens": metrics.completion_tokens,
        "queue_ms": _finite(metrics.queue_ms),
        "ttft_ms": _finite(metrics.ttft_ms),
        "tpot_ms": _finite(metrics.tpot_ms),
        "e2e_ms": _finite(metrics.e2e_ms),
        "prefill_ms": _finite(metrics.prefill_ms),
        "decode_ms": _finite(metrics.decode_ms),
        "preemptions": metrics.preemptions,
        "seed": metrics.seed,
        "served_from": clean_text(metrics.served_from),
        "model_defaults": None if outcome.model_defaults is None else json_text(outcome.model_defaults),
        "request_key": outcome.request_key,
        "num_draft_tokens": metrics.num_draft_tokens or None,
        "num_accepted_tokens": metrics.num_accepted_tokens if metrics.num_draft_tokens else None,
    }


def claimed_job(row: RowMapping, privacy: Privacy) -> ClaimedJob:
    """A ClaimedJob from what a claim returned. Raises ValueUnreadable."""
    job_id = row["job_id"]
    return ClaimedJob(
        **{
            **row,
            "endpoint": Endpoint(row["endpoint"]),
            "body": privacy.open_body(row["body"], job_id),
            "celery": privacy.open_json(row["celery"], job_id, "celery"),
            "private": privacy.hides_prompts,
        }
    )


def result_row(row: RowMapping, privacy: Privacy) -> ResultRow:
    """A ResultRow from a row of ``jobs LEFT JOIN results``, its times and JSON decoded. Raises ValueUnreadable."""
    return ResultRow(
        seq=row["seq"],
        job_id=row["job_id"],
        batch_id=row["batch_id"],
        custom_id=row["custom_id"],
        line_no=row["line_no"],
        state=JobState(row["state"]),
        endpoint=Endpoint(row["endpoint"]),
        model=row["model"],
        text=privacy.open_text(row["text"], row["response"], row["job_id"]),
        finish_reason=row["finish_reason"],
        response=privacy.open_json(row["response"], row["job_id"], "response"),
        error=None
        if row["error_code"] is None
        else JobError(code=row["error_code"], message=row["error_message"] or ""),
        # The counters are null where there is no result yet; the record's own defaults then stand.
        metrics=JobMetrics(**{name: row[name] for name in METRIC_COLUMNS if row[name] is not None}),
        attempts=row["attempts"],
        crashes=row["crashes"],
        worker_id=row["worker_id"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        model_defaults=row["model_defaults"],
    )


def json_text(value: Any) -> str:
    """JSON that both databases accept: readable where it can be, escaped where it must be."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json_text(_without_nan(value))
    return text if is_encodable(text) else json.dumps(value, separators=(",", ":"))


def clean_text(value: str | None) -> str | None:
    """Text that both databases accept."""
    if value is None:
        return None
    if "\x00" in value:
        value = value.replace("\x00", "\ufffd")
    if not is_encodable(value):
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def is_encodable(text: str) -> bool:
    """False for text with a lone surrogate, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
