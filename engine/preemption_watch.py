"""PreemptionWatch: does preempting cost more than running fewer sequences would?

Owns the comparison, over windows of ten seconds, and its words. Knows seconds and counts; preempts nothing. Source:
the sign people watch on vLLM: with memory short, sixteen sequences that swap ran at half the speed of eight, and twelve
that just fit were best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_S = 10.0
# Less than this share of the time is not worth a word.
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCost:
    """What a step spent on preemption.

    ``seconds``: to move KV to the host and back, or to compute it again. ``num_fitting``: sequences that were left
    running when one had to go; None where none had.
    """

    seconds: float = 0.0
    num_blocks_moved: int = 0
    num_tokens_lost: int = 0
    num_fitting: int | None = None


class PreemptionWatch:
    """Adds up steps; once a window of ``WINDOW_S`` busy seconds is full, judges it."""

    def __init__(self, *, bytes_per_block: int, max_num_seqs: int) -> None:
        self._bytes_per_block = bytes_per_block
        self._max_num_seqs = max_num_seqs
        self._reset()

    def _reset(self) -> None:
        self._seconds = 0.0
        self._lost_s = 0.0
        self._sequence_seconds = 0.0
        self._num_blocks = 0
        self._num_tokens = 0
        self._fitting: list[int] = []

    def record_step(self, *, num_running: int, seconds: float, cost: PreemptionCost) -> str | None:
        """Book a step of ``seconds`` with ``num_running`` sequences; returns a warning at most once a window."""
        self._seconds += seconds
        self._sequence_seconds += num_running * seconds
        self._lost_s += cost.seconds
        self._num_blocks += cost.num_blocks_moved
        self._num_tokens += cost.num_tokens_lost
        if cost.num_fitting is not None:
            self._fitting.append(cost.num_fitting)
        if self._seconds < WINDOW_S:
            return None
        warning = self._judge()
        self._reset()
        return warning

    def _judge(self) -> str | None:
        """Preemption hurts where the sequences that fit, undisturbed, would do more than those that run now.

        A step is taken to last the same with fewer sequences, which favours the larger number.
        """
        share = min(self._lost_s / self._seconds, 0.99)
        if not self._fitting or share < _LEAST_SHARE:
            return None
        num_fitting = max(1, math.floor(sum(self._fitting) / len(self._fitting)))
        mean_running = self._sequence_seconds / self._seconds
        gain = num_fitting / mean_running / (1 - share)
        if gain <= 1:
            return None
        moved = self._num_blocks * self._bytes_per_block / (1 << 20)
        return (
            f"preemption takes {share:.0%} of the time: in {self._seconds:.0f} s {self._num_blocks:,} KV blocks "
            f"({moved:,.0f} MiB) went to host memory and back and {self._num_tokens:,} tokens are computed again, with "
            f"{mean_running:.1f} sequences running and room for {num_fitting}; set max_num_seqs to {num_fitting} "
            f"(it is {self._max_num_seqs}) for about {min(gain, 10) - 1:.0%} more throughput, or give the KV cache "
            "more memory"
        )
