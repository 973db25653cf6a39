"""Requests: one prompt and how it is to be completed or embedded.

Owns Request. The options it carries are in sampling_params.py, what comes back in request_output.py; this page gives
all three, since who handles requests needs them together. Knows nothing of blocks, batches or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq.engine.request_output import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from kvq.engine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_SEED,
    MODEL_DEFAULT_FIELDS,
    PoolingParams,
    PoolingType,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from kvq.engine.grammar import Grammar

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_LOGPROBS",
    "MAX_SEED",
    "MODEL_DEFAULT_FIELDS",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FinishReason",
    "LoRARequest",
    "Pooling",
    "PoolingParams",
    "PoolingType",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenLogprob",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """PoolingParams with a model's defaults filled in."""

    type: PoolingType
    normalize: bool
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter to answer with (vLLM's class): its name, and the PEFT folder it is in.

    The name is what tells adapters apart; the number is vLLM's and of no effect here.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be completed ``params.n`` times.

    ``priority``: smaller runs earlier (vLLM's direction). ``arrival_s``: monotonic clock.
    ``bad_word_ids``: the token sequences of ``params.bad_words``. ``grammar``: compiled from
    ``params.structured_outputs``. ``lora``: name of the adapter it is computed with; None: the base model.
    ``pooling``: the prompt is to be embedded, and ``params`` are of no effect.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    lora: str | None = None
    pooling: Pooling | None = None
