"""Sampling options: each does what its name says, for its own request only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.engine.errors import ConfigError, InvalidParameter, PromptTooLong
from kvq.engine.llm import LLM
from kvq.engine.request import FinishReason, PoolingParams, RequestOutput, SamplingParams
from kvq.engine.sampler import Sampler
from kvq.engine.step import SampleSpec
from tests.models import DEMO_MODEL, tiny_model

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), device="cpu", kv_cache_memory=32 << 20, max_model_len=1024)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(DEMO_MODEL or "", max_model_len=1024)


def one(llm: LLM, prompt: Any = PROMPT, **settings: Any) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**{"temperature": 0, "max_tokens": 12, **settings}))
    return output


# -- words and tokens that must not come ------------------------------------------------------------------


def test_a_bad_word_is_not_generated(demo: LLM) -> None:
    prompt = "The capital of France is"
    assert "Paris" in one(demo, prompt).outputs[0].text
    for word in ("Paris", " Paris"):
        assert "Paris" not in one(demo, prompt, bad_words=[word]).outputs[0].text


def test_a_bad_word_of_several_tokens_may_begin_but_not_end(llm: LLM) -> None:
    free = one(llm).outputs[0].token_ids
    tokenizer = llm.engine.tokenizer
    pair = next(
        tokenizer.decode(free[i : i + 2])
        for i in range(1, len(free) - 2)
        if free[i : i + 2] in tokenizer.bad_word_ids([tokenizer.decode(free[i : i + 2])])
    )
    first, last = next(ids for ids in tokenizer.bad_word_ids([pair]) if len(ids) == 2)
    barred = one(llm, bad_words=[pair]).outputs[0].token_ids
    assert first in barred
    assert all(barred[i : i + 2] != (first, last) for i in range(len(barred)))


def test_only_allowed_tokens_come(llm: LLM) -> None:
    tokens = one(llm, temperature=1.5, seed=2, n=4, allowed_token_ids=[100, 200, 300]).outputs
    assert {token for sample in tokens for token in sample.token_ids} <= {100, 200, 300}


@pytest.mark.parametrize("option", ["allowed_token_ids", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(llm: LLM, option: str) -> None:
    with pytest.raises(InvalidParameter, match=option):
        one(llm, **{option: [10**6]})


def test_options_that_leave_no_token_end_the_row_with_an_error(llm: LLM) -> None:
    (failed, fine) = llm.generate(
        [PROMPT, PROMPT],
        [
            SamplingParams(temperature=0, allowed_token_ids=[100], stop_token_ids=[100], min_tokens=2),
            SamplingParams(temperature=0, max_tokens=3),
        ],
    )
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert "no token is left" in str(failed.error)
    assert fine.outputs[0].token_ids == one(llm, max_tokens=3).outputs[0].token_ids


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_of_broken_logits_fails_alone(value: float) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = value
    logits[1, 5] = 1.0
    spec = SampleSpec(params=SamplingParams(temperature=0), seed=0, index=0, position=1, token_ids=[1], num_prompt=1)
    tokens = Sampler([2]).sample(logits, ((7, (spec,)), (8, (spec,))), {})
    assert tokens[7][0].failure is not None
    assert (tokens[8][0].token_id, tokens[8][0].failure) == (5, None)


# -- what no JSON is checked for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("n", value) for value in ("3", 2.5, None, True)),
        ("max_tokens", "8"),
        ("temperature", "hot"),
        ("temperature", None),
        ("repetition_penalty", math.inf),
        ("ignore_eos", 1),
        ("stop", [3]),
        ("stop", 3),
        ("bad_words", [1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("allowed_token_ids", [1.5]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "much"}),
        ("logit_bias", [5]),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{option: value})
    assert caught.value.param == option


@pytest.mark.parametrize(
    ("option", "value"), [("dimensions", 2.5), ("truncate_prompt_tokens", "4"), ("normalize", "yes")]
)
def test_an_option_of_an_embedding_of_a_wrong_type_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=option):
        PoolingParams(**{option: value})


def test_whole_floats_are_integers_and_none_is_no_list() -> None:
    assert SamplingParams(n=2.0, max_tokens=3.0, logit_bias={5.0: 1}) == SamplingParams(
        n=2, max_tokens=3, logit_bias={5: 1.0}
    )
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None) == SamplingParams()
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize("prompt", [[[1, "a"]], [[1.5]], [1.5], [None], [{"prompt_token_ids": [1]}]])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidParameter, match="must be text or a list of token ids"):
        llm.generate(prompt, SamplingParams(max_tokens=1))


def test_a_call_that_is_interrupted_leaves_nothing_for_the_next(llm: LLM) -> None:
    alone = one(llm).outputs[0].token_ids
    before = llm.stats().generated_tokens

    def give_up(_: RequestOutput) -> None:
        raise KeyboardInterrupt

    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 50, 50)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, [8, 9], PROMPT], params, on_output=give_up)
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_integrity()
    assert one(llm).outputs[0].token_ids == alone
    assert llm.stats().generated_tokens - before < 30


# -- where an answer ends --------------------------------------------------------------------------------


def test_a_stop_string_across_token_borders_is_left_out_or_kept(llm: LLM) -> None:
    free = one(llm, max_tokens=24)
    text, tokens = free.outputs[0].text, free.outputs[0].token_ids
    border = len(llm.engine.tokenizer.decode(tokens[:10]))
    stop = text[border - 2 : border + 2]
    start = text.find(stop)
    cut, kept = one(llm, max_tokens=24, stop=stop), one(llm, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert cut.outputs[0].text == text[:start]
    assert kept.outputs[0].text == text[: start + len(stop)]
    assert cut.outputs[0].stop_reason == kept.outputs[0].stop_reason == stop
    assert cut.outputs[0].token_ids == kept.outputs[0].token_ids == tokens[: len(cut.outputs[0].token_ids)]


def test_the_earliest_of_several_stop_strings_counts(llm: LLM) -> None:
    text = one(llm, max_tokens=24).outputs[0].text
    early, late = text[8:11], text[20:23]
    assert one(llm, max_tokens=24, stop=(late, early)).outputs[0].text == text[: text.find(early)]


def test_a_stop_string_that_came_before_min_tokens_does_not_count(llm: LLM) -> None:
    free = one(llm, max_tokens=24).outputs[0]
    decode = llm.engine.tokenizer.decode
    early, across = free.text[2:5], decode(free.token_ids[9:11])
    for min_tokens in (8, 10):
        kept = one(llm, max_tokens=24, stop=early, min_tokens=min_tokens).outputs[0]
        assert kept.token_ids == free.token_ids[: len(kept.token_ids)]
        assert len(kept.text) >= len(decode(free.token_ids[: min_tokens - 1]))
    ended = one(llm, max_tokens=24, stop=[early, across], min_tokens=11).outputs[0]
    assert (ended.text, ended.stop_reason) == (decode(free.token_ids[:9]), across)
    assert len(ended.token_ids) == 11


def test_a_stop_string_of_ten_kilobytes_is_no_trouble(llm: LLM) -> None:
    assert one(llm, stop="x" * 10_000).outputs[0].text == one(llm).outputs[0].text


def test_a_stop_token_is_in_the_text_only_on_request(llm: LLM) -> None:
    tokens = one(llm).outputs[0].token_ids
    stop = next(token for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
    decode = llm.engine.tokenizer.decode
    end = tokens.index(stop)
    without = one(llm, stop_token_ids=[stop]).outputs[0]
    assert (without.text, without.stop_reason) == (decode(tokens[:end]), stop)
    assert one(llm, stop_token_ids=[stop], include_stop_str_in_output=True).outputs[0].text == decode(tokens[: end + 1])


def test_without_max_tokens_an_answer_takes_the_room_that_is_left(tiny: Path) -> None:
    small = LLM(str(tiny), device="cpu", kv_cache_memory=8 << 20, max_model_len=40)
    (output,) = small.generate([PROMPT], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 40 - len(PROMPT)
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


# -- truncation ------------------------------------------------------------------------------------------


def test_truncation_keeps_the_last_tokens_in_every_call(llm: LLM) -> None:
    long = list(range(100, 160))
    assert one(llm, long, truncate_prompt_tokens=20).prompt_token_ids == tuple(long[-20:])
    assert one(llm, long, truncate_prompt_tokens=500).prompt_token_ids == tuple(long)
    messages = [{"role": "user", "content": "one two three four five six"}]
    (chat,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=4))
    assert chat.metrics.prompt_tokens == 4


def test_truncation_to_what_fits_leaves_room_for_max_tokens(llm: LLM) -> None:
    long = list(range(3, 3000))
    with pytest.raises(PromptTooLong):
        one(llm, long)
    output = one(llm, long, truncate_prompt_tokens=-1, max_tokens=24)
    assert output.prompt_token_ids == tuple(long[-1000:])
    assert len(output.outputs[0].token_ids) == 24


# -- log-probabilities -----------------------------------------------------------------------------------


def _expected_scores(llm: LLM, folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(network(torch.tensor([tokens])).logits[0], dim=-1)


def test_prompt_logprobs_are_the_models_own(llm: LLM, tiny: Path) -> None:
    prompt = [(7 * i) % 4000 + 5 for i in range(600)]  # three steps' worth of scored tokens
    output = one(llm, prompt, prompt_logprobs=3, max_tokens=2)
    scores = output.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert len(scores) == len(prompt)
    expected = _expected_scores(llm, tiny, prompt)
    for i, score in enumerate(scores[1:], 1):
        assert score is not None
        assert score.token_id == prompt[i]
        assert score.logprob == pytest.approx(float(expected[i - 1, prompt[i]]), abs=2e-3)
        assert [other.token_id for other in score.top] == expected[i - 1].topk(3).indices.tolist()
        assert score.rank == pytest.approx(int((expected[i - 1] > expected[i - 1, prompt[i]]).sum()) + 1, abs=20)


def test_prompt_logprobs_are_the_same_with_a_warm_cache_alone_or_in_a_batch(llm: LLM) -> None:
    prompts = [[11, 12, 13, *range(200, 300), i] for i in range(6)]
    scored = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    cold = [llm.generate([prompt], scored)[0] for prompt in prompts]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
    warm = llm.generate(prompts, scored)
    for a, b in zip(cold, warm, strict=True):
        assert a.prompt_logprobs is not None
        assert b.metrics.cached_tokens == 0
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert b.prompt_logprobs is not None
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert x is not None
            assert y is not None
            assert (x.token_id, x.rank) == (y.token_id, y.rank)
            assert x.logprob == pytest.approx(y.logprob, abs=1e-5)


def test_prompt_logprobs_survive_preemption(tiny: Path) -> None:
    roomy = LLM(str(tiny), device="cpu", num_gpu_blocks_override=100, max_model_len=200)
    tight = LLM(str(tiny), device="cpu", num_gpu_blocks_override=16, max_model_len=200)
    prompts = [[(13 * j + i) % 4000 + 5 for j in range(60)] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=90, prompt_logprobs=0)
    alone = [roomy.generate([prompt], params)[0] for prompt in prompts]
    tight.generate([[9, i] for i in range(20)], SamplingParams(max_tokens=1))  # teaches it to expect short answers
    together = tight.generate(prompts, params)
    assert tight.stats().preemptions > 0
    for a, b in zip(alone, together, strict=True):
        assert a.prompt_logprobs is not None
        assert b.prompt_logprobs is not None
        assert len(b.prompt_logprobs) == 60
        assert [t and t.token_id for t in a.prompt_logprobs] == [t and t.token_id for t in b.prompt_logprobs]
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    tight.engine.check_integrity()


def test_a_prompt_of_one_token_has_no_log_probability(llm: LLM) -> None:
    assert one(llm, [9], prompt_logprobs=2).prompt_logprobs == (None,)


def test_the_chosen_token_has_its_rank_and_bytes(llm: LLM) -> None:
    output = one(llm, temperature=2.0, seed=5, logprobs=2)
    assert output.outputs[0].logprobs is not None
    for entry in output.outputs[0].logprobs:
        assert entry.rank is not None
        assert entry.rank >= 1
        assert entry.raw == llm.engine.tokenizer.token_bytes(entry.token_id)
        assert [other.rank for other in entry.top] == [1, 2]
    assert b"".join(entry.raw for entry in output.outputs[0].logprobs).decode(
        "utf-8", "replace"
    ) == llm.engine.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=False)


# -- the model's own sampling options --------------------------------------------------------------------


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config asks for top_k 1 and a repetition penalty."""
    folder = tiny_model(tmp_path_factory.mktemp("opinionated"))
    wish = {"temperature": 0.7, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 3, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(wish))
    return folder


