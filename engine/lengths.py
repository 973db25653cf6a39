"""OutputLengths: how long answers turn out to be, by how their prompts begin.

Owns the estimates that admission uses to leave room for growth. Knows nothing of blocks. Prompts of one template begin
alike, so what finished is remembered under the beginnings of its prompt, of several lengths; the longest beginning that
is known well enough tells. Invariant: no more than ``max_beginnings`` are remembered, the longest unused forgotten.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvq.engine.request import SamplingParams

# Tokens of the beginnings that are remembered.
_DEPTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Fewer answers than this say nothing of a template.
_FEWEST_ANSWERS = 2
_SMOOTHING = 0.05
# Before anything has finished: too many sequences cost preemptions, too few an idle batch until the first answers.
_GUESS_WITHOUT_HISTORY = 64
# What is unfinished is expected to get longer by this factor.
_STILL_GROWING = 2


@dataclass(slots=True)
class _Estimate:
    """Mean length of answers and mean distance from it: plain averages at first, then exponentially smoothed."""

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    outlived: int = 0  # tokens that an unfinished answer has already

    def record(self, num_tokens: int) -> None:
        self.count += 1
        weight = max(1 / self.count, _SMOOTHING)
        if self.count > 1:
            self.deviation += weight * (abs(num_tokens - self.mean) - self.deviation)
        self.mean += weight * (num_tokens - self.mean)

    @property
    def tells(self) -> bool:
        """True where it is known well enough to be asked."""
        return self.count >= _FEWEST_ANSWERS or self.outlived > _GUESS_WITHOUT_HISTORY

    @property
    def expected(self) -> int:
        """A length that most answers stay below."""
        if self.count >= _FEWEST_ANSWERS:
            return max(1, math.ceil(self.mean + self.deviation))
        known = math.ceil(self.mean) if self.count else _GUESS_WITHOUT_HISTORY
        return max(1, known, math.ceil(self.outlived * _STILL_GROWING))


class OutputLengths:
    """Expected output lengths. ``max_beginnings`` = 0 keeps one estimate for all prompts."""

    def __init__(self, max_beginnings: int = 16_384) -> None:
        self._max_beginnings = max_beginnings
        self._by_beginning: OrderedDict[int, _Estimate] = OrderedDict()
        self._of_all = _Estimate()

    def beginnings(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Keys of a prompt's beginnings, shortest first; for ``record`` and ``expect``."""
        if not self._max_beginnings:
            return ()
        return tuple(hash(tuple(token_ids[:depth])) for depth in _DEPTHS if depth <= len(token_ids))

    def record(self, beginnings: Sequence[int], num_tokens: int) -> None:
        """A sequence ended after ``num_tokens`` output tokens."""
        self._of_all.record(num_tokens)
        for key in beginnings:
            self._estimate(key).record(num_tokens)

    def outlive(self, beginnings: Sequence[int], num_tokens: int) -> None:
        """A sequence has ``num_tokens`` output tokens and goes on: told when memory ran short, against the guess."""
        for estimate in [self._of_all, *map(self._estimate, beginnings)]:
            estimate.outlived = max(estimate.outlived, num_tokens)

    def expect(self, beginnings: Sequence[int], params: SamplingParams) -> int:
        """Output tokens of one sample to leave room for; ``max_tokens`` is the bound."""
        known = (self._by_beginning.get(key) for key in reversed(beginnings))
        estimate = next((e for e in known if e is not None and e.tells), self._of_all)
        return estimate.expected if params.max_tokens is None else min(estimate.expected, params.max_tokens)

    def _estimate(self, key: int) -> _Estimate:
        estimate = self._by_beginning.setdefault(key, _Estimate())
        self._by_beginning.move_to_end(key)
        if len(self._by_beginning) > self._max_beginnings:
            self._by_beginning.popitem(last=False)
        return estimate
