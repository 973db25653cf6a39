"""Speculation: guessing tokens ahead, where the guesses pay.

Owns how many tokens are guessed for which sequence, what guessing has cost and brought, and the counts. Knows nothing
of blocks or tensors; where guesses come from is the proposer's affair. A guess is never more than a guess: the step
that verifies it draws every token as it would have been drawn without, and keeps a guess only where it is the token
drawn (greedy or sampled, since a draw is a function of the logits, the seed and the position). Invariant: what guessing
lost never exceeds what it gained by more than ``_LOSS_SHARE`` of the decoding time plus a few steps at the start.
Source: speculative decoding, Leviathan et al. (ICML 2023); how many tokens pay, SmartSpec (arXiv 2406.14066, section 4)
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvq.engine.sequence import Sequence
from kvq.engine.step import StepPlan

logger = logging.getLogger(__name__)

_LOSS_SHARE = 0.004  # of the time spent decoding, that guesses may lose
_MARGIN = 1.1  # a guess must bring this many times what it costs
_MOST_CERTAIN = 0.98
_RECENT_STEPS = 16  # kept of each size of step


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How many tokens can be guessed for a sequence; guesses of one ``kind`` are about equally often right."""

    num_tokens: int
    kind: int


class Proposer(Protocol):
    """Where guesses come from."""

    def reach(self, seq: Sequence, limit: int) -> Reach | None:
        """How many tokens, up to ``limit``, it would guess after those of ``seq``; None: none."""
        ...

    def propose(self, lengths: Mapping[Sequence, int]) -> dict[int, list[int]]:
        """Guess so many tokens for each sequence, by sequence id; it may give fewer."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence ended."""
        ...


