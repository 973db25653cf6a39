"""Triton draws against the sampler's own. Run by ``test_interpreted.py``."""

from __future__ import annotations

import random

import pytest
import torch

from kvq.engine.request import SamplingParams
from kvq.engine.sampler import Sampler, stream_key
from kvq.engine.step import SampleSpec
from kvq.kernels.sampling import TritonDraws

OPTIONS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 3000, "top_p": 0.999},
]


def triton_draws(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int]) -> list[int]:
    vocab = logits.shape[1]
    tokens = TritonDraws().draw(
        logits,
        rows=list(range(len(logits))),
        temperature=[p.temperature for p in params],
        top_k=[min(p.top_k or vocab, vocab) for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        keys=[stream_key(seed, 1, 9) for seed in seeds],
    )
    return tokens.tolist()


def sampler_draws(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int]) -> list[int]:
    rows = tuple(
        (row, (SampleSpec(params=p, seed=seed, index=1, position=9, token_ids=[1, 2], num_prompt=1),))
        for row, (p, seed) in enumerate(zip(params, seeds, strict=True))
    )
    drawn = Sampler([]).sample(logits, rows, {})
    return [drawn[row][0].token_id for row in range(len(logits))]


@pytest.mark.parametrize("vocab", [1, 50, 2048, 5003])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_same_token_for_the_same_seed_sample_and_position(vocab: int, spread: float) -> None:
    torch.manual_seed(vocab)
    source = random.Random(vocab)
    params = [SamplingParams(temperature=source.choice([0.3, 1.0, 1.7]), **options) for options in OPTIONS]
    logits = torch.randn(len(params), vocab) * spread
    seeds = [source.randrange(1 << 62) for _ in params]
    assert triton_draws(logits, params, seeds) == sampler_draws(logits, params, seeds)


def test_a_row_is_drawn_alike_in_any_company_and_from_a_wider_tensor() -> None:
    torch.manual_seed(1)
    wide = torch.randn(6, 400)
    logits = wide[:, :300]
    params = [SamplingParams(temperature=0.8, top_p=0.9, top_k=50) for _ in range(6)]
    together = triton_draws(logits, params, list(range(6)))
    assert together == [triton_draws(logits[i : i + 1], params[:1], [i])[0] for i in range(6)]


def test_of_equal_logits_the_lower_ids_come_first() -> None:
    logits = torch.zeros(40, 3000)
    logits[:, 17] = 1.0
    params = [SamplingParams(temperature=1.0, top_k=3) for _ in range(40)]
    assert set(triton_draws(logits, params, list(range(40)))) == {17, 0, 1}


def test_barred_tokens_are_never_drawn_and_hopeless_rows_end() -> None:
    logits = torch.full((4, 100), float("-inf"))
    logits[0, 31] = -5.0
    logits[1] = float("nan")
    logits[2, :50] = float("nan")
    logits[2, 70] = 1.0
    params = [SamplingParams(temperature=1.0, top_p=0.5, top_k=10)] * 4
    drawn = triton_draws(logits, params, [0, 1, 2, 3])
    assert drawn[0] == 31
    assert drawn[2] == 70
    assert all(0 <= token < 100 for token in drawn)
