"""Model families: with our attention each gives the logits of its own eager attention, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvq import LLM, SamplingParams
from kvq.engine.errors import ModelError
from tests.models import demo_tokenizer, tiny_llama_config, write_model

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 13},
    "Qwen2Config": {},
    "Qwen3Config": {},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "MixtralConfig": {"num_local_experts": 4},
    "Gemma2Config": {"sliding_window": 11, "query_pre_attn_scalar": 16},
    "Gemma3TextConfig": {"sliding_window": 11, "query_pre_attn_scalar": 16},
    "Phi3Config": {},
    "GraniteConfig": {},
    "SmolLM3Config": {},
    "Olmo2Config": {},
    "StableLmConfig": {},
    "GptOssConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
}


def _config(family: str) -> Any:
    settings = {**_SIZES, "vocab_size": len(demo_tokenizer()), **FAMILIES[family]}
    return getattr(transformers, family)(**settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_the_models_own(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, _config(family))
    prompts = [[11, 12, 13], [*range(20, 57)], [*range(20, 70)], [7] * 16]
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
            )
            expected.append(tuple(out[0, len(prompt) :].tolist()))
    llm = LLM(str(folder), kv_cache_memory=32 << 20)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.parametrize("family", ["BloomConfig", "FalconConfig"])
def test_a_model_with_attention_of_its_own_is_refused_by_name(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, family)(
        vocab_size=len(demo_tokenizer()), hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    folder = write_model(tmp_path, config)
    with pytest.raises(ModelError, match=f"{family.removesuffix('Config')}ForCausalLM cannot be served"):
        LLM(str(folder), kv_cache_memory=32 << 20)


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    tiny_llama_config().save_pretrained(tmp_path)
    demo_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), load_format="dummy", kv_cache_memory=32 << 20)
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
