"""Guesses that the engine makes of its own accord cost next to nothing where they do not pay, and gain where they do.

Time is simulated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import LLM, SamplingParams
from kvq.engine.speculation import Payoff, Reach
from tests.models import tiny_llama_config, write_model

NUM_STEPS = 600
NUM_GUESSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Steps of ``fixed_s + token_s`` per token (a bound by memory, and one by arithmetic), guesses that are right by
    chance, and what it costs to make them."""

    num_decodes: int
    fixed_s: float
    token_s: float
    right: float
    guessing_s: float

    def step_s(self, num_tokens: int) -> float:
        return self.fixed_s + self.token_s * num_tokens


def gated(world: World, seed: int) -> tuple[float, float]:
    """Seconds for what the gate made of it, and for the same number of tokens without guesses."""
    draw, payoff = random.Random(seed), Payoff()
    reaches = {seq_id: Reach(num_tokens=NUM_GUESSES, kind=1) for seq_id in range(world.num_decodes)}
    spent_s, num_tokens = 0.0, 0
    for _ in range(NUM_STEPS):
        lengths = payoff.allot(reaches, world.num_decodes) if payoff.may_pay(world.num_decodes) else {}
        num_guesses, depth = sum(lengths.values()), max(lengths.values(), default=0)
        seconds = world.step_s(world.num_decodes + num_guesses)
        guessing_s = world.guessing_s * depth
        payoff.record_step(
            num_decodes=world.num_decodes,
            num_guesses=num_guesses,
            seconds=seconds,
            guessing_s=guessing_s,
            depth=max(depth, 1),
        )
        for seq_id, length in lengths.items():
            num_right = next((i for i in range(length) if draw.random() >= world.right), length)
            payoff.record_guess(seq_id, 1, num_right=num_right, num_guesses=length, num_decodes=world.num_decodes)
            num_tokens += num_right
        num_tokens += world.num_decodes
        spent_s += seconds + guessing_s
    return spent_s, num_tokens * world.step_s(world.num_decodes) / world.num_decodes


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    world=st.builds(
        World,
        num_decodes=st.sampled_from([1, 2, 8, 32]),
        fixed_s=st.sampled_from([0.0, 0.002, 0.02]),
        token_s=st.sampled_from([0.0001, 0.002]),
        right=st.floats(0.0, 1.0),
        guessing_s=st.sampled_from([0.0, 0.0005, 0.01]),
    ),
    seed=st.integers(0, 9),
)
def test_the_gate_loses_no_more_than_a_hundredth_and_a_few_steps_and_guesses(world: World, seed: int) -> None:
    with_guesses_s, without_s = gated(world, seed)
    assert with_guesses_s <= 1.01 * without_s + 4 * world.step_s(world.num_decodes) + 6 * world.guessing_s


@pytest.mark.parametrize(("num_decodes", "least"), [(1, 2.0), (8, 1.3)])
def test_the_gate_gains_where_steps_are_bound_by_memory_and_guesses_are_right(num_decodes: int, least: float) -> None:
    world = World(num_decodes=num_decodes, fixed_s=0.02, token_s=0.0005, right=0.9, guessing_s=0.0001)
    with_guesses_s, without_s = gated(world, 1)
    assert without_s / with_guesses_s > least


@pytest.mark.parametrize(
    "chosen",
    [
        {"speculative_method": "ngram", "speculative_always": True},
        {"speculative_always": True},
        {},
        {"async_scheduling": True, "speculative_always": True},
        {"speculative_method": "none", "speculative_always": True},
    ],
    ids=["always", "always, by default", "by default", "by default, steps running ahead", "off"],
)
def test_guesses_are_counted_for_each_request_and_off_by_a_setting(chosen: dict[str, object], tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path, tiny_llama_config())), kv_cache_memory=16 << 20, max_model_len=256, **chosen)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([[3, 4, 5, 6] * 9, [7] * 16], params)
    stats = llm.stats()
    assert sum(output.metrics.num_draft_tokens for output in outputs) == stats.num_draft_tokens
    assert sum(output.metrics.num_accepted_tokens for output in outputs) == stats.num_accepted_tokens
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    off = "async_scheduling" in chosen or chosen.get("speculative_method") == "none"
    if off or "speculative_always" in chosen:
        assert (stats.num_draft_tokens == 0) is off
