"""Decodes that share leading blocks stand together, and only where reading those once pays."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.engine.inputs import build_inputs
from kvq.engine.prefix_groups import MOST_GROUPS, PrefixGroups, group_decodes
from kvq.engine.step import ScheduledSequence, StepPlan
from kvq.kernels.attention_config import grouping_pays

BLOCK = 16


def _plan(tables: list[list[int]], starts: list[int]) -> StepPlan:
    entries = tuple(
        ScheduledSequence(seq_id=row, token_ids=[7], start=start, block_table=table, samples=())
        for row, (table, start) in enumerate(zip(tables, starts, strict=True))
    )
    prefill = ScheduledSequence(seq_id=99, token_ids=[1, 2], start=0, block_table=[5000], samples=())
    return StepPlan(sequences=(*entries, prefill), num_decodes=len(entries), copies=())


def _family(size: int, prefix: list[int], own: int) -> list[list[int]]:
    return [[*prefix, own + row] for row in range(size)]


def test_sequences_of_one_prefix_form_a_group_wherever_they_stood() -> None:
    long, short = list(range(100, 120)), list(range(200, 216))
    tables = _family(6, long, 1000) + _family(5, short, 2000) + [[3000 + i] * 20 for i in range(3)]
    order = list(range(len(tables)))
    random.Random(1).shuffle(order)
    plan = _plan([tables[i] for i in order], [16 * (len(tables[i]) - 1) for i in order])
    grouped, groups = group_decodes(plan, BLOCK)
    assert groups == PrefixGroups(starts=(0, 6, 11, 14), prefix_lens=(320, 256, 0))
    assert sorted(s.seq_id for s in grouped.sequences) == [*range(14), 99]
    assert grouped.sequences[-1].seq_id == 99


def test_of_too_many_groups_those_that_save_least_are_left_out() -> None:
    sizes = [4 + number % 3 for number in range(40)]
    families = [_family(size, [1000 * n + i for i in range(16)], 1000 * n + 500) for n, size in enumerate(sizes, 1)]
    tables = [table for family in families for table in family]
    grouped, groups = group_decodes(_plan(tables, [16 * BLOCK] * len(tables)), BLOCK)
    assert groups is not None
    assert groups.prefix_lens == (256,) * MOST_GROUPS + (0,)
    found = [end - start for start, end in pairwise(groups.starts)]
    assert sorted(found[:-1]) == sorted(sizes)[-MOST_GROUPS:]
    assert sorted(s.seq_id for s in grouped.sequences[:-1]) == list(range(len(tables)))


def test_launches_are_sized_by_what_lies_behind_the_prefix() -> None:
    plan = _plan([*_family(5, list(range(40)), own=100), [200, 201]], [655] * 5 + [20])
    metadata = build_inputs(plan, block_size=16, device=torch.device("cpu"), group_prefixes=True).metadata
    assert (metadata.max_prefix_len, metadata.max_suffix_len, metadata.max_seq_len) == (640, 21, 656)


def test_nested_prefixes_are_cut_where_more_is_saved() -> None:
    system = list(range(16))
    documents = [[*system, *range(100 * d, 100 * d + 64)] for d in (1, 2)]
    tables = _family(8, documents[0], 1000) + _family(8, documents[1], 2000)
    _, groups = group_decodes(_plan(tables, [16 * 80] * 16), BLOCK)
    assert groups == PrefixGroups(starts=(0, 8, 16), prefix_lens=(1280, 1280))
    tables = _family(2, documents[0], 1000) + _family(2, documents[1], 2000)
    _, groups = group_decodes(_plan(tables, [16 * 80] * 4), BLOCK)
    assert groups == PrefixGroups(starts=(0, 4), prefix_lens=(256,))


def test_the_block_that_is_written_is_never_part_of_a_prefix() -> None:
    tables = [list(range(17))] * 4
    plan = _plan(tables, [16 * 16 + 3] * 4)
    assert group_decodes(plan, BLOCK)[1] == PrefixGroups(starts=(0, 4), prefix_lens=(256,))
    assert group_decodes(_plan(tables, [16 * 16 - 1] * 4), BLOCK)[1] is None  # 15 whole blocks do not pay


def test_few_or_different_sequences_are_left_alone() -> None:
    plan = _plan(_family(3, list(range(64)), 1000), [1024] * 3)
    assert group_decodes(plan, BLOCK) == (plan, None)
    plan = _plan([[i] * 40 for i in range(9)], [600] * 9)
    assert group_decodes(plan, BLOCK) == (plan, None)


def test_thousands_of_ever_longer_prefixes_end() -> None:
    tables = [list(range(1 + row)) for row in range(700)]
    _, groups = group_decodes(_plan(tables, [16 * row for row in range(700)]), BLOCK)
    assert groups is not None
    assert groups.starts[-1] == 700


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=40))
def test_every_group_shares_what_it_says(paths: list[list[int]]) -> None:
    ids: dict[tuple[int, ...], int] = {}
    tables = [[ids.setdefault(tuple(path[: n + 1]), len(ids)) for n in range(len(path))] for path in paths]
    grouped, groups = group_decodes(_plan(tables, [64 * (len(t) - 1) + 5 for t in tables]), 64)
    if groups is None:
        return
    assert groups.starts[0] == 0
    assert groups.starts[-1] == len(tables)
    for first, end, prefix in zip(groups.starts, groups.starts[1:], groups.prefix_lens, strict=False):
        assert first < end
        members = grouped.sequences[first:end]
        assert len({tuple(s.block_table[: prefix // 64]) for s in members}) == 1 or prefix == 0
        assert all(s.start >= prefix for s in members)
        assert prefix == 0 or grouping_pays(num_sequences=end - first, prefix_len=prefix)
