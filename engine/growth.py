"""Growth: the most blocks that a batch will take beyond those it holds.

Owns the forecast that admission asks. Knows remaining lengths, no sequences. Sequences end at different times and give
blocks back, so the peak is less than the sum of what each still takes.
Source: the Past-Future scheduler (ASPLOS 2025, arXiv 2507.10150, section 3.3), in blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One sequence.

    ``num_tokens``: expected until it ends. ``most_blocks``: it takes no more than these for them. ``num_own``: blocks
    it has to itself now and gives back when it ends.
    """

    num_tokens: int
    most_blocks: int
    num_own: int


def peak_growth(growths: Iterable[Growth], *, block_size: int) -> int:
    """Blocks beyond those now held at the worst moment, every sequence growing at the same pace until it ends.

    The worst moments are just before an end: those that go on longer have then grown as much as the one that ends, and
    those that ended before have given back what they had.
    """
    longest_first = sorted(growths, key=lambda growth: -growth.num_tokens)
    given_back = sum(growth.num_own for growth in longest_first)
    most_blocks = peak = 0
    for number, growth in enumerate(longest_first, 1):
        given_back -= growth.num_own
        most_blocks += growth.most_blocks
        peak = max(peak, min(number * -(-growth.num_tokens // block_size), most_blocks) - given_back)
    return peak
