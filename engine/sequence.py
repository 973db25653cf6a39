"""Sequence: one token stream being generated, and the state of the request it belongs to.

Owns what changes while a request runs. Knows nothing of how steps are planned. Each field has one writer:
the scheduler, except ``block_table``, ``node`` and ``num_published``, which the cache manager writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvq.engine.prefix_tree import Node
from kvq.engine.request import FinishReason, Request, TokenLogprob

if TYPE_CHECKING:
    from kvq.engine.grammar import Matcher
    from kvq.engine.step import SampledToken


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in flight: its sequences and what it has cost so far. Times are monotonic seconds.

    ``prompt_scores``: log-probabilities of the prompt's tokens from the second on, as far as they are computed.
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
    prompt_scores: list[SampledToken] = field(default_factory=list)

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

    ``num_computed`` tokens have their KV in ``block_table``; the others are still to be computed. ``matcher`` is its
    place in the request's grammar; ``error`` says why it ended with finish reason ``error``.
    """

    seq_id: int
    state: RequestState
    index: int
    token_ids: list[int]
    num_prompt: int
    node: Node
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    num_published: int = 0
    admission: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    text: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    matcher: Matcher | None = None

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.token_ids[self.num_prompt :]
