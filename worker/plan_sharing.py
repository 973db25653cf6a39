"""What the prompts of a file share, in groups of rows, and where something small keeps them from sharing more.

Owns the choice of what is worth telling. The trie says how many tokens and rows, the texts say where and what.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from kvq.engine.prompt_trie import TrieFigures, TrieNode
from kvq.worker.files import InputFile
from kvq.worker.plan_rows import PlannedRows, bodies_of
from kvq.worker.plan_texts import Passage, TextSplit, find_repeat, find_split, num_characters, passages

_MOST_GROUPS = 10
_MOST_BREAKS = 5
_MOST_SUSPECTS = 24
# What saves less than this share of the prompt tokens is no group to speak of.
_LEAST_SAVED_SHARE = 0.005
# A break that would save less than this share of the prompt tokens is not worth anybody's time.
_LEAST_LOST_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows whose prompts begin with the same ``shared_tokens`` tokens and then go on in ``num_branches`` ways.

    ``saved_tokens`` need not be computed since this group computes its own part of the prefix once (what it shares
    with yet others is counted there). ``lines`` are two rows that part there, ``split`` is where; None: they are equal.
    """

    num_rows: int
    shared_tokens: int
    saved_tokens: int
    num_branches: int
    lines: tuple[int, int]
    split: TextSplit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingBreak:
    """A difference after which prompts are equal again, so that what follows is computed once for each variant.

    ``num_rows`` rows part after ``shared_tokens`` tokens into ``num_variants``; after it about ``repeated_tokens``
    tokens, from ``repeated_begins`` on, are the same, and about ``lost_tokens`` are computed that need not be if what
    differs came last.
    """

    num_rows: int
    num_variants: int
    shared_tokens: int
    repeated_tokens: int
    repeated_begins: str
    lost_tokens: int
    lines: tuple[int, int]
    split: TextSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What all prompts of a file come to, in tokens."""

    total_tokens: int
    distinct_tokens: int
    num_repeats: int
    groups: tuple[RowGroup, ...]
    breaks: tuple[SharingBreak, ...]

    @property
    def shared_tokens(self) -> int:
        """Tokens that are computed for another row already."""
        return self.total_tokens - self.distinct_tokens


def describe_sharing(rows: PlannedRows, source: InputFile) -> Sharing:
    """The groups that share most, and the breaks that cost most. Reads some lines of ``source`` once more."""
    figures = rows.trie.analysed()
    nodes = list(figures.nodes())
    least = max(1.0, _LEAST_SAVED_SHARE * figures.total_tokens)
    largest = heapq.nlargest(
        _MOST_GROUPS, (n for n in nodes if n.saved_tokens >= least), key=lambda n: (n.saved_tokens, n.num_prompts)
    )
    suspects = heapq.nlargest(_MOST_SUSPECTS, nodes, key=lambda n: (n.num_prompts, -n.num_tokens))
    sample = _Sample.read({*largest, *suspects}, figures, rows, source)
    return Sharing(
        total_tokens=figures.total_tokens,
        distinct_tokens=figures.distinct_tokens,
        num_repeats=figures.num_repeats,
        groups=tuple(sample.group(node) for node in largest),
        breaks=tuple(sorted(sample.breaks(suspects), key=lambda b: -b.lost_tokens)[:_MOST_BREAKS]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The texts of two rows of each node that is looked at."""

    figures: TrieFigures
    rows: PlannedRows
    texts: dict[int, tuple[Passage, ...]]

    @classmethod
    def read(cls, nodes: set[TrieNode], figures: TrieFigures, rows: PlannedRows, source: InputFile) -> _Sample:
        lines = {rows.line_nos[figures.order[place]] for node in nodes for place in node.branches}
        bodies = bodies_of(source, lines) if lines else {}
        texts = {line: passages(body) for line, body in bodies.items()}
        return cls(figures=figures, rows=rows, texts=texts)

    def lines(self, node: TrieNode) -> tuple[int, int]:
        """Line numbers of two rows that part at ``node``."""
        one, other = (self.rows.line_nos[self.figures.order[place]] for place in node.branches)
        return (min(one, other), max(one, other))

    def group(self, node: TrieNode) -> RowGroup:
        """A node for people."""
        one, other = lines = self.lines(node)
        return RowGroup(
            num_rows=node.num_prompts,
            shared_tokens=node.num_tokens,
            saved_tokens=node.saved_tokens,
            num_branches=node.num_branches,
            lines=lines,
            split=find_split(self.texts[one], self.texts[other]),
        )

    def breaks(self, suspects: list[TrieNode]) -> Iterator[SharingBreak]:
        """Those suspects (large ones first) after which the texts are equal again, each difference once."""
        covered: list[tuple[TrieNode, int]] = []
        for node in suspects:
            if any(c.start <= node.start < c.end and node.num_tokens < end for c, end in covered):
                continue
            found = self._break(node)
            if found is not None:
                gap, broken = found
                covered.append((node, node.num_tokens + gap))
                yield broken

    def _break(self, node: TrieNode) -> tuple[int, SharingBreak] | None:
        one, other = lines = self.lines(node)
        split = find_split(self.texts[one], self.texts[other])
        repeat = find_repeat(self.texts[one], self.texts[other])
        if split is None or repeat is None:
            return None
        prompt = int(self.figures.order[node.branches[0]])
        tokens_per_character = self.rows.num_tokens[prompt] / max(
            1, num_characters(self.texts[self.rows.line_nos[prompt]])
        )
        repeated_tokens = round(repeat.num_characters * tokens_per_character)
        # Past what differs (a digit may be a token) and well before the end of what is equal again.
        gap = min(repeat.gap_characters + 1, round(repeat.gap_characters * tokens_per_character) + repeated_tokens // 2)
        num_variants = self.figures.num_copies(node, node.num_tokens + gap)
        # Tokens are estimated from characters: never more than there are.
        lost_tokens = min((num_variants - 1) * repeated_tokens, self.figures.distinct_tokens - repeated_tokens)
        if lost_tokens < _LEAST_LOST_SHARE * self.figures.total_tokens:
            return None
        return gap, SharingBreak(
            num_rows=node.num_prompts,
            num_variants=num_variants,
            shared_tokens=node.num_tokens,
            repeated_tokens=repeated_tokens,
            repeated_begins=repeat.begins,
            lost_tokens=lost_tokens,
            lines=lines,
            split=split,
        )
