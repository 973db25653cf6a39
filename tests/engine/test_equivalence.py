"""The engine's greedy answers are transformers' own, token for token, however they are batched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kvq import LLM, SamplingParams
from kvq.engine.admission import Admission
from kvq.engine.request import RequestOutput
from tests.models import DEMO_MODEL

NUM_OUTPUT_TOKENS = 12

_SENTENCES = (
    "The river rose in the night and by morning the lower fields were under water.",
    "A compiler turns a program into instructions that a processor can follow.",
    "In 1858 the first telegraph cable was laid across the Atlantic, and failed within weeks.",
    "Bread is made of flour, water, salt and time; the rest is patience.",
    "Light takes about eight minutes and twenty seconds to reach us from the Sun.",
)
_LENGTHS = (5, 6, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129, 200, 255, 300, 401, 511)
_LONG_LENGTHS = (777, 1024, 1500)


pytestmark = pytest.mark.usefixtures("two_threads")


@dataclass(frozen=True)
class Expected:
    prompts: list[list[int]]
    answers: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Prompts of 5 to 1,500 tokens, some of which share prefixes, and transformers' answers to each alone."""
    from transformers import AutoModelForCausalLM

    from kvq.engine.tokenizer import ModelSource
    from tests.models import demo_tokenizer

    assert DEMO_MODEL is not None
    source = ModelSource.resolve(DEMO_MODEL)
    network = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32, **source.load_arguments)
    text = " ".join(_SENTENCES * 30)
    ids = demo_tokenizer()(text)["input_ids"]
    prompts = [ids[:n] for n in _LENGTHS + _LONG_LENGTHS]
    prompts += [[*ids[: 40 * i], *demo_tokenizer()(f"Question {i}: why?")["input_ids"]] for i in range(1, 7)]
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            output = network.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_OUTPUT_TOKENS,
                min_new_tokens=NUM_OUTPUT_TOKENS,
                do_sample=False,
            )
            answers.append(tuple(output[0, len(prompt) :].tolist()))
    return Expected(prompts=prompts, answers=answers)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    return LLM(DEMO_MODEL or "", max_model_len=2048)


def _answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def _assert_equal(outputs: list[RequestOutput], expected: Expected) -> None:
    """min_new_tokens bars the end token in transformers; where we drew it, the rest may differ."""
    assert len(outputs) >= 30
    for got, want, prompt in zip(_answers(outputs), expected.answers, expected.prompts, strict=True):
        assert got == want, f"prompt of {len(prompt)} tokens"


PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, min_tokens=NUM_OUTPUT_TOKENS)


def test_batched_together_with_prefix_sharing(llm: LLM, expected: Expected) -> None:
    _assert_equal(llm.generate(expected.prompts, PARAMS), expected)
    assert llm.stats().cached_prompt_tokens > 0


def test_each_alone(llm: LLM, expected: Expected) -> None:
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in expected.prompts]
    _assert_equal(outputs, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        {"block_size": 32, "max_num_batched_tokens": 1600},
        {"block_size": 4, "max_num_seqs": 5},
        {"async_scheduling": True, "max_num_batched_tokens": 256, "max_num_seqs": 20},
    ],
    ids=["without-sharing", "chunked", "whole-prefill", "small-blocks", "ahead"],
)
def test_whatever_the_settings(expected: Expected, settings: dict[str, int]) -> None:
    llm = LLM(DEMO_MODEL or "", max_model_len=2048, **settings)
    _assert_equal(llm.generate(expected.prompts, PARAMS), expected)


def test_with_a_cache_so_small_that_sequences_are_preempted(
    expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Admission foresees answers this short, and would leave room for them.
    monkeypatch.setattr(Admission, "_expected_growth", lambda *_: 0)
    llm = LLM(
        DEMO_MODEL or "",
        max_model_len=1520,
        num_gpu_blocks_override=380,
        block_size=4,
        enable_prefix_caching=False,
        speculative_method="none",  # guesses end some sequences sooner, by the clock
    )
    _assert_equal(llm.generate(expected.prompts, PARAMS), expected)
    assert llm.stats().preemptions > 0
    llm.engine.check_integrity()


def test_with_the_plain_pytorch_kernels(expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    llm = LLM(DEMO_MODEL or "", max_model_len=2048)
    _assert_equal(llm.generate(expected.prompts, PARAMS), expected)
