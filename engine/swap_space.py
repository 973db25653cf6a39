"""SwapSpace: host blocks that hold the KV of preempted sequences.

Owns which host blocks are in use, by whom, and whether swapping a sequence pays against computing it again. Knows block
numbers and seconds, no tensors. Invariant: a sequence's host blocks are freed once, when it is taken back or forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedSequence:
    """Where the first ``num_tokens`` tokens' KV of a sequence lies in host memory."""

    host_blocks: tuple[int, ...]
    num_tokens: int


class SwapSpace:
    """``num_blocks`` host blocks.

    Args:
        seconds_per_block: time to move one block one way.
    """

    def __init__(self, num_blocks: int, seconds_per_block: float) -> None:
        self._free = list(range(num_blocks))
        self._swapped: dict[int, SwappedSequence] = {}
        self._seconds_per_block = seconds_per_block
        self._seconds_per_token: float | None = None

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed ``num_tokens`` tokens in ``seconds``: what computing again costs."""
        per_token = seconds / num_tokens
        if self._seconds_per_token is None:
            self._seconds_per_token = per_token
        else:
            self._seconds_per_token += _SMOOTHING * (per_token - self._seconds_per_token)

    def pays(self, *, num_tokens: int, num_blocks: int) -> bool:
        """True when there is room and moving the blocks out and in is cheaper than computing the tokens again."""
        if num_blocks > len(self._free) or num_blocks == 0:
            return False
        if self._seconds_per_token is None:
            return True
        return 2 * num_blocks * self._seconds_per_block < num_tokens * self._seconds_per_token

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
