"""Asynchronous scheduling: a step started before the tokens of the one before it are known changes no answer.

On a CPU a step is computed when it is started, so everything but the overlap is the same as on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import SamplingParams
from kvq.engine.admission import Admission
from kvq.engine.config import EngineConfig
from kvq.engine.cuda_graphs import StepGraphs, buckets
from kvq.engine.engine import Engine
from kvq.engine.errors import StepFailed
from kvq.engine.request import FinishReason, RequestOutput, StructuredOutputsParams
from kvq.engine.runner import RunningStep
from kvq.engine.step import StepPlan, StepResult
from tests.engine.schedules import Schedule
from tests.models import FAMILY_SIZES, write_model

KV = 64 << 20


def _engine(folder: Path, **settings: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(folder), kv_cache_memory=KV, **settings))


def _run(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    *,
    after_step: Callable[[int], None] = lambda number: None,
) -> list[RequestOutput | None]:
    """Outputs in order (None: aborted), the books checked after every step, and everything given back."""
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, param)
    outputs: dict[str, RequestOutput] = {}
    number = 0
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        number += 1
        after_step(number)
    assert engine.stats().kv_usage == 0
    return [outputs.get(str(i)) for i in range(len(prompts))]


def _seen(outputs: list[RequestOutput | None]) -> list[Any]:
    """All of an output that a user sees."""
    return [None if output is None else output.outputs for output in outputs]


def _workload(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Groups with a common prefix; greedy and seeded; ends by length, by token and by string; few rows that wait."""
    numbers = random.Random(count)
    prefixes = [[numbers.randrange(5, 4000) for _ in range(numbers.randrange(1, 90))] for _ in range(count // 4 + 1)]
    prompts = [[*prefixes[i // 4], *(numbers.randrange(5, 4000) for _ in range(1 + i % 19))] for i in range(count)]
    special: dict[int, dict[str, Any]] = {
        3: {"n": 3},
        9: {"logprobs": 2},
        14: {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        20: {"prompt_logprobs": 1},
        25: {"min_tokens": 3},
    }
    params = [
        SamplingParams(
            temperature=0 if i % 2 else 0.9,
            top_p=0.95 if i % 3 else 1.0,
            seed=i,
            max_tokens=1 + i % 23,
            ignore_eos=i % 5 > 0,
            **special.get(i, {}),
        )
        for i in range(count)
    ]
    order = list(range(count))
    numbers.shuffle(order)
    return [prompts[i] for i in order], [params[i] for i in order]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Any]:
    return _seen(_run(_engine(tiny), *_workload(48)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 5},
        {"max_num_seqs": 7, "max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 9, "max_model_len": 140},
        {"num_gpu_blocks_override": 20, "max_model_len": 140, "enable_prefix_caching": False, "swap_space": 0.1},
    ],
    ids=["together", "few-at-a-time", "chunked", "without-sharing", "tiny-cache", "swapped"],
)
def test_answers_are_those_of_the_synchronous_engine(
    tiny: Path, expected: list[Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "num_gpu_blocks_override" in settings:  # admission would foresee that answers do not fit
        monkeypatch.setattr(Admission, "_expected_growth", lambda *_: 0)
    engine = _engine(tiny, async_scheduling=True, **settings)
    engine._scheduler.preempted._swap_space._seconds_per_block = 0.0  # so that swapping always pays
    assert _seen(_run(engine, *_workload(48))) == expected
    stats = engine.stats()
    assert engine.num_ahead_steps > 0
    assert (stats.preemptions > 0) == ("num_gpu_blocks_override" in settings)
    assert (stats.swapped_in > 0) == ("swap_space" in settings)


def test_rows_that_need_nothing_on_the_host_run_ahead_in_every_step_but_the_first(tiny: Path) -> None:
    prompts = [[9 + i] * 40 for i in range(6)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=8 + i, ignore_eos=True) for i in range(6)]
    engine = _engine(tiny, async_scheduling=True)
    outputs = _run(engine, prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs if output is not None] == list(range(8, 14))
    assert engine.stats().steps == 13, "an end that is known beforehand costs no step in vain"
    assert engine.num_ahead_steps == 12


def test_a_step_in_vain_for_a_sequence_that_ended_changes_nothing(tiny: Path) -> None:
    free = _run(_engine(tiny), [[5, 6, 7]], [SamplingParams(temperature=0, max_tokens=30)])[0]
    assert free is not None
    answer, text = free.outputs[0].token_ids, free.outputs[0].text
    params = [
        SamplingParams(temperature=0, max_tokens=30, stop=(text[11:16],)),
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(answer[2],)),
        SamplingParams(temperature=0, max_tokens=30),
    ]
    prompts = [[5, 6, 7]] * 3
    synchronous, engine = _engine(tiny, enable_dedup=False), _engine(tiny, enable_dedup=False, async_scheduling=True)
    assert _seen(_run(engine, prompts, params)) == _seen(_run(synchronous, prompts, params))
    assert engine.stats().generated_tokens == synchronous.stats().generated_tokens
    (last,) = _run(engine, [[5, 6, 7]], [params[1]])
    assert last is not None
    assert last.outputs[0].finish_reason is FinishReason.STOP
    assert not engine._loop.is_running, "the step in vain was taken in"


def test_an_abort_while_a_step_runs_frees_everything_and_hurts_nobody(tiny: Path) -> None:
    prompts = [[5] * 20, [6] * 33, [5] * 20 + [8], [5] * 40]
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 4
    expected = _seen(_run(_engine(tiny), prompts, params))
    engine = _engine(tiny, async_scheduling=True, num_gpu_blocks_override=20, max_model_len=80)

    def abort(number: int) -> None:
        if number == 9:
            aborted = engine.abort_request("0")
            assert aborted is not None
            assert aborted.outputs[0].token_ids == expected[0][0].token_ids[: len(aborted.outputs[0].token_ids)]
            engine.check_integrity()
            engine.add_request("again", prompts[0], params[0])

    outputs = _run(engine, prompts, params, after_step=abort)
    assert _seen(outputs) == [None, *expected[1:]]
    engine.add_request("alone", [4] * 9, params[0])
    for _ in range(3):
        engine.step()
    engine.abort_request("alone")
    assert engine.has_unfinished_requests, "its step still runs"
    assert engine.step() == []
    assert not engine.has_unfinished_requests
    engine.check_integrity()


@pytest.mark.parametrize("fails", ["start", "wait"])
def test_a_step_that_fails_beside_another_is_computed_again(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    prompts = [[7] * 30, [7] * 30 + [8], [7] * 31]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    expected = _seen(_run(_engine(tiny), prompts, params))
    engine = _engine(tiny, async_scheduling=True)
    start, num_started, num_failed = engine._runner.start, 0, 0

    class Failing(RunningStep):
        def wait(self) -> StepResult:
            raise ZeroDivisionError

    def failing(plan: StepPlan) -> RunningStep:
        nonlocal num_started
        num_started += 1
        if num_started in (5, 6, 12) and fails == "start":
            raise ZeroDivisionError
        step = start(plan)
        return Failing(step.outcome) if num_started in (5, 12) and fails == "wait" else step

    monkeypatch.setattr(engine._runner, "start", failing)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, param)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except StepFailed:
            num_failed += 1
        engine.check_integrity()
    assert _seen([outputs[str(i)] for i in range(3)]) == expected
    assert num_failed == (1 if fails == "start" else 2), "a step ahead fails quietly: the one in its place tells"


def test_forms_and_guesses_are_computed_step_by_step(tiny: Path) -> None:
    form = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=("yes", "no")))
    engine = _engine(tiny, async_scheduling=True)
    _run(engine, [[5, 6, 7]], [form])
    assert engine.num_ahead_steps == 0
    guessing = _engine(tiny, async_scheduling=True, speculative_method="ngram", speculative_always=True)
    _run(guessing, [[5, 6, 7] * 5], [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)])
    assert guessing.num_ahead_steps == 0


def test_tokens_on_the_device_reach_the_inputs_of_captured_steps(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    prompts = [[*range(3, 35), 40 + i] for i in range(5)] + [[9, 8, 7], [5] * 20]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=6 + i, ignore_eos=True) for i in range(7)]
    expected = _seen(_run(_engine(tiny), prompts, params))
    engine = _engine(tiny, async_scheduling=True, max_model_len=256, max_num_seqs=16)
    runner = engine._runner
    model, store = runner._model, runner._store
    runner._graphs = StepGraphs(
        lambda inputs: model.forward(inputs, store).logits,
        shapes=buckets(max_num_seqs=16, max_model_len=256, grouped=False),
        block_size=store.block_size,
        padding_block=store.padding_block,
        capture=lambda call: call,
        device=torch.device("cpu"),
    )
    assert _seen(_run(engine, prompts, params)) == expected
    assert engine.num_graph_steps > 5
    assert engine.num_ahead_steps > 5


def test_sliding_windows_give_up_their_blocks_a_step_late(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**FAMILY_SIZES, sliding_window=13)
    folder = write_model(tmp_path, config)
    prompts = [[11 + i] * (5 + 20 * i) for i in range(4)]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 4
    settings = {"max_model_len": 160, "block_size": 4}
    engine = _engine(folder, async_scheduling=True, **settings)
    assert _seen(_run(engine, prompts, params)) == _seen(_run(_engine(folder, **settings), prompts, params))
    assert engine.num_ahead_steps > 20


@given(st.randoms(use_true_random=False), st.sampled_from([None, 20]), st.integers(6, 40))
@settings(max_examples=40, deadline=None)
def test_the_books_are_right_whatever_ends_is_aborted_or_fails(
    numbers: random.Random, window: int | None, num_blocks: int
) -> None:
    """A scheduler without a model, one step ahead: requests come, end unforeseen, are aborted; steps fail."""
    schedule = Schedule.of(
        num_blocks=num_blocks, block_size=4, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=24, window=window
    )
    waiting = [f"{i}" for i in range(12)]
    running: StepPlan | None = None
    scheduler = schedule.scheduler
    gone: set[str] = set()
    while waiting or running or scheduler.has_unfinished:
        if waiting and numbers.random() < 0.5:
            prompt = [numbers.randrange(2) for _ in range(numbers.randint(1, 14))]
            schedule.add(waiting.pop(), prompt, length=numbers.randint(1, 8), max_tokens=numbers.randint(1, 9))
        if scheduler.batch.states and numbers.random() < 0.05:
            gone.add(numbers.choice(list(scheduler.batch.states)))
            scheduler.abort(max(gone & set(scheduler.batch.states)))
        running = running or scheduler.plan()
        if running is None:
            continue
        ahead = scheduler.plan_ahead(running)
        scheduler.check_integrity()
        if numbers.random() < 0.05:
            scheduler.rollback(*(plan for plan in (running, ahead) if plan is not None))
            running = None
        else:
            schedule.book(running)
            running = ahead
            if running is not None and numbers.random() < 0.05:
                scheduler.rollback(running)
                running = None
        scheduler.check_integrity()
    assert set(schedule.ended) | gone == set(schedule.lengths)
    assert scheduler.cache.pool.num_referenced == 0
