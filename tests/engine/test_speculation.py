"""Guessing tokens ahead changes how fast answers come, and nothing about them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvq import LLM, SamplingParams
from kvq.engine.config import EngineConfig
from kvq.engine.errors import ConfigError
from kvq.engine.request import RequestOutput
from kvq.engine.sequence import Sequence
from kvq.engine.speculation import Payoff, Reach, Speculator
from tests.models import FAMILY_SIZES, demo_tokenizer, tiny_llama_config, write_model

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 13},
    "Qwen3Config": {},
    "Gemma2Config": {"sliding_window": 11, "query_pre_attn_scalar": 16},
    "StableLmConfig": {},
}
PROMPTS = [[11, 12, 13], list(range(20, 57)), [*range(20, 70), 5], [7] * 16, [3, 4, 5, 6] * 9]


class Oracle:
    """Guesses what is known to come, wrongly now and then: every length of a right beginning occurs."""

    def __init__(self, answers: Mapping[tuple[tuple[int, ...], int], tuple[int, ...]], vocab_size: int) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._random = random.Random(1)

    def reach(self, seq: Sequence, limit: int) -> Reach | None:
        return Reach(num_tokens=self._random.randint(1, limit), kind=1)

    def propose(self, lengths: Mapping[Sequence, int]) -> dict[int, list[int]]:
        return {seq.seq_id: self._guess(seq, num_tokens) for seq, num_tokens in lengths.items()}

    def forget(self, seq_id: int) -> None:
        pass

    def _guess(self, seq: Sequence, num_tokens: int) -> list[int]:
        answer = self._answers[tuple(seq.token_ids[: seq.num_prompt]), seq.index]
        guess = [*answer[seq.num_output : seq.num_output + num_tokens]]
        guess += [self._random.randrange(self._vocab_size) for _ in range(num_tokens - len(guess))]
        if self._random.random() < 0.4:
            guess[self._random.randrange(num_tokens)] = self._random.randrange(self._vocab_size)
        return guess


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    """All together, the bookkeeping checked after every step."""
    done = {}
    for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(number), prompt, wanted)
    while llm.engine.has_unfinished_requests:
        done.update({output.request_id: output for output in llm.engine.step()})
        llm.engine.check_integrity()
    assert llm.stats().kv_usage == 0
    return [done[str(number)] for number in range(len(prompts))]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """All of an output that a user sees."""
    return [output.outputs for output in outputs]


def with_oracle(llm: LLM, plain: list[RequestOutput], num_tokens: int = 5) -> LLM:
    """The engine, guessing from ``plain`` answers."""
    known = {(out.prompt_token_ids, sample.index): sample.token_ids for out in plain for sample in out.outputs}
    speculator = Speculator(
        Oracle(known, len(demo_tokenizer())),
        num_tokens=num_tokens,
        max_model_len=llm.engine.max_model_len,
        clock=time.monotonic,
        payoff=None,
    )
    scheduler = llm.engine._scheduler
    scheduler._speculator = scheduler._booking._speculator = speculator
    return llm


def options(**common: Any) -> list[SamplingParams]:
    """Options that end, alter or describe answers, greedy and drawn."""
    given: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "min_tokens": 9, "ignore_eos": False},
        {"seed": 1},
        {"seed": 2, "n": 3, "top_k": 20},
        {"seed": 3, "top_p": 0.8, "logprobs": 1},
        {"seed": 4, "presence_penalty": 1.0, "logit_bias": {20: 5.0}},
        {"seed": 5, "bad_words": ("the", "a b")},
        {"temperature": 0, "prompt_logprobs": 1},
        {"seed": 6, "temperature": 0.2, "max_tokens": 2},
        {"temperature": 0, "max_tokens": 1},
        {"temperature": 0, "max_tokens": 7},
    ]
    return [SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **common, **options}) for options in given]


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    params = options()
    return [[*PROMPTS[i % len(PROMPTS)], 100 + i // len(PROMPTS)] for i in range(len(params))], params


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_llama_config())


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Callable[[int], list[RequestOutput]]:
    """The answers without guesses for a block size, which is part of the order in which the kernels sum."""
    return cache(lambda size: run(load(tiny_folder, speculative_method="none", block_size=size), *workload()))


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"kv_cache_memory": 16 << 20, "max_model_len": 256, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_answers(family: str, tmp_path: Path) -> None:
    settings = {**FAMILY_SIZES, "vocab_size": len(demo_tokenizer()), **FAMILIES[family]}
    folder = write_model(tmp_path, getattr(transformers, family)(**settings))
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 4 + [
        SamplingParams(seed=1, max_tokens=9)
    ]
    without = run(load(folder, speculative_method="none"), PROMPTS, params)
    by_ngrams = load(folder, speculative_method="ngram", speculative_always=True)
    assert answers(run(by_ngrams, PROMPTS, params)) == answers(without)
    by_oracle = with_oracle(load(folder), without)
    assert answers(run(by_oracle, PROMPTS, params)) == answers(without)
    assert by_oracle.stats().num_accepted_tokens > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 20, "max_num_seqs": 16},
        {"block_size": 4, "num_gpu_blocks_override": 26, "max_model_len": 100},
        {"block_size": 4, "num_gpu_blocks_override": 26, "max_model_len": 100, "swap_space": 0.01},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
        {"block_size": 4, "scheduling_policy": "fcfs"},
    ],
    ids=["plain", "chunked", "preempted", "swapped", "without-sharing", "small-blocks"],
)
def test_every_option_holds_whatever_the_settings(
    tiny_folder: Path, plain: Callable[[int], list[RequestOutput]], settings: dict[str, Any]
) -> None:
    without = plain(settings.get("block_size", 16))
    llm = with_oracle(load(tiny_folder, **settings), without)
    assert answers(run(llm, *workload())) == answers(without)
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    if "num_gpu_blocks_override" in settings:
        assert stats.preemptions > 0


def test_a_draft_model_of_the_same_vocabulary_guesses_what_comes(
    tiny_folder: Path, plain: Callable[[int], list[RequestOutput]]
) -> None:
    """The model is its own draft, and draws with the same noise."""
    llm = load(tiny_folder, speculative_model=str(tiny_folder), speculative_always=True)
    assert answers(run(llm, *workload())) == answers(plain(16))
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


def test_a_draft_model_of_another_vocabulary_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path, tiny_llama_config())
    tokenizer = transformers.AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match=r"speculative_model: .* has another vocabulary"):
        load(tiny_folder, speculative_model=str(other))


def test_settings_may_come_as_vllms_object(tiny_folder: Path) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 3}
    config = EngineConfig.from_mapping({"model": str(tiny_folder), "speculative_config": given})
    assert (config.speculative_method, config.num_speculative_tokens) == ("ngram", 3)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 5)
    with pytest.raises(ConfigError, match="unknown key 'depth'"):
        EngineConfig.from_mapping({"model": "m", "speculative_config": '{"depth": 3}'})


def test_guesses_stop_where_they_do_not_pay() -> None:
    payoff, reach = Payoff(), {seq_id: Reach(num_tokens=4, kind=2) for seq_id in range(64)}
    num_guessed = 0
    for _ in range(400):  # a step takes as long as it has tokens, and no guess is ever right
        lengths = payoff.allot(reach, 64) if payoff.may_pay(64) else {}
        guessed = sum(lengths.values())
        num_guessed += guessed
        depth = max(lengths.values(), default=0)
        seconds = (64 + guessed) / 1000
        payoff.record_step(num_decodes=64, num_guesses=guessed, seconds=seconds, guessing_s=0.0, depth=depth)
        for seq_id, length in lengths.items():
            payoff.record_guess(seq_id, 2, num_right=0, num_guesses=length, num_decodes=64)
    assert num_guessed <= 0.01 * 400 * 64


def test_guesses_go_on_where_they_pay() -> None:
    payoff, reach = Payoff(), {1: Reach(num_tokens=4, kind=2)}
    lengths: dict[int, int] = {}
    for _ in range(50):  # a step takes as long for five tokens as for one, and every guess is right
        lengths = payoff.allot(reach, 1) if payoff.may_pay(1) else {}
        guessed = lengths.get(1, 0)
        payoff.record_step(num_decodes=1, num_guesses=guessed, seconds=0.02, guessing_s=0.0, depth=guessed)
        if guessed:
            payoff.record_guess(1, 2, num_right=guessed, num_guesses=guessed, num_decodes=1)
    assert lengths == {1: 4}
