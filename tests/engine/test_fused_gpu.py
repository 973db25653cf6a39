"""The decoder on a GPU's kernels computes what the network's own modules do; tried here on the reference kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvq import LLM, SamplingParams
from kvq.engine.attention import probe
from kvq.engine.request import RequestOutput
from tests.models import demo_tokenizer, tiny_llama_config, write_model

PROMPTS = [[*range(3, 35), 40 + i] for i in range(3)] + [[9, 8, 7]]
PARAMS = SamplingParams(temperature=0, n=2, max_tokens=8, ignore_eos=True, logprobs=0)


def _qwen3_config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(demo_tokenizer()),
        tie_word_embeddings=False,
    )


def _answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def _logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [token.logprob for output in outputs for sample in output.outputs for token in sample.logprobs or ()]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_layers_answer_as_the_modules(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    config = tiny_llama_config(attention_bias=True) if family == "llama" else _qwen3_config()
    llm = LLM(str(write_model(tmp_path, config)), kv_cache_memory=16 << 20, max_model_len=128)
    expected = llm.generate(PROMPTS, PARAMS)
    model = llm.engine._runner._model
    model.fuse_on_gpu(probe(model.network, model._attention), block_size=16)
    assert model._gpu is not None
    outputs = llm.generate(PROMPTS, PARAMS)  # finds its prefixes in the cache, copies the block where they end
    assert _answers(outputs) == _answers(expected)
    assert _logprobs(outputs) == pytest.approx(_logprobs(expected), abs=1e-4)


def test_the_roundings_of_many_layers_are_no_disagreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    config = tiny_llama_config(num_hidden_layers=96)
    config.initializer_range = 1.28 * config.hidden_size**-0.5  # as wide as 0.02 is with 4,096
    settings = {"dtype": "bfloat16", "load_format": "dummy", "kv_cache_memory": 16 << 20, "max_model_len": 128}
    model = LLM(str(write_model(tmp_path, config)), **settings).engine._runner._model
    model.fuse_on_gpu(probe(model.network, model._attention), block_size=16)
    assert model._gpu is not None


def test_a_network_that_computes_otherwise_is_left_to_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    llm = LLM(str(write_model(tmp_path, tiny_llama_config())), kv_cache_memory=16 << 20, max_model_len=128)
    model = llm.engine._runner._model
    model.network.model.norm.register_forward_hook(lambda _module, _inputs, output: output * 2)
    model.fuse_on_gpu(probe(model.network, model._attention), block_size=16)
    assert model._gpu is None
    assert "disagree" in caplog.text
