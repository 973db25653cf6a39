"""PromptTrie: how much a set of prompts has in common, counted before anything is computed.

Owns the prompts as sorted byte strings and the figures of the trie they span. Knows token ids only. The trie is never
built: sorted prompts lie in its depth-first order, so the lengths of the common prefixes of neighbours (the LCP array)
say everything. Memory is two to four bytes a token. Invariant: total - distinct tokens is the sum of the LCP array, and
of what all nodes save.
Source: LCP intervals, Abouelhoda et al., "Replacing suffix trees with enhanced suffix arrays" (2004), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrieNode:
    """A place in the trie where prompts part: they share ``num_tokens`` tokens, and no more.

    ``start`` and ``end`` bound its prompts in sorted order. ``parent_tokens`` is the length of the next shorter prefix
    at which others part, so that the tokens between the two belong to this node alone. ``branches`` are the places in
    sorted order of the first prompts of two of its branches.
    """

    num_tokens: int
    parent_tokens: int
    num_branches: int
    start: int
    end: int
    branches: tuple[int, int]

    @property
    def num_prompts(self) -> int:
        """Prompts that begin with this prefix."""
        return self.end - self.start

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that need not be computed since this node's own tokens are computed once."""
        return (self.num_prompts - 1) * (self.num_tokens - self.parent_tokens)


class PromptTrie:
    """Collects prompts by ``add``; the figures are those of ``analysed()``.

    Args:
        vocab_size: number of token ids, which decides the bytes of a token.
    """

    def __init__(self, *, vocab_size: int) -> None:
        self._token_bytes = max(2, ((vocab_size - 1).bit_length() + 7) // 8)
        self._keys: list[bytes] = []
        self._roots: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, token_ids: Sequence[int], *, root: int = 0) -> None:
        """Add a prompt. Its number is the count of those before it. Those of different roots share nothing."""
        words = np.asarray(token_ids, dtype=">u4")  # big-endian: the order of bytes is the order of tokens
        bytes_ = words.view(np.uint8).reshape(-1, _WORD_BYTES)
        self._keys.append(bytes_[:, _WORD_BYTES - self._token_bytes :].tobytes())
        self._roots.append(root)

    def analysed(self) -> TrieFigures:
        """Sort, compare neighbours, and hand out the figures."""
        keys, roots = self._keys, self._roots
        order = np.array(sorted(range(len(keys)), key=lambda number: (roots[number], keys[number])), dtype=np.int64)
        lengths = np.array([len(key) for key in keys], dtype=np.int64) // self._token_bytes
        shared = np.zeros(len(keys), dtype=np.int64)
        for place in range(1, len(keys)):
            one, other = order[place - 1], order[place]
            if roots[one] == roots[other]:
                shared[place] = _common_bytes(keys[one], keys[other]) // self._token_bytes
        return TrieFigures(order=order, lengths=lengths[order], shared=shared)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrieFigures:
    """The sorted prompts: ``order`` [N] are their numbers, ``lengths`` [N] their tokens.

    ``shared`` [N] is the number of tokens each has in common with the one before it (0 for the first).
    """

    order: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shared: NDArray[np.int64]

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.lengths.sum())

    @property
    def distinct_tokens(self) -> int:
        """Nodes of the trie: tokens to be computed when nothing is computed twice."""
        return self.total_tokens - int(self.shared.sum())

    @property
    def num_repeats(self) -> int:
        """Prompts that are equal to an earlier one."""
        same = (self.shared == self.lengths)[1:] & (self.lengths[1:] == self.lengths[:-1])
        return int(same.sum())

    def num_copies(self, node: TrieNode, num_tokens: int) -> int:
        """Different prefixes of ``num_tokens`` tokens among the prompts of ``node`` (all at least that long)."""
        return 1 + int((self.shared[node.start + 1 : node.end] < num_tokens).sum())

    def nodes(self) -> Iterator[TrieNode]:
        """Every node where at least two prompts part, the root included even where it is empty; children first."""
        open_: list[_Open] = []
        num_prompts = len(self.shared)
        bounds = [*self.shared.tolist()[1:], -1] if num_prompts else []
        for place, depth in enumerate(bounds, start=1):
            start = place - 1
            while open_ and depth < open_[-1].depth:
                ended = open_.pop()
                parent = max(depth, open_[-1].depth if open_ else 0)
                yield ended.node(end=place, parent_tokens=max(0, parent))
                start = ended.start
            if depth < 0:
                break
            if open_ and open_[-1].depth == depth:
                open_[-1].num_branches += 1
            else:
                open_.append(_Open(depth=depth, start=start, second=place))


@dataclass(slots=True, kw_only=True)
class _Open:
    """A node whose last prompt has not been seen yet."""

    depth: int
    start: int
    second: int
    num_branches: int = 2

    def node(self, *, end: int, parent_tokens: int) -> TrieNode:
        return TrieNode(
            num_tokens=self.depth,
            parent_tokens=parent_tokens,
            num_branches=self.num_branches,
            start=self.start,
            end=end,
            branches=(self.start, self.second),
        )


def _common_bytes(a: bytes, b: bytes) -> int:
    """Number of equal leading bytes."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    differs = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    return int(differs.argmax())
