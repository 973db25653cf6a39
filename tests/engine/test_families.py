"""Model families: each answers as transformers' own ``generate`` does, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvq import LLM, SamplingParams
from kvq.engine.errors import DoesNotFit, ModelError
from tests.models import FAMILY_SIZES, LATENT, byte_tokenizer, demo_tokenizer, tiny_llama_config, write_model

VOCAB_SIZE = 320
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWS: dict[str, Any] = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 96}

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 13},
    "Qwen2Config": {},
    "Qwen3Config": {},
    "Qwen3MoeConfig": {**_EXPERTS, "moe_intermediate_size": 32},
    "MixtralConfig": _EXPERTS,
    "Gemma2Config": {**_WINDOWS, "query_pre_attn_scalar": 16},
    "Gemma3TextConfig": {**_WINDOWS, "query_pre_attn_scalar": 16},
    "Phi3Config": {},
    "GraniteConfig": {},
    "GraniteMoeConfig": _EXPERTS,
    "SmolLM3Config": {"no_rope_layers": [1, 0]},  # 0: a layer without rotary embedding
    "Olmo2Config": {},
    "StableLmConfig": {},
    "GPT2Config": _GPT2,
    "GPTNeoXConfig": {},
    "GptOssConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "DeepseekV3Config": LATENT,
    "DeepseekV2Config": {**LATENT, "num_local_experts": 4},
    "HunYuanMoEV1Config": {**_EXPERTS, "moe_topk": 2},
}
# Each seed has other weights and other lengths; together they reach from 1 to 300.
LENGTHS_BY_SEED = {0: (1, 15, 33, 129, 300), 1: (2, 16, 31, 64, 200), 2: (3, 17, 100, 150, 299)}
NUM_OUTPUT_TOKENS = 8


def _config(family: str) -> Any:
    return getattr(transformers, family)(**{**FAMILY_SIZES, "vocab_size": VOCAB_SIZE, **FAMILIES[family]})


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Prompts of these lengths, of which none begins like another, and three that share beginnings with the longest."""
    prompts = [[(37 * i + 7 * j * j + 3 * j) % (VOCAB_SIZE - 8) + 6 for j in range(n)] for i, n in enumerate(lengths)]
    return prompts + [[*prompts[-1][:n], 7 + n, 9] for n in (16, 40, 120)]


def _generated(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What transformers answers to each prompt alone."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_OUTPUT_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
            answers.append(tuple(out[0, len(prompt) :].tolist()))
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_the_models_own(family: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    for seed, lengths in LENGTHS_BY_SEED.items():
        folder = write_model(tmp_path / str(seed), _config(family), seed=seed, tokenizer=byte_tokenizer())
        prompts = _prompts(lengths)
        llm = LLM(str(folder), kv_cache_memory=16 << 20, device="cpu", max_num_batched_tokens=192)
        outputs = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == _generated(folder, prompts)
        assert llm.stats().cached_prompt_tokens >= 16 + 40
        (alone,) = llm.generate([prompts[2]], params)
        assert alone.outputs[0].token_ids == outputs[2].outputs[0].token_ids
        llm.engine.check_integrity()


_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "num_key_value_heads": 2,
}
_STATE_SPACE: dict[str, Any] = {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "shared_intermediate_size": 32,
    "num_key_value_heads": 2,
}
# With the layers in which it calls an attention of ours.
REFUSED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "BloomConfig": ({}, []),
    "FalconConfig": ({}, []),
    "MambaConfig": ({}, []),
    "FalconMambaConfig": ({}, []),
    "Qwen3NextConfig": ({**_EXPERTS, **_LINEAR}, [1]),
    "GraniteMoeHybridConfig": ({**_EXPERTS, **_STATE_SPACE}, [1]),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_with_attention_of_its_own_in_any_layer_is_refused_by_name(family: str, tmp_path: Path) -> None:
    sizes, called = REFUSED[family]
    common = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, family)(**common, **sizes)
    folder = write_model(tmp_path, config, tokenizer=byte_tokenizer())
    name = f"{family.removesuffix('Config')}ForCausalLM"
    with pytest.raises(ModelError, match=rf"{name} cannot be served.*called in layers {re.escape(str(called))},"):
        LLM(str(folder), kv_cache_memory=32 << 20, device="cpu")


def test_a_model_of_two_sets_of_frequencies_is_offered_at_the_lengths_of_the_first(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [3.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    config = transformers.Phi3Config(
        **{**FAMILY_SIZES, "vocab_size": VOCAB_SIZE}, rope_parameters=rope, original_max_position_embeddings=64
    )
    folder = write_model(tmp_path, config, tokenizer=byte_tokenizer())
    llm = LLM(str(folder), kv_cache_memory=16 << 20, device="cpu")
    assert llm.engine.max_model_len == 64
    prompts = [[(37 * i + 11 * j) % (VOCAB_SIZE - 8) + 6 for j in range(n)] for i, n in enumerate((1, 20, 55))]
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert answers == _generated(folder, prompts)
    with pytest.raises(DoesNotFit, match=r"max_model_len: is 65, but .* set it to 64 or less"):
        LLM(str(folder), kv_cache_memory=16 << 20, device="cpu", max_model_len=65)


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    tiny_llama_config().save_pretrained(tmp_path)
    demo_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), load_format="dummy", kv_cache_memory=32 << 20)
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
