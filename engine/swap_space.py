"""SwapSpace: host blocks that hold the KV of preempted sequences.

Owns which host blocks are in use, by whom, and whether swapping a sequence pays against computing it again. Knows block
numbers and seconds, no tensors. Invariant: a sequence's host blocks are freed once, when it is taken back or forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedSequence:
    """Where the first ``num_tokens`` tokens' KV of a sequence lies in host memory."""

    host_blocks: tuple[int, ...]
    num_tokens: int


class StepTimes:
    """Time of a step as a line over its tokens, fitted to the latest steps by least squares.

    The slope is the price of a token more: a step of few tokens takes nearly as long as one of many, so that the mean
    price of a token says nothing of it.
    """

    def __init__(self) -> None:
        self.known = False
        self._mean_tokens = self._mean_seconds = self._variance = self._covariance = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step computed ``num_tokens`` tokens in ``seconds``."""
        if not self.known:
            self.known, self._mean_tokens, self._mean_seconds = True, float(num_tokens), seconds
            return
        more_tokens, more_seconds = num_tokens - self._mean_tokens, seconds - self._mean_seconds
        self._mean_tokens += _SMOOTHING * more_tokens
        self._mean_seconds += _SMOOTHING * more_seconds
        keep = 1 - _SMOOTHING
        self._variance = keep * (self._variance + _SMOOTHING * more_tokens**2)
        self._covariance = keep * (self._covariance + _SMOOTHING * more_tokens * more_seconds)

    @property
    def seconds_per_token(self) -> float:
        """The slope; the mean where all steps were alike."""
        if not self.known:
            return 0.0
        if self._variance < 1:
            return self._mean_seconds / self._mean_tokens
        return max(0.0, self._covariance / self._variance)


class SwapSpace:
    """``num_blocks`` host blocks.

    Args:
        seconds_per_block: time to move one block one way.
    """

    def __init__(self, num_blocks: int, seconds_per_block: float) -> None:
        self._free = list(range(num_blocks))
        self._swapped: dict[int, SwappedSequence] = {}
        self._seconds_per_block = seconds_per_block
        self._steps = StepTimes()

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed ``num_tokens`` tokens in ``seconds``: what computing again costs."""
        self._steps.record(num_tokens, seconds)

    @property
    def seconds_per_token(self) -> float:
        """What computing a token more takes; 0 before the first step."""
        return self._steps.seconds_per_token

    @property
    def seconds_per_block(self) -> float:
        """What moving a block one way takes."""
        return self._seconds_per_block

    def pays(self, *, num_tokens: int, num_blocks: int) -> bool:
        """True when there is room and moving the blocks out and in is cheaper than computing the tokens again."""
        if num_blocks > len(self._free) or num_blocks == 0:
            return False
        if not self._steps.known:
            return True
        return 2 * num_blocks * self._seconds_per_block < num_tokens * self.seconds_per_token

    def store(self, seq_id: int, *, num_tokens: int, num_blocks: int) -> tuple[int, ...]:
        """Reserve host blocks for a sequence; returns them in the order of its own."""
        host_blocks = tuple(self._free.pop() for _ in range(num_blocks))
        self._swapped[seq_id] = SwappedSequence(host_blocks=host_blocks, num_tokens=num_tokens)
        return host_blocks

    def get(self, seq_id: int) -> SwappedSequence | None:
        """What is kept of a sequence."""
        return self._swapped.get(seq_id)

    def forget(self, seq_id: int) -> None:
        """Free a sequence's host blocks, if it has any."""
        swapped = self._swapped.pop(seq_id, None)
        if swapped is not None:
            self._free.extend(swapped.host_blocks)
