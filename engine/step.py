"""StepPlan and StepResult: all that crosses between the scheduler and the runner.

Plain data. A plan is valid for one run; its lists belong to the scheduler and must not be changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvq.engine.cache_manager import BlockCopy
from kvq.engine.request import SamplingParams

if TYPE_CHECKING:
    from kvq.engine.grammar import Matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """Draw one token: sample ``index`` of the stream ``seed`` at ``position`` (the token's place in the sequence).

    The first ``position`` of ``token_ids`` are the sequence so far (for penalties), ``num_prompt`` of them the prompt.
    ``bad_word_ids``: token sequences that must not be completed. ``matcher``: where the sequence is in the form its
    answer must have.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    token_ids: list[int]
    num_prompt: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    matcher: Matcher | None = None

    @property
    def must_go_on(self) -> bool:
        """True while the answer is too short to end."""
        return self.position - self.num_prompt < self.params.min_tokens

    @property
    def alters_logits(self) -> bool:
        """True where penalties, bias or barred tokens change the logits before the draw."""
        p = self.params
        return bool(
            p.logit_bias
            or p.presence_penalty
            or p.frequency_penalty
            or p.repetition_penalty != 1.0
            or p.allowed_token_ids is not None
            or self.bad_word_ids
            or self.must_go_on
        )

    @property
    def is_plain(self) -> bool:
        """True where the token is drawn from the logits as they are, and nothing but the token is wanted.

        Once it is so, it stays so for the sequence's later tokens.
        """
        return self.matcher is None and self.params.logprobs is None and not self.alters_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSpec:
    """Log-probabilities of ``target_ids``, each at the row of the token before it, with the ``num_top`` likeliest.

    ``offset`` is the first such row among the tokens computed for the sequence.
    """

    offset: int
    target_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """Compute ``token_ids`` at positions ``start``.. of the sequence whose blocks are ``block_table``.

    ``samples`` are drawn from the logits after the last token; empty while a prompt is unfinished. The last
    ``num_drafts`` tokens are guesses: there is then a sample for each of them, from the logits before it, and one for
    what follows the last.
    ``score``: prompt tokens whose log-probabilities are wanted. ``lora``: the adapter they are computed with.
    ``num_pooled``: so many of the last tokens' hidden states are to be summed.
    ``awaits_token``: its one token is the one that the step before, still running, draws for it; the id in
    ``token_ids`` stands in for it.
    """

    seq_id: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    samples: tuple[SampleSpec, ...]
    score: ScoreSpec | None = None
    lora: str | None = None
    num_pooled: int = 0
    num_drafts: int = 0
    awaits_token: bool = False

    @property
    def is_foreseeable(self) -> bool:
        """True where all but the id of the token it draws is known before the step has run.

        Not so: several samples (they fork), guesses, penalties, forms, log-probabilities, scores, embeddings.
        """
        if self.num_drafts or self.num_pooled or self.score is not None or len(self.samples) > 1:
            return False
        return all(spec.is_plain for spec in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass. The first ``num_decodes`` sequences compute exactly one token each."""

    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    copies: tuple[BlockCopy, ...]
    swap_outs: tuple[tuple[int, int], ...] = ()  # (block, host block), before anything else
    swap_ins: tuple[tuple[int, int], ...] = ()  # (host block, block), after the swap-outs, before the pass

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(len(s.token_ids) for s in self.sequences)

    @property
    def is_foreseeable(self) -> bool:
        """True where the next step can be planned and started before this one's tokens are known."""
        return all(s.is_foreseeable for s in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A drawn token; log-probabilities where asked for: of itself (and its rank), and of the most probable ones.

    ``failure``: why none could be drawn; the id then means nothing.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Drawn tokens by sequence id, one per SampleSpec, in its order; scored prompt tokens by sequence id.

    ``pooled_by_seq``: sums [D] of hidden states by sequence id.
    """

    tokens_by_seq: dict[int, tuple[SampledToken, ...]]
    scores_by_seq: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    pooled_by_seq: dict[int, NDArray[np.float64]] = field(default_factory=dict)
