"""Keys and values held in fewer bits: what is computed, what it takes, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq import LLM, SamplingParams
from kvq.engine.errors import ConfigError
from kvq.engine.memory_plan import MemoryPlan
from kvq.engine.model_shape import ModelShape
from kvq.engine.request import RequestOutput
from kvq.engine.sizing import KVShape
from tests.models import engine_config

PROMPTS = [[5 + i * 7 % 900 for i in range(n)] + [30 + n] for n in (3, 16, 40)]
PARAMS = SamplingParams(temperature=0, n=2, max_tokens=10, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
# Largest error of a log-probability of the tiny model, whose logits reach about 8.
TOLERANCE_BY_DTYPE = {"fp16": 0.02, "bf16": 0.1, "int8": 0.1, "fp8": 0.6}


def _llm(folder: Path, dtype: str, **settings: object) -> LLM:
    return LLM(str(folder), kv_cache_memory=64 << 20, device="cpu", kv_cache_dtype=dtype, **settings)


def _scores(outputs: list[RequestOutput]) -> list[float]:
    return [entry.logprob for output in outputs for entry in (output.prompt_logprobs or ()) if entry is not None]


def _tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain_scores(tiny: Path) -> list[float]:
    return _scores(_llm(tiny, "auto").generate(PROMPTS, SCORED))


@pytest.mark.parametrize("dtype", TOLERANCE_BY_DTYPE)
def test_probabilities_stay_near_and_answers_whatever_the_batch(
    tiny: Path, dtype: str, plain_scores: list[float]
) -> None:
    llm = _llm(tiny, dtype)
    together = _tokens(llm.generate(PROMPTS, PARAMS))  # shared, forked and copied
    # Chunks, so that scored tokens attend to keys that were written steps before; and too few blocks for all.
    small = _llm(
        tiny,
        dtype,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_gpu_blocks_override=14,
        max_model_len=80,
        block_size=8,
        swap_space=0.01,
    )
    assert _scores(small.generate(PROMPTS, SCORED)) == pytest.approx(plain_scores, abs=TOLERANCE_BY_DTYPE[dtype])
    assert _tokens(small.generate(PROMPTS, PARAMS)) == together
    small.engine.check_integrity()


def test_scales_are_counted() -> None:
    shape = KVShape(num_layers=32, num_kv_heads=8, key_dim=128, value_dim=128)
    assert shape.bytes_per_token("bfloat16") == 32 * 2 * 8 * 128 * 2
    assert shape.bytes_per_token("int8") == shape.bytes_per_token("float8") == 32 * 2 * 8 * (128 + 4)
    assert "scales" in shape.formula("int8")


def test_the_plan_counts_what_the_engine_takes(tiny: Path) -> None:
    for dtype in ("bf16", "int8"):
        config = engine_config(tiny, kv_cache_dtype=dtype)
        planned = MemoryPlan.of(config, ModelShape.load(config)).bytes_per_token
        assert planned == _llm(tiny, dtype).engine.budget.bytes_per_token


def test_what_is_not_offered_is_refused_by_name(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*fp8_e5m2"):
        _llm(tiny, "fp8_e5m2")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        _llm(tiny, "int8", quantization="int8")
