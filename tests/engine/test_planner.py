"""PrefixPlanner: every job once, priorities first, groups whole, nobody starves."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kvq.engine.planner import PrefixPlanner
from kvq.engine.waiting_groups import GROUP_TOKENS


def _drain(planner: PrefixPlanner) -> list[str]:
    return planner.take(len(planner) + 1)


def _group(name: str, size: int, start: int) -> dict[str, list[int]]:
    prefix = list(range(start, start + GROUP_TOKENS + 8))
    return {f"{name}{i}": [*prefix, 10_000 + i] for i in range(size)}


def test_groups_are_finished_one_after_the_other_whatever_the_arrival_order() -> None:
    jobs = _group("a", 5, 0) | _group("b", 5, 500) | _group("c", 5, 900)
    names = list(jobs)
    random.Random(1).shuffle(names)
    planner = PrefixPlanner()
    for name in names:
        planner.add(name, jobs[name])
    order = [name[0] for name in _drain(planner)]
    assert len([1 for x, y in itertools.pairwise(order) if x != y]) == 2


def test_a_late_arrival_joins_the_group_that_is_hot() -> None:
    planner = PrefixPlanner()
    for name, ids in (_group("a", 3, 0) | _group("b", 3, 500)).items():
        planner.add(name, ids)
    first = planner.take(1)[0][0]
    planner.add(f"{first}-late", [*range(0 if first == "a" else 500, 540 if first == "b" else 40), 7])
    taken = planner.take(3)
    assert {name[0] for name in taken} == {first}


def test_smaller_priority_runs_earlier() -> None:
    planner = PrefixPlanner()
    planner.add("late", [1, 2, 3], priority=5)
    planner.add("early", [1, 2, 4], priority=-1)
    planner.add("middle", [1, 2, 5], priority=0)
    assert _drain(planner) == ["early", "middle", "late"]


def test_decode_heavy_groups_go_first() -> None:
    planner = PrefixPlanner()
    planner.add("short-answer", list(range(100)), max_tokens=1)
    planner.add("long-answer", list(range(500, 600)), max_tokens=500)
    assert _drain(planner) == ["long-answer", "short-answer"]


def test_a_group_that_was_begun_is_left_for_a_decode_heavier_one_only_when_asked_to_reconsider() -> None:
    planner = PrefixPlanner()
    for name, ids in _group("a", 4, 0).items():
        planner.add(name, ids, max_tokens=1)
    planner.take(1)
    planner.add("long-answer", list(range(500, 600)), max_tokens=500)
    assert planner.take(1)[0].startswith("a")
    planner.reconsider()
    order = _drain(planner)
    assert order[0] == "long-answer"
    assert len(order) == 3


def test_a_cold_job_is_overtaken_only_up_to_the_bound() -> None:
    planner = PrefixPlanner(max_overtaken=10)
    planner.add("hot0", list(range(40)))
    assert planner.take(1) == ["hot0"]
    planner.add("cold", list(range(900, 990)))
    waited = 0
    for i in range(50):
        planner.add(f"hot{i + 1}", [*range(40), i])
        if planner.take(1) == ["cold"]:
            break
        waited += 1
    assert waited == 10


def test_a_queue_longer_than_the_aging_bound_is_still_admitted_group_by_group() -> None:
    groups = [group for group in range(40) for _ in range(25)]
    random.Random(1).shuffle(groups)
    planner = PrefixPlanner(max_overtaken=50)
    for i, group in enumerate(groups):
        planner.add(str(i), [group] * GROUP_TOKENS + [i])
    order = [groups[int(name)] for name in _drain(planner)]
    switches = sum(x != y for x, y in itertools.pairwise(order))
    assert switches <= 40  # one group may be left for the first overdue job, and gone back to


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 9)), max_size=80))
def test_the_next_of_a_group_shares_most_with_the_last_whatever_came_and_went(
    steps: list[tuple[int, list[int], int]],
) -> None:
    planner = PrefixPlanner()
    waiting: dict[str, list[int]] = {}
    hot: list[int] | None = None
    for i, (action, tail, victim) in enumerate(steps):
        if action < 3:
            waiting[str(i)] = [7] * GROUP_TOKENS + tail
            planner.add(str(i), waiting[str(i)])
        elif waiting and action == 3:
            gone = list(waiting)[victim % len(waiting)]
            planner.remove(gone)
            del waiting[gone]
        elif waiting:
            (taken,) = planner.take(1)
            ids = waiting.pop(taken)
            if hot is not None:
                assert _num_common(hot, ids) == max(_num_common(hot, other) for other in [ids, *waiting.values()])
            hot = ids
    assert sorted(_drain(planner)) == sorted(waiting)


def _num_common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.lists(st.integers(0, 3), min_size=1, max_size=70)), min_size=1, max_size=40
    ),
    st.data(),
)
def test_every_job_comes_out_exactly_once_in_priority_order(
    jobs: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    planner = PrefixPlanner()
    for i, (priority, ids) in enumerate(jobs):
        planner.add(str(i), ids, priority=priority)
    removed = data.draw(st.sets(st.integers(0, len(jobs) - 1)))
    for i in removed:
        planner.remove(str(i))
    order = _drain(planner)
    assert sorted(order, key=int) == [str(i) for i in range(len(jobs)) if i not in removed]
    priorities = [jobs[int(name)][0] for name in order]
    assert priorities == sorted(priorities)
    assert len(planner) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=60))
def test_the_heaviest_group_is_found_after_any_additions_and_removals(steps: list[tuple[int, int, int]]) -> None:
    planner = PrefixPlanner()
    waiting: dict[str, tuple[int, int, int]] = {}  # job -> group, prompt tokens, max_tokens
    for i, (group, max_tokens, victim) in enumerate(steps):
        planner.add(str(i), [group] * (GROUP_TOKENS + group), max_tokens=max_tokens)
        waiting[str(i)] = (group, GROUP_TOKENS + group, max_tokens)
        if victim < 3:
            gone = list(waiting)[victim % len(waiting)]
            planner.remove(gone)
            del waiting[gone]
        if waiting:
            chosen = planner.peek()
            assert chosen is not None
            weights = {
                group: sum(m for g, _, m in waiting.values() if g == group)
                / sum(p for g, p, _ in waiting.values() if g == group)
                for group in {g for g, _, _ in waiting.values()}
            }
            assert weights[waiting[chosen][0]] == max(weights.values())