class StepTimes:
    """How long a step takes that only decodes, by the number of tokens it computes.

    Sizes are kept in quarter octaves. Between those that were seen, and beyond them, seconds / (tokens + 8) is taken to
    change little: a step of a few tokens is bound by reading the weights, one of many by arithmetic. What other
    processes take from the machine only ever adds time, so the lower quartile of the recent ones counts.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._ratios: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step computed ``num_tokens`` in ``seconds``."""
        size = _size(num_tokens)
        recent = self._recent.setdefault(size, deque(maxlen=_RECENT_STEPS))
        recent.append(seconds / (num_tokens + 8))
        self._ratios[size] = sorted(recent)[len(recent) // 4]

    def knows(self, num_tokens: int) -> bool:
        """True where a step of about this size was seen."""
        return _size(num_tokens) in self._ratios

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a step; some step must have been recorded."""
        size = _size(num_tokens)
        ratio = self._ratios.get(size)
        if ratio is None:
            below = max((s for s in self._ratios if s < size), default=None)
            above = min((s for s in self._ratios if s > size), default=None)
            if below is None or above is None:
                known = above if below is None else below
                assert known is not None
                ratio = self._ratios[known]
            else:
                part = (size - below) / (above - below)
                ratio = (1 - part) * self._ratios[below] + part * self._ratios[above]
        return ratio * (num_tokens + 8)


def _size(num_tokens: int) -> int:
    return round(4 * math.log2(num_tokens))


class Rate:
    """How often something is so: recent trials count, the old ones fade."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._num_right = 0.0
        self._num_tried = 0.0

    def record(self, num_right: int, num_tried: int) -> None:
        """Of ``num_tried`` trials ``num_right`` were so."""
        self._num_right = self._memory * self._num_right + num_right
        self._num_tried = self._memory * self._num_tried + num_tried

    def share(self, *, prior: float, weight: float) -> float:
        """The share that is so, ``prior`` counting as ``weight`` trials."""
        return (self._num_right + prior * weight) / (self._num_tried + weight)


class Payoff:
    """How many tokens to guess for which sequence, from what steps cost and how often guesses were right.

    A step of B sequences takes t(B) for B tokens, so a token is worth t(B) / B. Guessing D tokens makes it a step of
    t(B + D), and gives one token more for each guess that is right. Guesses are taken from the surest on while they add
    more than they cost. Now and then some are made that are not expected to pay, to see.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._rate_by_seq: dict[int, Rate] = {}
        self._rate_by_kind: dict[int, Rate] = {}
        self._credit_s: float | None = None  # what guesses may still lose; None until the first step
        self._round_s = 0.0
        self._next_explored = 0

    def allot(self, reaches: Mapping[int, Reach], num_decodes: int) -> dict[int, int]:
        """Tokens to guess, by sequence id, in a step that decodes ``num_decodes`` sequences."""
        if self._credit_s is None or not self.times.knows(num_decodes):
            return {}  # first see a step of this size without guesses
        if self._credit_s <= 0:
            return {}
        plain_s = self.times.seconds(num_decodes)
        value_s = plain_s / num_decodes
        guesses = sorted(
            (-(self._certainty(seq_id, reach) ** place), place, seq_id)
            for seq_id, reach in reaches.items()
            for place in range(1, reach.num_tokens + 1)
        )
        best_s, best, num_right, depth = 0.0, 0, 0.0, 0
        for count, (negative, place, _) in enumerate(guesses, start=1):
            if -negative * value_s < _MARGIN * 0.01 * value_s or count > best + 32:
                break
            num_right -= negative
            depth = max(depth, place)
            cost_s = self.times.seconds(num_decodes + count) - plain_s + depth * self._round_s
            gain_s = num_right * value_s - _MARGIN * max(cost_s, 0.0)
            if gain_s > best_s:
                best_s, best = gain_s, count
        if best:
            return _lengths(guesses[:best])
        return self._explore(reaches, num_decodes, plain_s)

    def may_pay(self, num_decodes: int) -> bool:
        """False where not even guesses that are always right would pay, and none are to be tried."""
        if self._credit_s is None or self._credit_s <= 0 or not self.times.knows(num_decodes):
            return False
        if self._is_full(num_decodes):
            return True
        plain_s = self.times.seconds(num_decodes)
        cost_s = min(self.times.seconds(num_decodes + d) - plain_s for d in (1, num_decodes)) + self._round_s
        return _MARGIN * cost_s < plain_s / num_decodes

    def record_step(self, *, num_decodes: int, num_guesses: int, seconds: float, guessing_s: float, depth: int) -> None:
        """A step that only decoded took ``seconds``, the guesses before it ``guessing_s`` in ``depth`` rounds."""
        self.times.record(num_decodes + num_guesses, seconds)
        limit_s = self._credit_limit(num_decodes) if self.times.knows(num_decodes) else 0.0
        credit_s = limit_s if self._credit_s is None else self._credit_s
        if num_guesses:
            self._round_s += 0.25 * (guessing_s / depth - self._round_s)
            credit_s -= max(0.0, self.times.seconds(num_decodes + num_guesses) - self.times.seconds(num_decodes))
        self._credit_s = min(limit_s, credit_s - guessing_s + _LOSS_SHARE * seconds)

    def record_guess(self, seq_id: int, kind: int, *, num_right: int, num_guesses: int, num_decodes: int) -> None:
        """Of a sequence's guesses the first ``num_right`` were right: those tokens came for nothing."""
        tried = min(num_right + 1, num_guesses)
        self._rate_by_seq.setdefault(seq_id, Rate(0.8)).record(num_right, tried)
        self._rate_by_kind.setdefault(kind, Rate(0.98)).record(num_right, tried)
        if self._credit_s is not None:
            limit_s = self._credit_limit(num_decodes)
            self._credit_s = min(limit_s, self._credit_s + num_right * self.times.seconds(num_decodes) / num_decodes)

    def forget(self, seq_id: int) -> None:
        """The sequence ended."""
        self._rate_by_seq.pop(seq_id, None)

    def _certainty(self, seq_id: int, reach: Reach) -> float:
        """How likely the next guess for a sequence is right."""
        of_kind = self._rate_by_kind.get(reach.kind)
        overall = 0.5 if of_kind is None else of_kind.share(prior=0.5, weight=2)
        rate = self._rate_by_seq.get(seq_id)
        return min(_MOST_CERTAIN, overall if rate is None else rate.share(prior=overall, weight=2))

    def _credit_limit(self, num_decodes: int) -> float:
        """Two steps of a small batch, less of a step the bigger the batch: what trying may cost at once."""
        return self.times.seconds(num_decodes) * min(2.0, 16 / num_decodes)

    def _is_full(self, num_decodes: int) -> bool:
        return self._credit_s is not None and self._credit_s >= self._credit_limit(num_decodes)

    def _explore(self, reaches: Mapping[int, Reach], num_decodes: int, plain_s: float) -> dict[int, int]:
        """A few guesses that are not expected to pay, when those before have been paid for.

        One sequence after the other gets two; a size of step never seen is tried with a guess for each.
        """
        if not reaches or not self._is_full(num_decodes):
            return {}
        assert self._credit_s is not None
        seq_ids = sorted(reaches)
        if not self.times.knows(num_decodes + len(seq_ids)):
            lengths = dict.fromkeys(seq_ids, 1)
        else:
            seq_id = next((s for s in seq_ids if s > self._next_explored), seq_ids[0])
            self._next_explored = seq_id
            lengths = {seq_id: min(2, reaches[seq_id].num_tokens)}
        cost_s = self.times.seconds(num_decodes + sum(lengths.values())) - plain_s
        return lengths if cost_s + 2 * self._round_s <= self._credit_s else {}


def _lengths(guesses: list[tuple[float, int, int]]) -> dict[int, int]:
    """The furthest place guessed for each sequence."""
    lengths: dict[int, int] = {}
    for _, place, seq_id in guesses:
        lengths[seq_id] = max(place, lengths.get(seq_id, 0))
    return lengths


class Speculator:
    """Guesses for the decodes of a step, and books what became of them.

    Args:
        proposer: where guesses come from.
        num_tokens: most tokens guessed for a sequence in one step.
        max_model_len: most tokens a sequence can have.
        clock: monotonic seconds.
        payoff: decides how many are worth their cost; None: as many as there can be, always.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        num_tokens: int,
        max_model_len: int,
        clock: Callable[[], float],
        payoff: Payoff | None,
    ) -> None:
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._max_model_len = max_model_len
        self._clock = clock
        self._payoff = payoff
        self._kinds: dict[int, int] = {}
        self._guessing_s = 0.0
        self._num_decodes = 0

    def draft(self, decodes: list[Sequence], *, num_tokens: int) -> dict[int, list[int]]:
        """Guesses by sequence id for a step that decodes ``decodes``, at most ``num_tokens`` in all."""
        self._guessing_s, self._num_decodes = 0.0, len(decodes)
        self._kinds.clear()
        if num_tokens <= 0 or (self._payoff is not None and not self._payoff.may_pay(len(decodes))):
            return {}
        start = self._clock()
        seqs, reaches = {}, {}
        for seq in decodes:
            most = self._most_tokens(seq)
            if most > 0 and (reach := self._proposer.reach(seq, most)) is not None:
                seqs[seq.seq_id], reaches[seq.seq_id] = seq, reach
        if self._payoff is None:
            lengths = {seq_id: reach.num_tokens for seq_id, reach in reaches.items()}
        else:
            lengths = self._payoff.allot(reaches, len(decodes))
        lengths = _bounded(lengths, num_tokens)
        guesses = self._proposer.propose({seqs[seq_id]: length for seq_id, length in lengths.items()})
        guesses = {seq_id: tokens for seq_id, tokens in guesses.items() if tokens}
        self._kinds = {seq_id: reaches[seq_id].kind for seq_id in guesses}
        self._guessing_s = self._clock() - start
        return guesses

    def _most_tokens(self, seq: Sequence) -> int:
        """Tokens that may be guessed after the next one; none of those that end it, and none before its first.

        An answer that must have a form, or that an adapter computes, gets none: masks would be needed for each guess,
        and adapters sum in another order for other numbers of rows.
        """
        request = seq.state.request
        if seq.num_output == 0 or seq.matcher is not None or request.lora is not None:
            return 0
        left = self._max_model_len - len(seq.token_ids)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - seq.num_output)
        return min(self._num_tokens, left - 1)

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took."""
        if self._payoff is None or any(len(s.token_ids) != 1 + s.num_drafts for s in plan.sequences):
            return
        self._payoff.record_step(
            num_decodes=len(plan.sequences),
            num_guesses=sum(s.num_drafts for s in plan.sequences),
            seconds=seconds,
            guessing_s=self._guessing_s,
            depth=max(s.num_drafts for s in plan.sequences),
        )

    def record_guess(self, seq: Sequence, *, num_guesses: int, num_right: int) -> None:
        """A step verified ``num_guesses`` guesses for ``seq``; the first ``num_right`` were the tokens drawn."""
        self.num_draft_tokens += num_guesses
        self.num_accepted_tokens += num_right
        seq.state.num_draft_tokens += num_guesses
        seq.state.num_accepted_tokens += num_right
        if self._payoff is not None:
            self._payoff.record_guess(
                seq.seq_id,
                self._kinds[seq.seq_id],
                num_right=num_right,
                num_guesses=num_guesses,
                num_decodes=self._num_decodes,
            )

    def forget(self, seq_id: int) -> None:
        """The sequence ended."""
        self._proposer.forget(seq_id)
        if self._payoff is not None:
            self._payoff.forget(seq_id)


def _bounded(lengths: dict[int, int], num_tokens: int) -> dict[int, int]:
    """The first of ``lengths`` that come to ``num_tokens`` together."""
    kept: dict[int, int] = {}
    for seq_id, length in lengths.items():
        length = min(length, num_tokens)
        if length > 0:
            kept[seq_id] = length
            num_tokens -= length
    return kept
