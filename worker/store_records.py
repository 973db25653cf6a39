"""What the store hands out: records of batches, results, workers, the outbox, and reports of what it did.

Pure data, no SQL. Times are aware UTC datetimes, durations carry their unit in the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kvq.worker.jobs import TERMINAL_STATES, Endpoint, JobError, JobMetrics, JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertReport:
    """``existing`` rows were there before (same job id) and were left as they are."""

    inserted: int
    existing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReport:
    """Seqs whose outcome was written, and seqs refused since the job is no longer this worker's."""

    accepted: frozenset[int]
    fenced: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapReport:
    """What became of the jobs of dead workers, in numbers of jobs. ``workers`` were declared dead just now."""

    requeued: int = 0
    dead: int = 0
    cancelled: int = 0
    expired: int = 0
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A registered worker. ``heartbeat_age_s`` is by the database's clock."""

    worker_id: str
    hostname: str
    pid: int
    pid_started: str | None
    model: str | None
    queue: str
    info: dict[str, Any]
    state: str
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """A notification that is still to be sent.

    ``payload`` holds ``celery`` (as given with the job), ``state``, ``attempt``, ``response`` (the OpenAI
    body or None) and ``error`` ({"code", "message"} or None).
    """

    id: int
    kind: str
    job_id: str
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """How far a batch is. ``finished_at`` is set once no job of it is queued or running.

    ``num_draft_tokens``: output tokens guessed ahead, ``num_accepted_tokens`` of them rightly. ``acceptance`` is that
    share, None where none were guessed.
    """

    batch_id: str
    name: str | None
    total: int
    queued: int
    running: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    dead: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    created_at: datetime
    finished_at: datetime | None
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance: float | None

    @property
    def done(self) -> int:
        """Jobs in a terminal state."""
        return self.succeeded + self.failed + self.cancelled + self.expired + self.dead

    @property
    def finished(self) -> bool:
        """True when nothing is left to do."""
        return self.queued == 0 and self.running == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A job with whatever is known of its result; a queued or running one has none yet."""

    seq: int
    job_id: str
    batch_id: str | None
    custom_id: str
    line_no: int | None
    state: JobState
    endpoint: Endpoint
    model: str | None
    text: str | None
    finish_reason: str | None
    response: dict[str, Any] | None
    error: JobError | None
    metrics: JobMetrics
    attempts: int
    crashes: int
    worker_id: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    model_defaults: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """True in a terminal state."""
        return self.state in TERMINAL_STATES

    @property
    def num_embeddings(self) -> int:
        """How many vectors the answer holds; 0 for text."""
        if self.endpoint is not Endpoint.EMBEDDINGS or self.response is None:
            return 0
        return len(self.response["data"])


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRow:
    """How far the announcement of a batch's end is.

    ``state``: open (the submission has not ended), waiting (for the end of the batch), pending (to be delivered at
    ``next_at``), delivered, failed (given up). ``url`` is without its parameters, which may be secret.
    """

    url: str
    state: str
    event_id: str | None
    tries: int
    next_at: datetime | None
    worker_id: str | None
    last_error: str | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEvent:
    """What is told about the end of a batch: the event's id and its JSON text."""

    id: str
    payload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDelivery:
    """An event that this worker delivers now. ``tries`` counts this one and is the fence."""

    batch_id: str
    url: str
    event_id: str
    payload: str
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A job that was given up since workers were lost while running it."""

    job_id: str
    batch_id: str | None
    custom_id: str
    line_no: int | None
    queue: str
    crashes: int
    error_code: str
    error_message: str
    finished_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was deleted (or would be); ``jobs`` counts those of the batches too."""

    batches: int
    jobs: int
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """One kind of error of a batch: how often, and one example of it."""

    code: str
    num_jobs: int
    example: str
    first_line_no: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Nearest-rank percentiles of one measure over the succeeded jobs of a batch, in milliseconds."""

    num_jobs: int
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """What a batch cost. Percentiles are None where no job has that measure (TPOT of one-token answers).

    ``wall_s`` runs from the first claim to the last result; None until there is one.
    ``computed_tokens`` are prompt tokens that were computed (the reused ones are in ``progress``).
    ``retried_jobs`` were run again after their worker was lost.
    """

    progress: BatchProgress
    queue: Percentiles | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    wall_s: float | None
    computed_tokens: int
    preemptions: int
    retried_jobs: int
    errors: tuple[ErrorCount, ...] = field(default=())
    webhook: WebhookRow | None = None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens served per second of wall time, reused ones included."""
        return self.progress.prompt_tokens / self.wall_s if self.wall_s else None

    @property
    def completion_tokens_per_s(self) -> float | None:
        """Generated tokens per second of wall time."""
        return self.progress.completion_tokens / self.wall_s if self.wall_s else None

    @property
    def reuse_share(self) -> float | None:
        """Share of prompt tokens that were reused rather than computed, in [0, 1]."""
        total = self.progress.prompt_tokens
        return self.progress.cached_tokens / total if total else None
