"""The profiling step: activations measured, the budget told, the model left as it was."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvq import LLM, SamplingParams
from kvq.engine.config import EngineConfig
from kvq.engine.model import Model
from kvq.engine.network import shortened
from kvq.engine.profiling import _lengths, _num_scored, measure_activations
from tests.models import FAMILY_SIZES, byte_tokenizer, engine_config, write_model

WIDE = 50_000  # columns of logits, so that they outweigh what else a process does


def load(folder: Path, **settings: Any) -> tuple[EngineConfig, Model]:
    config = engine_config(folder, **settings)
    return config, Model.load(config, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**{**FAMILY_SIZES, "num_hidden_layers": 3, "vocab_size": WIDE})
    return write_model(tmp_path_factory.mktemp("wide"), config, tokenizer=byte_tokenizer())


@pytest.mark.parametrize("compiled", [True, False])
def test_activations_are_at_least_the_logits_and_not_much_more(
    folder: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", str(int(compiled)))
    config, model = load(folder, max_num_seqs=100)
    logits = 256 * WIDE * 4  # a row for each sequence, and for each of 156 prompt tokens that are scored
    assert logits <= measure_activations(config, model, num_tokens=256) <= 4 * logits


def test_a_step_too_long_to_be_measured_quickly_counts_in_proportion(folder: Path) -> None:
    config, model = load(folder, max_num_seqs=100)
    assert measure_activations(config, model, num_tokens=4096) >= 8 * 100 * WIDE * 4


def test_the_profiling_step_has_as_many_tokens_and_sequences_as_a_step_may_have() -> None:
    assert _lengths(64, 5, None) == [1, 1, 1, 1, 60]
    assert _lengths(64, 5, 40) == [1, 1, 1, 21, 40]
    assert _lengths(3, 5, 40) == [1, 1, 1]
    assert _lengths(1000, 2, 40) == [40, 40]


def test_the_profiling_step_scores_as_many_prompt_tokens_as_a_step_may() -> None:
    assert _num_scored([1, 1, 157]) == [0, 0, 156]
    assert _num_scored([1, 40, 512]) == [0, 0, 256]
    assert _num_scored([1, 100, 200]) == [0, 57, 199]


@pytest.mark.parametrize("family", ["LlamaConfig", "GPT2Config", "Gemma3TextConfig"])
def test_a_shortened_network_is_whole_again(family: str) -> None:
    config = getattr(transformers, family)(**{**FAMILY_SIZES, "vocab_size": 320, "num_hidden_layers": 3})
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = network(ids).logits
        with shortened(network):
            assert not torch.equal(network(ids).logits, before)
        assert torch.equal(network(ids).logits, before)


def test_weights_are_counted_where_they_lie(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stored = sum(p.numel() * 4 for p in shape.parameters())
    head = WIDE * FAMILY_SIZES["hidden_size"] * 4
    _, fused = load(folder)
    assert stored + head <= fused.weight_bytes <= stored + 2 * head  # the head is packed for the kernels as well
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    _, plain = load(folder)
    assert stored <= plain.weight_bytes < stored + head


def test_an_engine_tells_its_budget_when_it_is_ready(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = LLM(str(folder), device="cpu", kv_cache_memory=8 << 20, max_model_len=256)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("engine ready")]
    budget = llm.engine.budget
    assert budget.activation_bytes >= 100 * WIDE * 4
    for part in ("weights=", "activations=", "kv_cache=8 MiB", f"blocks={budget.num_blocks}", "full_sequences="):
        assert part in line
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
