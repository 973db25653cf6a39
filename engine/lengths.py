"""OutputLengths: how long answers turn out to be.

Owns a running estimate that admission uses to leave room for growth. Knows nothing of blocks.
"""

from __future__ import annotations

from kvq.engine.request import SamplingParams

_SMOOTHING = 0.05
_UNBOUNDED_GUESS = 256


class OutputLengths:
    """Exponentially smoothed share of ``max_tokens`` that finished sequences used, and their length."""

    def __init__(self) -> None:
        self._mean_tokens: float | None = None

    def record(self, num_tokens: int) -> None:
        """A sequence ended after ``num_tokens`` output tokens."""
        if self._mean_tokens is None:
            self._mean_tokens = float(num_tokens)
        else:
            self._mean_tokens += _SMOOTHING * (num_tokens - self._mean_tokens)

    def expect(self, params: SamplingParams) -> int:
        """Output tokens to leave room for. ``max_tokens`` is the bound, and exact with ignore_eos."""
        bound = params.max_tokens
        if bound is not None and params.ignore_eos:
            return bound
        if self._mean_tokens is None:
            return _UNBOUNDED_GUESS if bound is None else min(bound, _UNBOUNDED_GUESS)
        guess = int(self._mean_tokens * 1.25) + 1
        return guess if bound is None else min(guess, bound)
