"""Memory and fairness: what the scheduler promises when the cache is too small for all, on thousands of steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.engine.growth import Growth, peak_growth
from kvq.engine.lengths import OutputLengths
from kvq.engine.planner import PrefixPlanner
from kvq.engine.preemption_watch import PreemptionCost, PreemptionWatch
from kvq.engine.request import SamplingParams
from kvq.engine.step import StepPlan
from kvq.engine.swap_space import StepTimes
from tests.engine.schedules import PLANNERS, Schedule

FREE = SamplingParams()


def _prompt(number: int, length: int, *, start: int = 0) -> list[int]:
    """A prompt that shares nothing with those of other numbers."""
    return [100 + start + number, *range(1000 * number, 1000 * number + length - 1)]


# -- KV slots ------------------------------------------------------------------------------------------------


def test_a_saturated_cache_is_full_of_tokens() -> None:
    schedule = Schedule.of(num_blocks=400, max_model_len=1024)
    numbers = random.Random(0)
    for i in range(80):
        schedule.add(f"{i}", _prompt(i, numbers.randint(150, 400)), length=numbers.randint(50, 200))
    schedule.run()
    counters = schedule.scheduler.counters
    assert counters.kv_usage_peak > 0.99
    assert counters.kv_slots_used >= 0.96 * counters.kv_slots_allocated
    assert counters.kv_slots_used <= counters.kv_slots_allocated


def test_slots_that_sequences_share_are_counted_once() -> None:
    schedule = Schedule.of(num_blocks=64)
    for i in range(4):
        schedule.add(f"{i}", [*range(64), 500 + i], length=15, max_tokens=15)
    schedule.run()
    counters = schedule.scheduler.counters
    # Four shared blocks, and one of each sequence, filled evenly over the steps: at the peak all four hold them.
    assert counters.kv_slots_used < counters.kv_slots_allocated
    assert counters.kv_usage_peak == 8 / 64


# -- fairness ------------------------------------------------------------------------------------------------

LONG_PROMPT = 8000


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("long_at", [0, 100, 200])
def test_one_long_job_among_200_short_ones_holds_nobody_up(planner: str, long_at: int) -> None:
    schedule = Schedule.of(num_blocks=8192 // 16, max_num_batched_tokens=512, planner=PLANNERS[planner]())
    for i in range(201):
        if i == long_at:
            schedule.add("long", _prompt(999, LONG_PROMPT), length=100)
        else:
            schedule.add(f"{i}", _prompt(i, 64), length=20)
    schedule.run()
    # The long job takes 16 steps for its prompt and 100 for its answer; the short ones, 84 tokens each in a cache of
    # 8,192, at least two waves of 20 steps. Nobody waits for both more than once, preemptions and all.
    assert max(schedule.ended.values()) < 400
    assert sum(end < 250 for name, end in schedule.ended.items() if name != "long") >= 190
    assert schedule.scheduler.counters.preemptions <= 20


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("short_at", [0, 100, 200])
def test_one_short_job_among_200_long_ones_is_not_forgotten(planner: str, short_at: int) -> None:
    schedule = Schedule.of(
        num_blocks=4096 // 16, max_num_batched_tokens=512, planner=PLANNERS[planner](), max_model_len=4096
    )
    for i in range(201):
        if i == short_at:
            schedule.add("short", _prompt(999, 8), length=4)
        else:
            schedule.add(f"{i}", _prompt(i, 1000), length=30)
    schedule.run()
    position = schedule.order.index("short")
    assert position <= 201
    # In order of arrival it waits for those before it; the planner takes what decodes most per prompt token first.
    assert position <= short_at if planner == "fcfs" else position == 0


def test_a_job_waits_for_a_bounded_number_of_others() -> None:
    bound = 40
    schedule = Schedule.of(num_blocks=64, max_num_seqs=4, planner=PrefixPlanner(max_overtaken=bound))
    schedule.add("cold", _prompt(1, 900), length=2)
    for i in range(200):
        schedule.add(f"{i}", [*range(5000, 5040), i], length=40, max_tokens=40)
    schedule.run()
    assert schedule.order.index("cold") <= bound


def test_a_job_that_keeps_arriving_neighbours_ahead_is_still_reached() -> None:
    bound = 30
    schedule = Schedule.of(num_blocks=64, max_num_seqs=4, planner=PrefixPlanner(max_overtaken=bound))
    schedule.add("cold", _prompt(1, 900), length=2)
    number = 0

    def arrive(_plan: StepPlan) -> None:
        nonlocal number
        if number < 300:
            number += 1
            schedule.add(f"{number}", [*range(5000, 5040), number], length=5, max_tokens=40)

    arrive(StepPlan(sequences=(), num_decodes=0, copies=()))
    schedule.run(after_step=arrive)
    assert schedule.order.index("cold") <= bound


# -- expected lengths ----------------------------------------------------------------------------------------


def _mixed(lengths: OutputLengths) -> Schedule:
    """One answer in ten is long, which how its prompt begins tells; the first hundred come before the rest."""
    schedule = Schedule.of(num_blocks=120, max_model_len=1024, planner=PLANNERS["fcfs"](), lengths=lengths)
    for i in range(400):
        begin = range(1000, 1040) if i % 10 == 0 else range(2000, 2040)
        schedule.add(f"{i}", [*begin, 5 + i, 7, 9 + i], length=300 if i % 10 == 0 else 6)
    return schedule


def test_lengths_learned_per_template_make_preemption_rare() -> None:
    preemptions = {}
    for name, lengths in {"template": OutputLengths(), "all alike": OutputLengths(max_beginnings=0)}.items():
        for i in range(40):  # a history of the same mixture
            begin = range(1000, 1040) if i % 10 == 0 else range(2000, 2040)
            lengths.record(lengths.beginnings([*begin, 99_000 + i]), 300 if i % 10 == 0 else 6)
        schedule = _mixed(lengths)
        schedule.run()
        preemptions[name] = schedule.scheduler.counters.preemptions
    assert preemptions["template"] == 0
    assert preemptions["all alike"] >= 10


def test_without_history_a_batch_learns_from_the_answers_that_outlive_the_guess() -> None:
    schedule = _mixed(OutputLengths())
    after = []
    schedule.run(after_step=lambda plan: after.append(schedule.scheduler.counters.preemptions))
    assert after[-1] < 40, "fewer than there are long answers"
    assert after[-1] == after[max(schedule.ended["0"], schedule.ended["10"])], "none once two long answers have ended"


def test_the_longest_beginning_that_is_known_tells() -> None:
    lengths = OutputLengths()
    shared = list(range(40))
    for i in range(5):
        lengths.record(lengths.beginnings([*shared, *range(100, 130), i]), 10)
        lengths.record(lengths.beginnings([*shared, *range(200, 230), i]), 200)
    assert lengths.expect(lengths.beginnings([*shared, *range(100, 130), 99]), FREE) == 10
    assert lengths.expect(lengths.beginnings([*shared, *range(200, 230), 99]), FREE) == 200
    unknown = lengths.expect(lengths.beginnings([*shared, *range(300, 330), 99]), FREE)
    assert 100 <= unknown <= 220, "what both have in common"
    assert lengths.expect(lengths.beginnings([*shared, *range(200, 230), 99]), SamplingParams(max_tokens=50)) == 50


def test_no_more_beginnings_are_remembered_than_allowed() -> None:
    lengths = OutputLengths(max_beginnings=10)
    for i in range(100):
        lengths.record(lengths.beginnings(list(range(i, i + 100))), 5)
    assert len(lengths._by_beginning) == 10


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_forecast_peak_is_never_below_what_happens(sequences: list[tuple[int, int]]) -> None:
    """Played out token by token: each takes a block when its last is full, and gives all its own back at its end."""
    block_size = 4
    growths = [Growth(num_tokens=n, most_blocks=-(-n // block_size), num_own=own) for n, own in sequences]
    forecast = peak_growth(growths, block_size=block_size)
    for now in range(61):
        held = sum(min(-(-now // block_size), g.most_blocks) if now <= g.num_tokens else -g.num_own for g in growths)
        assert held <= forecast or forecast == 0
    assert forecast <= sum(g.most_blocks for g in growths)


# -- windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [5, 16, 40, 100])
def test_blocks_out_of_every_window_are_freed(window: int) -> None:
    schedule = Schedule.of(num_blocks=512, window=window, max_num_batched_tokens=64, max_num_seqs=4)
    for i in range(6):
        schedule.add(f"{i}", _prompt(i, 300), length=500, n=2 if i == 3 else 1)
    most = (window + 64) // 16 + 3

    def check(_plan: StepPlan) -> None:
        for seq in schedule.scheduler.batch.running.values():
            assert seq.num_held_blocks <= most
            first_seen = max(0, seq.num_computed - window + 1)
            assert seq.num_dropped <= first_seen // 16

    schedule.run(after_step=check)
    assert schedule.scheduler.counters.kv_usage_peak < 0.25
    assert schedule.scheduler.counters.preemptions == 0


def test_a_window_lets_more_sequences_run_together() -> None:
    steps = {}
    for window in (None, 32):
        schedule = Schedule.of(num_blocks=80, window=window, max_num_batched_tokens=64, max_model_len=1024)
        for i in range(20):
            schedule.add(f"{i}", _prompt(i, 60), length=500, max_tokens=500)
        schedule.run()
        steps[window] = schedule.num_steps
    assert steps[32] * 3 < steps[None]


def test_blocks_freed_by_a_window_are_offered_only_while_they_hold_what_they_held() -> None:
    schedule = Schedule.of(num_blocks=32, window=20, max_num_batched_tokens=64, max_model_len=512)
    prompt = _prompt(1, 300)
    schedule.add("first", prompt, length=40)
    schedule.run()
    cached = len(schedule.scheduler.cache.match(prompt, None).block_ids)
    assert cached > 0, "freed blocks stay cached while there is room"
    for i in range(2, 5):
        schedule.add(f"{i}", _prompt(i, 300), length=40)
    schedule.run()
    match = schedule.scheduler.cache.match(prompt, None)
    for index, block_id in enumerate(match.block_ids):
        node = schedule.scheduler.cache.tree._node_by_block[block_id]
        assert node.tokens == tuple(prompt[16 * index : 16 * index + 16])
    schedule.add("again", prompt, length=5)
    schedule.run()


# -- what preemption costs -----------------------------------------------------------------------------------


def _watched(seconds: float, *, num_running: int, num_fitting: int) -> str | None:
    """Twelve steps of a second, each of which lost ``seconds`` to preemption."""
    watch = PreemptionWatch(bytes_per_block=1 << 20, max_num_seqs=16)
    cost = PreemptionCost(seconds=seconds, num_blocks_moved=40, num_fitting=num_fitting)
    said = [watch.record_step(num_running=num_running, seconds=1.0, cost=cost) for _ in range(12)]
    return next((warning for warning in said if warning is not None), None)


def test_a_warning_says_when_preemption_hurts_and_what_to_set() -> None:
    warning = _watched(0.5, num_running=16, num_fitting=12)
    assert warning is not None
    assert "50% of the time" in warning
    assert "set max_num_seqs to 12 (it is 16)" in warning
    assert "400 KV blocks (400 MiB)" in warning


def test_no_warning_where_fewer_sequences_would_do_less() -> None:
    assert _watched(0.2, num_running=16, num_fitting=8) is None, "half the sequences are worse than a fifth of the time"
    assert _watched(0.01, num_running=16, num_fitting=16) is None, "not worth a word"


def test_the_price_of_a_token_is_the_slope_of_the_steps_not_their_mean() -> None:
    times = StepTimes()
    for num_tokens in (16, 512, 16, 20, 300, 16, 512) * 20:
        times.record(num_tokens, 0.05 + 0.0001 * num_tokens)
    assert times.seconds_per_token == pytest.approx(0.0001, rel=0.01)