def test_the_models_generation_config_fills_what_a_request_leaves_open(opinionated: Path) -> None:
    llm = LLM(str(opinionated), device="cpu", kv_cache_memory=8 << 20, max_model_len=64)
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.repetition_penalty) == (0.7, 1, 1.3)
    assert defaults.max_tokens is None  # never a small hidden number
    assert llm.engine.defaults_for(SamplingParams(top_k=5), {"top_k"}) == {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
    }
    first, second = (llm.generate([PROMPT])[0].outputs[0].token_ids for _ in range(2))
    assert first == second
    assert len(first) > 3


def test_greedy_requests_take_nothing_from_the_model(opinionated: Path, llm: LLM) -> None:
    own = LLM(str(opinionated), device="cpu", kv_cache_memory=8 << 20, max_model_len=64)
    assert own.engine.defaults_for(SamplingParams(temperature=0), {"temperature"}) == {}
    assert one(own).outputs[0].token_ids == one(llm).outputs[0].token_ids


def test_the_models_generation_config_can_be_left_aside(opinionated: Path) -> None:
    llm = LLM(str(opinionated), device="cpu", kv_cache_memory=8 << 20, max_model_len=64, generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()


def test_a_generation_config_that_makes_no_sense_is_refused_by_name(opinionated: Path, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match=r"generation_config.*top_p"):
        LLM(str(folder), device="cpu", kv_cache_memory=8 << 20)
    with pytest.raises(ConfigError, match="must be auto or vllm"):
        LLM(str(folder), generation_config="none")
