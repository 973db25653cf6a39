"""Prefix groups: which sequences of a decode step read the same blocks, so that the kernel reads them once.

Owns the choice of groups and the order of rows that makes each a run. Knows block numbers, not tokens: equal blocks at
the same place of two block tables are equal context. Invariant: a group's prefix is whole blocks that lie before the
token every one of its sequences computes.

Sorted block tables are in depth-first order of the tree that their sharing forms, so any group is a run of them, and
the blocks that a run shares are the least that two neighbours in it share. A run is one group, or is cut where least is
shared, whichever saves more reads; the parts are looked at in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvq.engine.step import ScheduledSequence, StepPlan
from kvq.kernels.attention_config import grouping_pays

MOST_GROUPS = 30  # with a prefix; those worth least are left out, so that captured steps have room for all
_SMALLEST = 4
_DEEPEST = 32  # levels of nested prefixes that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """Group ``g`` is the decode sequences ``starts[g] .. starts[g + 1]``, which share ``prefix_lens[g]`` tokens."""

    starts: tuple[int, ...]
    prefix_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Groups (first row, end, shared blocks) within a run of rows, and the blocks they save reading."""

    saved: int = 0
    groups: tuple[tuple[int, int, int], ...] = ()


def group_decodes(plan: StepPlan, block_size: int) -> tuple[StepPlan, PrefixGroups | None]:
    """The plan with its decode sequences in an order that groups them; None, and as it was, where no group pays."""
    decodes = plan.sequences[: plan.num_decodes]
    if len(decodes) < _SMALLEST:
        return plan, None
    order, shared = _neighbours(decodes, block_size)
    choice = _choose(shared, 0, len(decodes), block_size, 0)
    if not choice.groups:
        return plan, None
    by_worth = sorted(choice.groups, key=lambda group: (group[1] - group[0] - 1) * group[2], reverse=True)
    rows: list[int] = []
    starts, prefix_lens = [0], []
    for first, end, num_blocks in sorted(by_worth[:MOST_GROUPS]):
        rows += order[first:end]
        starts.append(len(rows))
        prefix_lens.append(num_blocks * block_size)
    if len(rows) < len(decodes):  # the others are attended alone
        grouped = set(rows)
        rows += [row for row in order if row not in grouped]
        starts.append(len(rows))
        prefix_lens.append(0)
    ordered = tuple(decodes[row] for row in rows) + plan.sequences[plan.num_decodes :]
    return replace(plan, sequences=ordered), PrefixGroups(starts=tuple(starts), prefix_lens=tuple(prefix_lens))


def _neighbours(decodes: Sequence[ScheduledSequence], block_size: int) -> tuple[list[int], np.ndarray]:
    """Rows by block table, and the leading blocks that each shares with the next: int [D - 1]."""
    usable = np.array([s.start // block_size for s in decodes])  # blocks before the token that is computed
    tables = np.full((len(decodes), max(1, int(usable.max()))), -1, dtype=np.int64)
    for row, (seq, length) in enumerate(zip(decodes, usable, strict=True)):
        tables[row, :length] = seq.block_table[:length]
    keys = (tables + 1).astype(">i8")
    order = sorted(range(len(decodes)), key=lambda row: keys[row].tobytes())
    ordered = tables[order]
    differ = ordered[1:] != ordered[:-1]
    shared = np.where(differ.any(axis=1), differ.argmax(axis=1), tables.shape[1])
    return order, np.minimum(shared, np.minimum(usable[order][1:], usable[order][:-1]))


def _choose(shared: np.ndarray, first: int, end: int, block_size: int, depth: int) -> _Choice:
    if end - first < _SMALLEST:
        return _Choice()
    least = int(shared[first : end - 1].min())
    whole = _Choice()
    if grouping_pays(num_sequences=end - first, prefix_len=least * block_size):
        whole = _Choice(saved=(end - first - 1) * least, groups=((first, end, least),))
    if depth == _DEEPEST:
        return whole
    cuts = [first, *(first + 1 + np.flatnonzero(shared[first : end - 1] == least)).tolist(), end]
    parts = [_choose(shared, low, high, block_size, depth + 1) for low, high in pairwise(cuts)]
    saved = sum(part.saved for part in parts)
    if saved > whole.saved:
        return _Choice(saved=saved, groups=tuple(group for part in parts for group in part.groups))
    return whole
