"""``deterministic``: the same tokens whatever runs beside a request, however, on every path that computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvq import LLM, SamplingParams
from kvq.engine.admission import Admission
from kvq.engine.rotary import RotaryTable
from tests.models import FAMILY_SIZES, LATENT, byte_tokenizer, write_model

VOCAB_SIZE = 320
NUM_ROWS = 64
_EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 100}
# Its shared expert has a gate that PyTorch computes.
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}

# Family, its own sizes, whether the compiled kernels are there, settings.
PATHS: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {
    "fused": ("LlamaConfig", {}, True, {}),
    "no-compiler": ("LlamaConfig", {}, False, {"deterministic": True}),
    "eight-bit-kv": (
        "Gemma3TextConfig",
        {"sliding_window": 11},
        True,
        {"deterministic": True, "kv_cache_dtype": "int8"},
    ),
    "experts": ("Qwen2MoeConfig", _SHARED, True, {"deterministic": True}),
    "bfloat16": ("Qwen2Config", {}, True, {"deterministic": True, "dtype": "bfloat16", "kv_cache_dtype": "int8"}),
}
SMALL = {"num_gpu_blocks_override": 40, "max_model_len": 48}
# What else is changed in each run; the rows are shuffled in all of them.
RUNS: dict[str, dict[str, Any]] = {
    "chunked, nothing shared": {"max_num_batched_tokens": 70, "max_num_seqs": 70, "enable_prefix_caching": False},
    "preempted and swapped": {**SMALL, "swap_space": 0.01},
}
MORE_RUNS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "preempted and computed again": SMALL,
    "guessed ahead": {"speculative_method": "ngram", "speculative_always": True},
    "in order of arrival": {"scheduling_policy": "fcfs", "max_num_seqs": 9, "max_num_batched_tokens": 13},
}


def _rows() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 24 tokens, half of which share beginnings; greedy, and seeded with every way to draw."""
    draw = random.Random(5)
    beginnings = [[draw.randrange(6, VOCAB_SIZE - 60) for _ in range(n)] for n in (8, 13, 17)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},  # to the last bit
        {"temperature": 0.9},
        {"temperature": 1.1, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 30, "repetition_penalty": 1.1},
    ]
    rows = []
    for i in range(NUM_ROWS):
        own = [draw.randrange(6, VOCAB_SIZE - 60) for _ in range(1 + i % 7)]
        prompt = beginnings[i % 3] + own if i % 2 else own * (1 + i % 3)
        params = SamplingParams(**ways[i % 4], seed=i, max_tokens=3 + i % 4, ignore_eos=True, n=1 + (i % 16 == 5))
        rows.append((prompt, params))
    return rows


ROWS = _rows()


def _answers(llm: LLM, order: list[int]) -> dict[int, list[Any]]:
    """Token ids and log-probabilities of each row's answers, computed together in this order."""
    outputs = llm.generate([ROWS[i][0] for i in order], [ROWS[i][1] for i in order])
    llm.engine.check_integrity()
    return {i: [(c.token_ids, c.logprobs) for c in output.outputs] for i, output in zip(order, outputs, strict=True)}


def _shuffled(seed: int) -> list[int]:
    order = list(range(NUM_ROWS))
    random.Random(seed).shuffle(order)
    return order


