"""Job records, their states and the legal moves between states.

Pure data: no SQL, no queue. The string values are the ones stored in the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

DEFAULT_TENANT = "default"
# How long a dedup key is remembered, from the moment its job was submitted.
DEDUP_PERIOD_S = 86_400.0


class JobState(StrEnum):
    """Where a job is in its life. Every job ends in exactly one terminal state."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"


TERMINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.DEAD})

LEGAL_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED}),
    JobState.RUNNING: TERMINAL_STATES | {JobState.QUEUED},
    # `kvq retry` and `kvq dead retry` put a job that did not succeed back.
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.EXPIRED: frozenset({JobState.QUEUED}),
    JobState.DEAD: frozenset({JobState.QUEUED}),
    JobState.SUCCEEDED: frozenset(),
}


class Endpoint(StrEnum):
    """The OpenAI endpoints a job may name in ``url``."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Endpoint:
        """The endpoint of a body that is given without one, by the field that holds its prompt."""
        if "prompt" in body:
            return cls.COMPLETIONS
        return cls.EMBEDDINGS if "input" in body else cls.CHAT


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """Why a job failed: a stable machine-readable code and a sentence that says what to do."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to be inserted. With ``error`` it is inserted as failed, with that error as its result.

    ``job_id`` is unique over all time: inserting it a second time changes nothing.
    ``priority``: smaller runs earlier. ``celery`` holds what is needed to answer the Celery sender.
    ``tenant``: whose budget and share it counts to. ``dedup_key``: where an unfinished or succeeded job of the queue
    has the same, this one is not run but gets its answer.
    """

    job_id: str
    custom_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    line_no: int | None = None
    queue: str = "kvq"
    priority: int = 0
    model: str | None = None
    not_before: datetime | None = None
    deadline: datetime | None = None
    celery: dict[str, Any] | None = None
    error: JobError | None = None
    tenant: str = DEFAULT_TENANT
    dedup_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A queued row as the planner sees it. Reading it reserves nothing.

    ``flow``: what it shares the queue with others as. ``same_as``: the seq of the job whose answer it is to get.
    """

    seq: int
    job_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    priority: int
    crashes: int
    created_at: datetime
    flow: int = 0
    tenant: str = DEFAULT_TENANT
    same_as: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Waiting jobs that have not crashed, of one queue, priority and flow: those of a tenant's batch ('' : of none)."""

    queue: str
    priority: int
    flow: int
    tenant: str
    batch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """The stored end of a job that succeeded, to be given to an equal one."""

    job_id: str
    endpoint: Endpoint
    text: str
    finish_reason: str | None
    response: dict[str, Any]
    model: str | None
    model_defaults: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A row this worker owns until it is finished, released or reaped.

    ``claim_id`` is the fence: no two claims of any job have the same. Attempts are counted for people; a claim that
    was given back is not, so the next one has the same number. ``private``: its prompt is shown to nobody.
    """

    seq: int
    job_id: str
    batch_id: str | None
    custom_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    priority: int
    attempt: int
    claim_id: int
    crashes: int
    queue_ms: float
    celery: dict[str, Any] | None = None
    deadline: datetime | None = None
    private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """What a job cost; every field is a column of ``results``.

    ``served_from``: the job whose computation this answer is, where an equal one was running; None: its own.
    ``num_draft_tokens``: output tokens guessed ahead, ``num_accepted_tokens`` of them rightly.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    preemptions: int = 0
    seed: int | None = None
    served_from: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The end of a job: written once, in one transaction with the change of state.

    ``response`` is the OpenAI response body (of the job's endpoint), None where there is none. ``text`` is the first
    choice's text, kept as a column because people query it; an embedding has none. ``model_defaults``: the sampling
    options that were taken from the model's generation_config. ``request_key``: by which equal requests find the
    answer later; None where none may.
    """

    seq: int
    job_id: str
    attempt: int
    claim_id: int
    state: JobState
    text: str | None = None
    finish_reason: str | None = None
    response: dict[str, Any] | None = None
    error: JobError | None = None
    model: str | None = None
    model_defaults: dict[str, Any] | None = None
    metrics: JobMetrics = field(default_factory=JobMetrics)
    request_key: str | None = None
