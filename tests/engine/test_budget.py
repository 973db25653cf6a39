"""The memory formula, and refusals that name a setting and a number that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvq.engine.budget import KVMemory, MemoryBudget, available_cpu_memory, num_host_blocks
from kvq.engine.config import EngineConfig
from kvq.engine.errors import DoesNotFit
from kvq.engine.memory_plan import MemoryPlan
from kvq.engine.model import Model
from kvq.engine.model_shape import ModelShape
from kvq.engine.sizing import KVShape, kv_budget_bytes, paged_utilisation, reserved_utilisation, safe_concurrency
from tests.models import engine_config, tiny_llama_config, write_model

GB = 10**9
# 40 layers, hidden size 4096 with full multi-head attention, fp16.
SEVEN_B = KVShape(num_layers=40, num_kv_heads=32, key_dim=128, value_dim=128)
BYTES_PER_TOKEN = SEVEN_B.bytes_per_token("float16")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 512,
    "pad_token_id": 0,
}


def test_the_worked_example_of_the_formula() -> None:
    assert round(BYTES_PER_TOKEN / 1e6, 3) == 0.655
    assert round(2048 * BYTES_PER_TOKEN / GB, 2) == 1.34
    assert round(8 * 2048 * BYTES_PER_TOKEN / GB, 1) == 10.7


def test_grouped_query_attention_takes_the_share_of_its_kv_heads() -> None:
    grouped = KVShape(num_layers=40, num_kv_heads=8, key_dim=128, value_dim=128)
    assert grouped.bytes_per_token("float16") * 4 == BYTES_PER_TOKEN


def test_reserving_the_longest_length_wastes_most_of_the_memory_and_blocks_do_not() -> None:
    used = [500] * 10
    assert round(10 * 2048 * BYTES_PER_TOKEN / GB, 1) == 13.4
    assert round(sum(used) * BYTES_PER_TOKEN / GB, 1) == 3.3
    assert reserved_utilisation(used, reserved_length=2048) == pytest.approx(3.3 / 13.4, abs=0.01)
    assert 0.3 <= reserved_utilisation([620, 700, 800, 1000], reserved_length=2048) <= 0.5
    assert paged_utilisation(used, block_size=16) > 0.9


def test_the_worked_examples_of_safe_concurrency() -> None:
    kv = kv_budget_bytes(memory_bytes=80 * GB, utilization=0.9, weight_bytes=14 * GB)
    assert kv == 58 * GB
    assert safe_concurrency(kv_bytes=kv, bytes_per_token=BYTES_PER_TOKEN, length=8000) == 11  # 58 GB / 5.2 GB
    small = kv_budget_bytes(memory_bytes=40 * GB, utilization=0.9, weight_bytes=14 * GB, activation_bytes=2 * GB)
    assert 4 <= safe_concurrency(kv_bytes=small, bytes_per_token=BYTES_PER_TOKEN, length=4096) <= 8
    assert safe_concurrency(kv_bytes=small, bytes_per_token=BYTES_PER_TOKEN, length=8192) < 4


FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen3Config": {},
    "Gemma3TextConfig": {"sliding_window": 11},
    "Phi3Config": {},
    "GptOssConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2Config": {},
    "GPTNeoXConfig": {},
    "DeepseekV3Config": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_of_a_configuration_is_what_the_loaded_model_takes(family: str, tmp_path: Path) -> None:
    config_class = getattr(transformers, family)
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    own = FAMILIES[family]
    hf_config = config_class(**{k: v for k, v in {**SIZES, **own}.items() if k in known or k in own})
    shape = ModelShape.of(hf_config)
    folder = write_model(tmp_path, hf_config)
    model = Model.load(engine_config(folder), device=torch.device("cpu"), dtype=torch.float32)
    assert shape.kv.bytes_per_token("float32") == model.bytes_per_token(torch.float32)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert shape.num_parameters == sum(p.numel() for p in network.parameters())
    assert shape.vocab_size == model.vocab_size
    assert shape.max_position_embeddings == model.max_position_embeddings


def test_a_configuration_is_read_without_weights(tmp_path: Path) -> None:
    tiny_llama_config().save_pretrained(tmp_path)
    shape = ModelShape.load(EngineConfig(model=str(tmp_path)))
    assert shape.kv == KVShape(num_layers=2, num_kv_heads=2, key_dim=16, value_dim=16)


def test_a_configuration_of_two_sets_of_frequencies_is_read_up_to_where_the_first_ends() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    sizes = {**SIZES, "max_position_embeddings": 512, "original_max_position_embeddings": 64, "pad_token_id": 0}
    shape = ModelShape.of(transformers.Phi3Config(**sizes, rope_parameters=rope))
    assert shape.max_position_embeddings == 64
    planned = MemoryPlan.of(EngineConfig(model="m", device="cpu"), shape, memory_bytes=1 << 30)
    assert planned.max_model_len == 64
    too_long = MemoryPlan.of(EngineConfig(model="m", device="cpu", max_model_len=65), shape, memory_bytes=1 << 30)
    assert "set it to 64 or less" in (too_long.problem or "")


def test_a_plan_refuses_int8_for_families_that_the_engine_refuses() -> None:
    config = EngineConfig(model="m", device="cpu", quantization="int8")
    llama, gemma = (
        MemoryPlan.of(config, ModelShape.of(family(**SIZES)), memory_bytes=1 << 30).problem
        for family in (transformers.LlamaConfig, transformers.Gemma3TextConfig)
    )
    assert llama is None
    assert "not for Gemma3ForCausalLM" in (gemma or "")


# -- refusals ----------------------------------------------------------------------------------------------


def plan(memory: KVMemory, *, bytes_per_token: int = 100, bytes_per_sequence: int = 0, **settings: Any) -> MemoryBudget:
    return MemoryBudget.plan(
        EngineConfig(model="m", **settings),
        bytes_per_token=bytes_per_token,
        memory=memory,
        model_limit=4096,
        bytes_per_sequence=bytes_per_sequence,
    )


def cpu(available_bytes: int, most_bytes: int | None = None) -> KVMemory:
    return KVMemory(available_bytes=available_bytes, most_bytes=most_bytes or available_bytes)


def number(setting: str, err: DoesNotFit) -> str:
    """The number that a refusal proposes for ``setting``."""
    match = re.search(rf"{setting} to ([0-9.]+)", str(err))
    assert match is not None, str(err)
    return match[1].rstrip(".")


def test_a_length_beyond_the_model_is_refused_with_the_models_own() -> None:
    with pytest.raises(DoesNotFit, match="set it to 4096 or less") as refused:
        plan(cpu(10**9), max_model_len=5000)
    assert refused.value.setting == "max_model_len"


def test_a_length_that_does_not_fit_is_refused_with_one_that_does_and_the_memory_it_needs() -> None:
    memory = cpu(100 * 1000, most_bytes=10**9)
    with pytest.raises(DoesNotFit) as refused:
        plan(memory, max_model_len=2000)
    assert refused.value.setting == "max_model_len"
    shorter = int(number("max_model_len", refused.value))
    assert plan(memory, max_model_len=shorter).max_model_len == shorter == 992
    more = int(number("kv_cache_memory", refused.value))
    assert plan(cpu(more), max_model_len=2000).max_model_len == 2000


def test_max_model_len_is_named_before_the_memory_and_that_before_max_num_seqs() -> None:
    memory = cpu(100 * 1000 + 64 * 1000, most_bytes=10**9)
    with pytest.raises(DoesNotFit) as refused:
        plan(memory, max_model_len=1500, bytes_per_sequence=1000, max_num_seqs=64)
    text = str(refused.value)
    places = [text.index(f"{name} to ") for name in ("max_model_len", "kv_cache_memory", "max_num_seqs")]
    assert places == sorted(places)
    fewer = int(number("max_num_seqs", refused.value))
    assert plan(memory, max_model_len=1500, bytes_per_sequence=1000, max_num_seqs=fewer).num_tokens >= 1500


def test_no_memory_at_all_is_refused_with_a_size_that_works() -> None:
    with pytest.raises(DoesNotFit, match="no memory is left for the KV cache") as refused:
        plan(cpu(50, most_bytes=10**9))
    assert refused.value.setting == "kv_cache_memory"
    plan(cpu(int(number("kv_cache_memory", refused.value))))


def test_a_gpu_whose_share_is_used_up_is_refused_with_a_share_that_works() -> None:
    def gpu(utilization: float) -> KVMemory:
        return KVMemory.of_gpu(total_bytes=10 * GB, utilization=utilization, taken_bytes=6 * GB)

    with pytest.raises(DoesNotFit) as refused:
        plan(gpu(0.5), bytes_per_token=10**6)
    assert refused.value.setting == "gpu_memory_utilization"
    share = float(number("gpu_memory_utilization", refused.value))
    assert 0.6 < share <= 0.62
    plan(gpu(share), bytes_per_token=10**6)


def test_where_no_share_of_a_gpu_is_enough_none_is_proposed() -> None:
    full = KVMemory.of_gpu(total_bytes=10 * GB, utilization=0.9, taken_bytes=10 * GB)
    with pytest.raises(DoesNotFit, match="no value of it is enough: take a smaller dtype, model or block_size"):
        plan(full)


def test_running_sequences_that_leave_no_room_are_refused_with_a_number_that_does() -> None:
    memory = cpu(100 * 1000)
    with pytest.raises(DoesNotFit) as refused:
        plan(memory, bytes_per_sequence=1000, max_num_seqs=128)
    assert refused.value.setting == "max_num_seqs"
    fewer = int(number("max_num_seqs", refused.value))
    assert plan(memory, bytes_per_sequence=1000, max_num_seqs=fewer).num_blocks >= 1


def test_blocks_that_are_not_there_are_refused_with_those_that_are() -> None:
    with pytest.raises(DoesNotFit, match="at most 62 fit"):
        plan(cpu(100 * 1000), num_gpu_blocks_override=63)
    with pytest.raises(DoesNotFit, match="raise num_gpu_blocks_override to 13"):
        plan(cpu(100 * 1000), num_gpu_blocks_override=10, max_model_len=200)


def test_more_cpu_memory_than_is_free_is_refused_with_what_is_safe() -> None:
    with pytest.raises(DoesNotFit, match="set it to 800 or less"):
        available_cpu_memory(EngineConfig(model="m", kv_cache_memory=2000), free_bytes=1000)


@pytest.mark.parametrize("gib", [9.0, float("inf")])
def test_more_swap_space_than_the_host_has_free_is_refused_with_what_is_safe(gib: float) -> None:
    config = EngineConfig(model="m", swap_space=gib)
    with pytest.raises(
        DoesNotFit, match=r"swap_space: .* 8,192 MiB of host memory are free; set it to 6.4 \(GiB\) or less"
    ):
        num_host_blocks(config, block_bytes=1 << 20, free_bytes=8 << 30)
    assert num_host_blocks(EngineConfig(model="m", swap_space=6.4), block_bytes=1 << 20, free_bytes=8 << 30) == 6553


def test_no_more_is_taken_than_all_sequences_at_full_length_can_fill() -> None:
    budget = plan(cpu(10**9), max_model_len=160, max_num_seqs=4)
    assert budget.num_blocks == 4 * 10 + 1
