"""What comes back: RequestOutput, and what it is made of.

Plain data; spelling follows vLLM where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended (OpenAI's words, and ``error``: it could not be computed further)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token, and the most probable ones at its place (which have no ``top`` of their own).

    ``raw``: the bytes the token spells; ``token`` shows them as text, with U+FFFD where they are part of a character.
    ``rank``: 1 for the most probable token. ``special``: left out of a text unless it is asked for.
    """

    token_id: int
    token: str
    logprob: float
    raw: bytes = b""
    special: bool = False
    rank: int | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the ``n`` samples of a request.

    ``format_valid``: whether the text has the form that ``structured_outputs`` asked for, checked on the finished text;
    False where it was cut short. None: no form was asked for.
    ``error``: why it could not be computed further, with finish reason ``error``.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    format_valid: bool | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """A prompt as a vector; ``error``: why there is none."""

    embedding: tuple[float, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """What a request cost. Times are monotonic-clock seconds; durations are derived from them.

    ``cached_tokens``: prompt tokens whose KV was reused rather than computed (first sample's admission).
    ``computed_tokens``: prompt tokens computed for this request, recomputation after preemption included.
    ``num_draft_tokens``: output tokens guessed ahead, ``num_accepted_tokens`` of them rightly.
    """

    arrival_s: float
    first_scheduled_s: float
    first_token_s: float
    finished_s: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    preemptions: int
    seed: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.completion_tokens <= 1:
            return None
        return (self.finished_s - self.first_token_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Everything about one finished request.

    ``prompt_logprobs``: one for each prompt token, None for the first, which nothing precedes.
    ``served_from``: the id of the equal request whose computation this answer is; None: its own.
    ``embedding``: of a prompt that was to be embedded, which has no ``outputs``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    prompt: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    served_from: str | None = None
    embedding: EmbeddingOutput | None = None

    @property
    def error(self) -> str | None:
        """Why a sample, or the embedding, could not be computed; None when all could."""
        if self.embedding is not None:
            return self.embedding.error
        return next((sample.error for sample in self.outputs if sample.error is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """What ``LLM.embed`` gives for one prompt (vLLM's class)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    metrics: RequestMetrics
