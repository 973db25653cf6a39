"""Equal deterministic requests are computed once, and nobody notices but the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvq.engine.dedup import Deduplicator
from kvq.engine.engine import Engine
from kvq.engine.llm import LLM
from kvq.engine.request import FinishReason, Request, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.models import engine_config

PROMPT = list(range(100, 160))


@pytest.fixture(scope="module")
def shared_engine(tiny: Path) -> Engine:
    return Engine.load(engine_config(tiny, max_model_len=512))


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    assert not shared_engine.has_unfinished_requests
    return shared_engine


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests:
        outputs.update({output.request_id: output for output in engine.step()})
        engine.check_integrity()
    return outputs


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **changes})


def test_equal_greedy_requests_are_computed_once_whatever_their_seed(engine: Engine) -> None:
    before = engine.stats()
    for i in range(5):
        engine.add_request(f"r{i}", PROMPT, greedy(seed=i))
    outputs = finish(engine)
    after = engine.stats()
    assert len(outputs) == 5
    assert len({output.outputs[0].token_ids for output in outputs.values()}) == 1
    assert after.generated_tokens - before.generated_tokens == 8
    assert after.deduplicated_requests - before.deduplicated_requests == 4
    assert [outputs[f"r{i}"].served_from for i in range(5)] == [None, "r0", "r0", "r0", "r0"]
    assert [outputs[f"r{i}"].metrics.seed for i in range(5)] == [0, 1, 2, 3, 4]
    for i in range(1, 5):
        metrics = outputs[f"r{i}"].metrics
        assert (metrics.computed_tokens, metrics.cached_tokens, metrics.completion_tokens) == (0, len(PROMPT), 8)
        assert metrics.arrival_s <= metrics.first_scheduled_s <= metrics.first_token_s <= metrics.finished_s


def test_equal_seeds_are_equal_requests_and_no_seed_is_a_stream_of_its_own(engine: Engine) -> None:
    seeded = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True)
    free = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
    for name, params in {"a": seeded, "b": seeded, "c": free, "d": free}.items():
        engine.add_request(name, PROMPT, params)
    outputs = finish(engine)
    assert [outputs[name].served_from for name in "abcd"] == [None, "a", None, None]
    assert outputs["a"].outputs == outputs["b"].outputs
    assert outputs["c"].outputs[0].token_ids != outputs["d"].outputs[0].token_ids


@pytest.mark.parametrize(
    "other",
    [
        {"max_tokens": 9},
        {"stop": ("x",)},
        {"logprobs": 1},
        {"logit_bias": {5: 1.0}},
        {"bad_words": ("x",)},
        {"n": 2},
        {"structured_outputs": StructuredOutputsParams(choice=["yes"])},
    ],
)
def test_another_option_is_another_request(engine: Engine, other: dict[str, Any]) -> None:
    engine.add_request("a", PROMPT, greedy())
    engine.add_request("b", PROMPT, greedy(**other))
    assert [output.served_from for output in finish(engine).values()] == [None, None]


def test_a_late_request_attaches_to_one_that_is_running(engine: Engine) -> None:
    engine.add_request("a", PROMPT, greedy())
    engine.step()
    engine.step()
    engine.add_request("b", PROMPT, greedy())
    outputs = finish(engine)
    assert outputs["b"].served_from == "a"
    assert outputs["b"].metrics.ttft_s >= 0
    engine.add_request("c", PROMPT, greedy())  # nobody to attach to any more
    assert finish(engine)["c"].served_from is None


def test_when_the_leader_is_aborted_the_next_is_computed(engine: Engine) -> None:
    for name in "abc":
        engine.add_request(name, PROMPT, greedy())
    engine.step()
    aborted = engine.abort_request("a")
    assert aborted is not None
    assert aborted.outputs[0].finish_reason is FinishReason.ABORT
    engine.check_integrity()
    outputs = finish(engine)
    assert (outputs["b"].served_from, outputs["c"].served_from) == (None, "b")
    assert outputs["b"].outputs[0].token_ids == outputs["c"].outputs[0].token_ids


def test_a_waiting_follower_can_be_aborted(engine: Engine) -> None:
    for name in "abc":
        engine.add_request(name, PROMPT, greedy())
    aborted = engine.abort_request("b")
    assert aborted is not None
    assert aborted.request_id == "b"
    assert aborted.metrics.completion_tokens == 0
    assert set(finish(engine)) == {"a", "c"}
    for name in "abc":
        engine.add_request(name, PROMPT, greedy())
    for name in "abc":
        assert engine.abort_request(name) is not None
    assert not engine.has_unfinished_requests


def test_an_urgent_request_does_not_wait_for_a_patient_one(engine: Engine) -> None:
    engine.add_request("patient", PROMPT, greedy(), priority=5)
    engine.add_request("urgent", PROMPT, greedy(), priority=0)
    engine.add_request("later", PROMPT, greedy(), priority=5)
    outputs = finish(engine)
    assert (outputs["patient"].served_from, outputs["urgent"].served_from) == (None, None)
    assert outputs["later"].served_from == "urgent"


def test_it_can_be_turned_off(tiny: Path) -> None:
    llm = LLM(str(tiny), device="cpu", kv_cache_memory=16 << 20, max_model_len=256, enable_dedup=False)
    outputs = llm.generate([PROMPT] * 3, greedy())
    assert [output.served_from for output in outputs] == [None] * 3
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert llm.stats().deduplicated_requests == 0


def test_an_heir_that_is_less_urgent_than_another_equal_request_follows_it() -> None:
    dedup = Deduplicator()

    def request(name: str, priority: int) -> Request:
        return Request(request_id=name, prompt_token_ids=(1, 2), params=greedy(), priority=priority)

    assert not dedup.join(request("patient", 5), 0)
    assert dedup.join(request("waits", 5), 0)
    assert not dedup.join(request("urgent", 0), 0)
    assert dedup.succeed("patient") is None
    dedup.check_integrity()
    assert [f.request.request_id for f in dedup.finish("urgent")] == ["waits"]
    dedup.check_integrity()
