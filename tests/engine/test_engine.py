"""Engine behaviour with a tiny model: sharing, preemption, sampling, limits, failure."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import pytest

from kvq import LLM, SamplingParams
from kvq.engine.engine import Engine
from kvq.engine.errors import ConfigError, DoesNotFit, InvalidParameter, ModelError, PromptTooLong, StepFailed
from kvq.engine.request import FinishReason, RequestOutput
from kvq.engine.swap_space import SwapSpace
from tests.models import engine_config

KV = 64 << 20


def _llm(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), kv_cache_memory=KV, **settings)


def _tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in output.outputs] for output in outputs]


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts in groups of four with a common prefix, in random order."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(5, 40_000) for _ in range(rng.randrange(1, 90))] for _ in range(count // 4 + 1)]
    prompts = [prefixes[i // 4] + [rng.randrange(5, 40_000) for _ in range(rng.randrange(1, 20))] for i in range(count)]
    rng.shuffle(prompts)
    return prompts


def _params(count: int) -> list[SamplingParams]:
    """Greedy and seeded rows side by side."""
    return [
        SamplingParams(
            temperature=0 if i % 2 else 0.9,
            top_p=0.95 if i % 3 else 1.0,
            seed=i,
            max_tokens=5 + i % 23,
            ignore_eos=True,
        )
        for i in range(count)
    ]


def test_an_engine_that_is_dropped_gives_its_cache_back(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")  # transformers' modules call our attention, and keep it for good
    llm = _llm(tiny)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2))
    store = weakref.ref(llm.engine._runner._store)
    del llm
    gc.collect()
    assert store() is None


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 7, "max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"block_size": 8},
        {"num_gpu_blocks_override": 9, "max_model_len": 140},
        {"num_gpu_blocks_override": 20, "max_model_len": 140, "enable_prefix_caching": False},
    ],
    ids=["one-at-a-time", "chunked", "without-sharing", "blocks-of-8", "tiny-cache", "preempted"],
)
def test_64_rows_answer_the_same_whatever_the_batch(tiny: Path, settings: dict[str, object]) -> None:
    prompts, params = _prompts(64), _params(64)
    expected = _tokens(_llm(tiny).generate(prompts, params))
    order = list(range(64))
    random.Random(7).shuffle(order)
    llm = _llm(tiny, **settings)
    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert _tokens(outputs) == [expected[i] for i in order]
    llm.engine.check_integrity()
    assert llm.stats().kv_usage == 0


def test_interleaved_groups_compute_each_distinct_prefix_once(tiny: Path) -> None:
    rng = random.Random(3)
    prefixes = [[rng.randrange(5, 40_000) for _ in range(200)] for _ in range(10)]
    suffixes = [[rng.randrange(5, 40_000) for _ in range(rng.randrange(3, 25))] for _ in range(220)]
    prompts = [prefixes[i % 10] + suffix for i, suffix in enumerate(suffixes)]
    llm = _llm(tiny)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
    stats = llm.stats()
    distinct = 10 * 200 + sum(map(len, suffixes))
    # A prefix that ends inside a block is copied from the first full block that begins like it.
    assert distinct <= stats.computed_prompt_tokens <= distinct + 10 * 16
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.cached_prompt_tokens == stats.prompt_tokens - stats.computed_prompt_tokens


def test_a_small_cache_still_computes_each_group_once(tiny: Path) -> None:
    rng = random.Random(4)
    prefixes = [[rng.randrange(5, 40_000) for _ in range(320)] for _ in range(6)]
    prompts = [prefixes[i % 6] + [rng.randrange(5, 40_000) for _ in range(10)] for i in range(72)]
    llm = _llm(tiny, num_gpu_blocks_override=64, max_model_len=400)  # room for three prefixes of six
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    distinct = 6 * 320 + 72 * 10
    assert distinct / llm.stats().computed_prompt_tokens >= 0.95


def test_preemption_loses_no_token_and_every_request_ends(tiny: Path) -> None:
    engine = Engine.load(engine_config(tiny, num_gpu_blocks_override=9, max_model_len=140))
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for i in range(6):
        engine.add_request(str(i), [100 + i] * 30, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[output.request_id] = output
        engine.check_integrity()
    assert {len(o.outputs[0].token_ids) for o in outputs.values()} == {100}
    assert engine.stats().preemptions > 0
    assert sum(o.metrics.preemptions for o in outputs.values()) == engine.stats().preemptions


def test_a_swapped_sequence_goes_on_exactly_where_it_was(tiny: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = [[100 + i] * 30 for i in range(6)]
    expected = _tokens(_llm(tiny).generate(prompts, params))
    engine = Engine.load(engine_config(tiny, num_gpu_blocks_override=18, max_model_len=140, swap_space=0.1))
    engine._scheduler.preempted._swap_space._seconds_per_block = 0.0  # so that swapping always pays
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        outputs |= {o.request_id: o for o in engine.step()}
        engine.check_integrity()
    assert _tokens([outputs[str(i)] for i in range(6)]) == expected
    stats = engine.stats()
    assert 0 < stats.swapped_in <= stats.swapped_out, "what was still cached need not come back"
    assert stats.computed_prompt_tokens == sum(map(len, prompts)), "nothing was computed again"


def test_swapping_is_chosen_only_where_it_is_cheaper() -> None:
    space = SwapSpace(10, seconds_per_block=1.0)
    space.record_step(num_tokens=100, seconds=100.0)
    assert space.pays(num_tokens=33, num_blocks=3)
    assert not space.pays(num_tokens=5, num_blocks=3)
    assert not space.pays(num_tokens=1000, num_blocks=11), "more than there is room for"
    space.store(1, num_tokens=100, num_blocks=9)
    assert not space.pays(num_tokens=33, num_blocks=3)
    space.forget(1)
    space.forget(1)
    assert space.pays(num_tokens=33, num_blocks=3)


def test_arrival_order_can_be_had_to_compare(tiny: Path) -> None:
    rng = random.Random(4)
    prefixes = [[rng.randrange(5, 40_000) for _ in range(320)] for _ in range(6)]
    prompts = [prefixes[i % 6] + [rng.randrange(5, 40_000) for _ in range(10)] for i in range(36)]
    computed = {}
    for policy in ("prefix", "fcfs"):
        llm = _llm(tiny, num_gpu_blocks_override=64, max_model_len=400, scheduling_policy=policy)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
        computed[policy] = llm.stats().computed_prompt_tokens
    assert computed["fcfs"] > 3 * computed["prefix"]


def test_n_samples_share_the_prompt_and_differ(tiny: Path) -> None:
    llm = _llm(tiny)
    (output,) = llm.generate([[9] * 37], SamplingParams(n=5, temperature=1.0, seed=1, max_tokens=8))
    assert [c.index for c in output.outputs] == [0, 1, 2, 3, 4]
    assert len({c.token_ids for c in output.outputs}) == 5
    assert llm.stats().computed_prompt_tokens == 37
    (alone,) = llm.generate([[9] * 37], SamplingParams(n=1, temperature=1.0, seed=1, max_tokens=8))
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_drawn_seed_is_reported_and_reproduces_the_row(tiny: Path) -> None:
    llm = _llm(tiny)
    (first,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=10))
    (again,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=10, seed=first.metrics.seed))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_stop_strings_are_found_across_token_borders_and_cut(tiny: Path) -> None:
    llm = _llm(tiny)
    free = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    stop = free.text[11:16]
    position = free.text.index(stop)
    (cut,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30, stop=(stop,)))
    assert cut.outputs[0].text == free.text[:position]
    assert cut.outputs[0].finish_reason is FinishReason.STOP
    assert cut.outputs[0].stop_reason == stop
    (kept,) = llm.generate(
        [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30, stop=(stop,), include_stop_str_in_output=True)
    )
    assert kept.outputs[0].text == free.text[: position + len(stop)]


def test_max_tokens_is_exact_and_stop_token_ids_stop(tiny: Path) -> None:
    llm = _llm(tiny)
    for limit in (1, 2, 17):
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == limit
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
    third = output.outputs[0].token_ids[2]
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=17, stop_token_ids=(third,)))
    assert output.outputs[0].token_ids[-1] == third
    assert len(output.outputs[0].token_ids) <= 3


def test_without_max_tokens_the_room_that_is_left_is_used(tiny: Path) -> None:
    llm = _llm(tiny, max_model_len=64)
    (output,) = llm.generate([[5] * 40], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 24


def test_bad_requests_are_refused_by_name_and_hurt_nobody(tiny: Path) -> None:
    engine = Engine.load(engine_config(tiny, max_model_len=64))
    engine.add_request("good", [5] * 10, SamplingParams(temperature=0, max_tokens=3))
    with pytest.raises(PromptTooLong, match=r"64.*") as too_long:
        engine.add_request("long", [5] * 64, SamplingParams())
    assert (too_long.value.num_tokens, too_long.value.limit) == (64, 64)
    with pytest.raises(InvalidParameter, match="logit_bias"):
        engine.add_request("bias", [5], SamplingParams(logit_bias={10**6: 1.0}))
    with pytest.raises(InvalidParameter, match="token ids"):
        engine.add_request("ids", [-1], SamplingParams())
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert [o.request_id for o in outputs] == ["good"]


def test_an_aborted_request_gives_back_what_it_has_and_its_blocks(tiny: Path) -> None:
    engine = Engine.load(engine_config(tiny))
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    engine.add_request("a", [5] * 20, params)
    engine.add_request("b", [6] * 20, params)
    for _ in range(4):
        engine.step()
    output = engine.abort_request("a")
    assert output is not None
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert len(output.outputs[0].token_ids) == 4
    assert engine.abort_request("a") is None
    engine.check_integrity()
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.stats().kv_usage == 0


def test_a_failed_step_is_rolled_back_and_computed_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(engine_config(tiny))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = _tokens(_llm(tiny).generate([[7] * 30, [7] * 30 + [8]], params))
    engine.add_request("a", [7] * 30, params)
    engine.add_request("b", [7] * 30 + [8], params)
    engine.step()
    start = engine._runner.start
    monkeypatch.setattr(engine._runner, "start", lambda plan: 1 / 0)
    with pytest.raises(StepFailed, match="division by zero"):
        engine.step()
    engine.check_integrity()
    monkeypatch.setattr(engine._runner, "start", start)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        outputs |= {o.request_id: o for o in engine.step()}
    assert _tokens([outputs["a"], outputs["b"]]) == expected


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"gpu_memory_utilization": 1.0}, ConfigError, "gpu_memory_utilization.*below 1"),
        ({"max_model_length": 10}, ConfigError, "did you mean max_model_len"),
        ({"block_size": 17}, ConfigError, "block_size.*power of two"),
        ({"max_model_len": 4096}, DoesNotFit, "max_model_len.*2048"),
        ({"max_model_len": 2048, "num_gpu_blocks_override": 10}, DoesNotFit, "set max_model_len to 160"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, ConfigError, "max_num_batched_tokens"),
        ({"kv_cache_memory": 1 << 50}, DoesNotFit, "kv_cache_memory"),
        ({"device": "cuda"}, ConfigError, "device"),
    ],
)
def test_impossible_settings_are_refused_by_name(
    tiny: Path, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(tiny), **settings)


def test_a_model_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        LLM(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("setting", ["model", "tokenizer", "speculative_model"])
def test_a_hub_that_cannot_be_reached_is_asked_once(setting: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        ModelError, match=rf"^{setting}: there is no folder org/nope, and the hub cannot be asked for it"
    ):
        LLM(**{"model": str(tiny), setting: "org/nope"})  # transformers itself asks for a minute, and says it otherwise


@pytest.mark.parametrize("setting", ["model", "tokenizer", "speculative_model"])
@pytest.mark.parametrize("name", ["./nowhere", "nowhere.gguf", "package:nowhere", "package:no.where", "package:"])
def test_what_is_not_there_is_said_of_the_setting_that_names_it(setting: str, name: str, tiny: Path) -> None:
    with pytest.raises((ModelError, ConfigError), match=rf"^{setting}: (there is no f|the Python package '.*' is not)"):
        LLM(**{"model": str(tiny), setting: name})


def test_penalties_and_bias_change_the_choice(tiny: Path) -> None:
    llm = _llm(tiny)
    plain = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids
    banned = plain[0]
    (biased,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12, logit_bias={banned: -100.0}))
    assert banned not in biased.outputs[0].token_ids
    (wide,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1e6))
    assert len(set(wide.outputs[0].token_ids)) == len(wide.outputs[0].token_ids)


def test_logprobs_are_those_of_the_model(tiny: Path) -> None:
    llm = _llm(tiny)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 4
    for entry, token_id in zip(logprobs, output.outputs[0].token_ids, strict=True):
        assert entry.token_id == token_id == entry.top[0].token_id
        assert entry.logprob == pytest.approx(entry.top[0].logprob)
        assert entry.logprob <= 0
