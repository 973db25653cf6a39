"""Requests and what comes back: SamplingParams, Request, RequestOutput.

Owns the per-request vocabulary of the engine. Knows nothing of blocks, batches or models.
Spelling follows vLLM where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvq.engine.errors import InvalidParameter

MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a sequence ended (OpenAI's words)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Args:
        n: number of independent samples; sample ``i`` draws from the stream (seed, i).
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: number of candidates; 0 or None means all.
        min_p: candidates below ``min_p * max probability`` are dropped.
        seed: None draws one, which is then reported with the result.
        max_tokens: most output tokens per sample; None is the room left in max_model_len.
        min_tokens: no end-of-sequence or stop before this many tokens.
        stop: strings that end a sample; the text is cut before them unless include_stop_str_in_output.
        stop_token_ids: token ids that end a sample.
        ignore_eos: go on past the end-of-sequence token.
        presence_penalty, frequency_penalty: OpenAI's additive penalties on generated tokens, in [-2, 2].
        repetition_penalty: multiplicative penalty on prompt and generated tokens (CTRL, section 4.1), > 0.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        logprobs: number of top log-probabilities returned per token; None returns none.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidParameter: naming the parameter that is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check(1 <= self.n <= 128, "n", f"must be between 1 and 128, got {self.n}")
        _check(0 <= self.temperature <= 100, "temperature", f"must be between 0 and 100, got {self.temperature}")
        _check(0 < self.top_p <= 1, "top_p", f"must be in (0, 1], got {self.top_p}")
        _check(self.top_k is None or self.top_k >= 0, "top_k", f"must be 0 (all) or positive, got {self.top_k}")
        _check(0 <= self.min_p <= 1, "min_p", f"must be in [0, 1], got {self.min_p}")
        _check(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"must be in [0, {MAX_SEED}], got {self.seed}")
        _check(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            f"must be at least 1, got {self.max_tokens}",
        )
        _check(self.min_tokens >= 0, "min_tokens", f"must not be negative, got {self.min_tokens}")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})",
        )
        _check(all(self.stop), "stop", "must not contain an empty string")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(-2 <= value <= 2, name, f"must be in [-2, 2], got {value}")
        _check(self.repetition_penalty > 0, "repetition_penalty", f"must be positive, got {self.repetition_penalty}")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= 20,
            "logprobs",
            f"must be between 0 and 20, got {self.logprobs}",
        )
        for token_id, bias in self.logit_bias.items():
            _check(-100 <= bias <= 100, "logit_bias", f"token {token_id}: must be in [-100, 100], got {bias}")

    @property
    def greedy(self) -> bool:
        """True where the most probable token is always taken."""
        return self.temperature == 0


def _check(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise InvalidParameter(param, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be completed ``params.n`` times.

    ``priority``: smaller runs earlier (vLLM's direction). ``arrival_s``: monotonic clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one output token, and the most probable alternatives at its place."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the ``n`` samples of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """What a request cost. Times are monotonic-clock seconds; durations are derived from them.

    ``cached_tokens``: prompt tokens whose KV was reused rather than computed (first sample's admission).
    ``computed_tokens``: prompt tokens computed for this request, recomputation after preemption included.
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
    """Everything about one finished request. ``error`` is set when it failed in the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    prompt: str | None = None