@pytest.mark.parametrize("path", PATHS)
def test_rows_have_the_same_tokens_whatever_runs_beside_them_and_however(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, sizes, compiled, settings = PATHS[path]
    monkeypatch.setenv("KVQ_CPU_KERNELS", str(int(compiled)))
    config = getattr(transformers, family)(**{**FAMILY_SIZES, "vocab_size": VOCAB_SIZE, **sizes})
    folder = write_model(tmp_path, config, tokenizer=byte_tokenizer())
    common = {"device": "cpu", "kv_cache_memory": 16 << 20, "max_num_seqs": 128, "block_size": 4, **settings}
    together = LLM(str(folder), **common)
    expected = _answers(together, list(range(NUM_ROWS)))
    monkeypatch.setattr(Admission, "_expected_growth", lambda *_: 0)  # it foresees answers this short
    runs = {**RUNS, **MORE_RUNS} if path == "fused" else RUNS
    for seed, (name, changes) in enumerate(runs.items()):
        llm = LLM(str(folder), **{**common, **changes})
        llm.engine._scheduler.preempted._swap_space._seconds_per_block = 0.0  # swapping always pays
        assert _answers(llm, _shuffled(seed)) == expected, name
        stats = llm.stats()
        assert (stats.preemptions > 0) == ("preempted" in name), name
        assert (stats.swapped_out > 0) == ("swapped" in name), name
    # Two workers: each computes what it happens to get, the second with a cache of its own and the first's still warm.
    order = _shuffled(99)
    halves = _answers(together, order[::2]) | _answers(LLM(str(folder), **common), order[1::2])
    assert halves == expected


# Where module by module is on compiled kernels; 100: not a multiple of what a vector register holds.
EXACT_FAMILIES: dict[str, dict[str, Any]] = {
    "GemmaConfig": {},
    "Gemma2Config": {"sliding_window": 11, "query_pre_attn_scalar": 16},
    "Gemma3TextConfig": {"sliding_window": 11},
    "GPT2Config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 100},
    "GPTNeoXConfig": {},
    "GraniteConfig": {},
    "Olmo2Config": {},
    "Phi3Config": {},
    "SmolLM3Config": {"no_rope_layers": [1, 0]},
    "StableLmConfig": {},
    "MixtralConfig": _EXPERTS,
    "Qwen3MoeConfig": _EXPERTS,
    "GraniteMoeConfig": _EXPERTS,
    "GptOssConfig": {**_EXPERTS, "sliding_window": 11},
    "DeepseekV3Config": {**LATENT, "n_routed_experts": 10, "moe_intermediate_size": 100},
}


def _family(folder: Path, family: str, **sizes: Any) -> Path:
    config = getattr(transformers, family)(**{**FAMILY_SIZES, "vocab_size": VOCAB_SIZE, **sizes})
    return write_model(folder, config, tokenizer=byte_tokenizer())


@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_families_on_compiled_modules_have_the_same_bits_by_default(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _family(tmp_path, family, intermediate_size=100, **EXACT_FAMILIES[family])
    common = {"device": "cpu", "kv_cache_memory": 16 << 20, "max_num_seqs": 128, "block_size": 4}
    llm = LLM(str(folder), **common)
    model = llm.engine._runner._model
    assert (model.is_exact, model.by_row) == (True, False)
    expected = _answers(llm, list(range(NUM_ROWS)))
    monkeypatch.setattr(Admission, "_expected_growth", lambda *_: 0)  # it foresees answers this short
    for seed, name in enumerate(("chunked, nothing shared", "preempted and computed again")):
        again = LLM(str(folder), **{**common, **{**RUNS, **MORE_RUNS}[name]})
        assert _answers(again, _shuffled(seed)) == expected, name
        assert (again.stats().preemptions > 0) == ("preempted" in name), name


def test_it_is_on_where_it_costs_nothing_and_off_where_it_would(tmp_path: Path) -> None:
    for family, sizes, exact in (
        ("LlamaConfig", {}, True),
        ("Gemma3TextConfig", {}, True),
        ("Qwen2MoeConfig", _SHARED, False),
    ):
        folder = _family(tmp_path / family, family, **sizes)
        model = LLM(str(folder), device="cpu", kv_cache_memory=8 << 20).engine._runner._model
        assert (model.is_exact, model.by_row) == (exact, False), family


def test_a_position_has_the_same_cosines_in_whatever_step_it_comes() -> None:
    config = transformers.LlamaConfig(**{**FAMILY_SIZES, "max_position_embeddings": 5000})
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    table = RotaryTable(module)
    ids = torch.arange(4999)
    whole = torch.cat(table.rows(ids), dim=1)
    for n in (1, 2, 3, 63):
        assert torch.equal(torch.cat(table.rows(ids[:n]), dim=1), whole[:n])
        assert torch.equal(torch.cat(table.rows(ids[-n:]), dim=1), whole[-n:])
    cos, sin = module(torch.empty(0), position_ids=ids[None])
    assert torch.allclose(whole, torch.cat([cos[0], sin[0]], dim=1), atol=1e-6)
