"""OutputLengths: how long answers turn out to be.

Owns a running estimate that admission uses to leave room for growth. Knows nothing of blocks.
"""

from __future__ import annotations

from kvq.engine.request import SamplingParams

_SMOOTHING = 0.05
_MARGIN = 1.25
# Before anything has finished, admission is optimistic: too many sequences cost a preemption, too few an idle batch.
_GUESS_WITHOUT_HISTORY = 1


class OutputLengths:
    """Exponentially smoothed length of the sequences that finished."""

    def __init__(self) -> None:
        self._mean_tokens: float | None = None

    def record(self, num_tokens: int) -> None:
        """A sequence ended after ``num_tokens`` output tokens."""
        if self._mean_tokens is None:
            self._mean_tokens = float(num_tokens)
        else:
            self._mean_tokens += _SMOOTHING * (num_tokens - self._mean_tokens)

    def expect(self, params: SamplingParams) -> int:
        """Output tokens to leave room for; ``max_tokens`` is the bound."""
        if self._mean_tokens is None:
            guess = _GUESS_WITHOUT_HISTORY
        else:
            guess = int(self._mean_tokens * _MARGIN) + 1
        return guess if params.max_tokens is None else min(guess, params.max_tokens)
