"""Sequence: one token stream being generated, and the state of the request it belongs to.

Owns what changes while a request runs. Knows nothing of how steps are planned. Each field has one writer:
the scheduler, except ``block_table``, ``num_dropped``, ``node`` and ``num_published``, which the cache manager writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvq.engine.prefix_tree import Node
from kvq.engine.request import FinishReason, PoolingType, Request, TokenLogprob

if TYPE_CHECKING:
    from kvq.engine.grammar import Matcher
    from kvq.engine.step import SampledToken


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in flight: its sequences and what it has cost so far. Times are monotonic seconds.

    ``prompt_scores``: log-probabilities of the prompt's tokens from the second on, as far as they are computed.
    ``pooled_sum``: sum of the hidden states of ``num_pooled`` tokens of a prompt that is embedded.
    ``beginnings``: keys under which the lengths of its answers are remembered.
    ``num_draft_tokens``, ``num_accepted_tokens``: tokens guessed for it, and those that were right.
    """

    request: Request
    seed: int
    sequences: list[Sequence] = field(default_factory=list)
    num_open: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prompt_scores: list[SampledToken] = field(default_factory=list)
    pooled_sum: NDArray[np.float64] | None = None
    num_pooled: int = 0
    beginnings: tuple[int, ...] = ()

    @property
    def needs_all_hidden_states(self) -> bool:
        """True while each token of the prompt must be computed, as what the cache holds of it is not enough."""
        pooling = self.request.pooling
        takes_mean = pooling is not None and pooling.type is PoolingType.MEAN
        return self.wants_scores or (takes_mean and self.num_pooled < len(self.request.prompt_token_ids))

    def add_pooled(self, total: NDArray[np.float64], num_tokens: int) -> None:
        """Book the sum of the hidden states of ``num_tokens`` more tokens."""
        self.pooled_sum = total if self.pooled_sum is None else self.pooled_sum + total
        self.num_pooled += num_tokens

    @property
    def wants_scores(self) -> bool:
        """True while prompt log-probabilities are asked for and not all there: the prompt must then be computed."""
        request = self.request
        return (
            request.params.prompt_logprobs is not None and len(self.prompt_scores) < len(request.prompt_token_ids) - 1
        )

    @property
    def finished(self) -> bool:
        """True when every sample has ended."""
        return self.num_open == 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt plus the tokens generated so far, and the blocks that hold their KV.

    ``num_computed`` tokens have their KV in ``block_table``, or get it from steps that were planned; the others are
    still to be computed. Those steps draw the ``num_pending`` tokens that follow ``token_ids``, and nobody knows yet.
    The first ``num_dropped`` entries of ``block_table`` were given up, since no layer looks back so far; they repeat
    the first entry that is held. ``matcher`` is its place in the request's grammar; ``error`` says why it ended with
    finish reason ``error``.
    """

    seq_id: int
    state: RequestState
    index: int
    token_ids: list[int]
    num_prompt: int
    node: Node
    num_computed: int = 0
    num_pending: int = 0
    block_table: list[int] = field(default_factory=list)
    num_dropped: int = 0
    num_published: int = 0
    admission: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    text: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    matcher: Matcher | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens it has, those that are being drawn among them."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next token can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def held_blocks(self) -> list[int]:
        """The blocks it has a reference to (a copy), without those it dropped."""
        return self.block_table[self.num_dropped :]

    @property
    def num_held_blocks(self) -> int:
        """How many those are."""
        return len(self.block_table) - self.num_dropped

    @property
    def num_output(self) -> int:
        """Tokens generated so far, those that are being drawn not among them."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.token_ids[self.num_prompt :]
