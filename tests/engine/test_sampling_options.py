"""What each sampling option means, by its formula: on rows of known logits, and where an answer ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.engine.llm import LLM
from kvq.engine.request import CompletionOutput, FinishReason, SamplingParams
from kvq.engine.sampler import Sampler
from kvq.engine.step import SampledToken, SampleSpec

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -4.0])
PROMPT = (5, 0)
OUTPUT = (1, 1, 2)
NUM_DRAWS = 4_000


def spec(params: SamplingParams, seed: int = 0, output: Sequence[int] = ()) -> SampleSpec:
    token_ids = [*PROMPT, *output]
    return SampleSpec(
        params=params, seed=seed, index=0, position=len(token_ids), token_ids=token_ids, num_prompt=len(PROMPT)
    )


def draw(params: SamplingParams, *, seed: int = 0, output: Sequence[int] = (), eos: Sequence[int] = ()) -> SampledToken:
    return Sampler(eos).sample(LOGITS[None], ((1, (spec(params, seed, output),)),), {})[1][0]


def scores(*, output: Sequence[int] = (), **options: Any) -> list[float]:
    """Log-probabilities of all tokens after the options."""
    token = draw(SamplingParams(temperature=0, logprobs=len(LOGITS), **options), output=output)
    by_id = dict(token.top)
    return [by_id[i] for i in range(len(LOGITS))]


def expected(logits: torch.Tensor) -> Any:
    return pytest.approx(torch.log_softmax(logits, dim=-1).tolist(), abs=1e-5)


def shares(**options: Any) -> dict[int, float]:
    """How often each token is drawn, over many seeds."""
    params = SamplingParams(**options)
    counts = Counter(draw(params, seed=seed).token_id for seed in range(NUM_DRAWS))
    return {token_id: count / NUM_DRAWS for token_id, count in counts.items()}


def assert_drawn_as(found: dict[int, float], probabilities: torch.Tensor) -> None:
    """Within five standard deviations of what is expected."""
    for token_id, p in enumerate(probabilities.tolist()):
        assert abs(found.get(token_id, 0.0) - p) <= 5 * math.sqrt(p * (1 - p) / NUM_DRAWS), token_id
        assert p > 0 or token_id not in found


def only(kept: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    logits = torch.full_like(LOGITS, float("-inf"))
    logits[list(kept)] = LOGITS[list(kept)] / temperature
    return logits.softmax(dim=-1)


def test_temperature_divides_the_logits_and_zero_takes_the_best() -> None:
    assert draw(SamplingParams(temperature=0)).token_id == 0
    assert_drawn_as(shares(temperature=1.0), only(range(6)))
    assert_drawn_as(shares(temperature=2.5), only(range(6), 2.5))


@pytest.mark.parametrize("temperature", [9e-6, 1e-38, 1e-46, 5e-324])
def test_a_temperature_near_zero_takes_the_best(temperature: float) -> None:
    for logprobs in (None, 1):
        assert draw(SamplingParams(temperature=temperature, logprobs=logprobs)).token_id == 0
        params = SamplingParams(temperature=temperature, logprobs=logprobs, frequency_penalty=1.0)
        assert draw(params, output=[0, 0]).token_id == 1


def test_options_that_make_a_logit_infinite_fail_the_row() -> None:
    token = draw(SamplingParams(repetition_penalty=1e-300, logprobs=1), output=[0])
    assert token.failure == "the request's options give a token a logit of inf"


def test_top_k_keeps_the_k_best_and_zero_all() -> None:
    assert_drawn_as(shares(top_k=2), only([0, 1]))
    assert_drawn_as(shares(top_k=0), only(range(6)))
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=None)


def test_top_p_keeps_the_fewest_that_hold_the_mass() -> None:
    best = LOGITS.softmax(dim=-1).cumsum(dim=-1)
    assert_drawn_as(shares(top_p=float(best[1]) - 0.01), only([0, 1]))
    assert_drawn_as(shares(top_p=float(best[1]) + 0.01), only([0, 1, 2]))
    assert_drawn_as(shares(top_p=1e-6), only([0]))


def test_min_p_drops_what_is_too_far_below_the_best() -> None:
    assert_drawn_as(shares(min_p=math.exp(-1.6)), only([0, 1, 2]))  # 1.6 below the largest logit
    assert_drawn_as(shares(min_p=1.0), only([0]))


def test_presence_counts_once_and_frequency_each_time_and_neither_the_prompt() -> None:
    seen = torch.tensor([0.0, 1, 1, 0, 0, 0])
    times = torch.tensor([0.0, 2, 1, 0, 0, 0])
    assert scores(output=OUTPUT, presence_penalty=0.7) == expected(LOGITS - 0.7 * seen)
    assert scores(output=OUTPUT, frequency_penalty=-0.3) == expected(LOGITS + 0.3 * times)


def test_a_repetition_penalty_divides_what_is_positive_and_multiplies_the_rest_prompt_included() -> None:
    logits = LOGITS.clone()
    for token_id in {*PROMPT, *OUTPUT}:
        logits[token_id] = logits[token_id] / 1.5 if logits[token_id] > 0 else logits[token_id] * 1.5
    assert scores(output=OUTPUT, repetition_penalty=1.5) == expected(logits)


def test_a_bias_is_added() -> None:
    assert scores(logit_bias={3: 4.0, 0: -1.5}) == expected(LOGITS + torch.tensor([-1.5, 0, 0, 4.0, 0, 0]))


def test_a_bias_is_added_before_the_repetition_penalty() -> None:
    token_id = OUTPUT[0]
    logits = LOGITS.clone()
    logits[token_id] += 4.0
    for seen in {*PROMPT, *OUTPUT}:
        logits[seen] = logits[seen] / 1.5 if logits[seen] > 0 else logits[seen] * 1.5
    assert scores(output=OUTPUT, repetition_penalty=1.5, logit_bias={token_id: 4.0}) == expected(logits)


def test_the_end_is_barred_until_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1])
    assert draw(params, eos=[0], output=[4]).token_id == 2
    assert draw(params, eos=[0], output=[4, 4]).token_id == 0


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), device="cpu", kv_cache_memory=16 << 20, max_model_len=256)


def sample(llm: LLM, **options: Any) -> CompletionOutput:
    """The answer of a model that wants to end at once."""
    (eos,) = llm.engine.tokenizer.eos_token_ids
    params = SamplingParams(**{"temperature": 0, "max_tokens": 5, "logit_bias": {eos: 100.0}, **options})
    (output,) = llm.generate([[5, 6, 7]], params)
    return output.outputs[0]


def test_the_end_token_ends_an_answer_unless_it_is_ignored_or_too_early(llm: LLM) -> None:
    (eos,) = llm.engine.tokenizer.eos_token_ids
    ended = sample(llm)
    assert (ended.token_ids, ended.text, ended.finish_reason) == ((eos,), "", FinishReason.STOP)
    ignored = sample(llm, ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == ((eos,) * 5, FinishReason.LENGTH)
    late = sample(llm, min_tokens=3)
    assert len(late.token_ids) == 4
    assert eos not in late.token_ids[:3]
    assert late.finish_reason is FinishReason.STOP


def test_special_tokens_are_in_the_text_only_on_request(llm: LLM) -> None:
    (eos,) = llm.engine.tokenizer.eos_token_ids
    spelled = llm.engine.tokenizer.decode([eos], skip_special_tokens=False)
    assert sample(llm, ignore_eos=True).text == ""
    assert sample(llm, ignore_eos=True, skip_special_tokens=False).text == spelled * 5


def test_equal_seeds_draw_alike_and_samples_of_one_request_apart(llm: LLM) -> None:
    params = SamplingParams(seed=5, n=4, max_tokens=8, ignore_eos=True)
    first, again = ([s.token_ids for s in llm.generate([[5, 6, 7]], params)[0].outputs] for _ in range(2))
    assert first == again
    assert len(set(first)) == 4
