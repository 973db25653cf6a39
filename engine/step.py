"""StepPlan and StepResult: all that crosses between the scheduler and the runner.

Plain data. A plan is valid for one run; its lists belong to the scheduler and must not be changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.engine.cache_manager import BlockCopy
from kvq.engine.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """Draw one token: sample ``index`` of the stream ``seed`` at ``position`` (the token's place in the sequence).

    ``token_ids`` is the sequence so far (for penalties), ``num_prompt`` of them the prompt.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    token_ids: list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """Compute ``token_ids`` at positions ``start``.. of the sequence whose blocks are ``block_table``.

    ``samples`` are drawn from the logits after the last token; empty while a prompt is unfinished.
    """

    seq_id: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    samples: tuple[SampleSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass. The first ``num_decodes`` sequences compute exactly one token each."""

    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    copies: tuple[BlockCopy, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A drawn token; log-probabilities where asked for: of itself, and of the most probable ones."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Drawn tokens by sequence id, one per SampleSpec, in its order."""

    tokens_by_seq: dict[int, tuple[SampledToken, ...]]
