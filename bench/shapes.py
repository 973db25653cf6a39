"""Shapes: models of known sizes with random weights, for measurements where the words do not matter.

Owns a few published shapes and writing one as a folder an engine can load (``load_format="dummy"``): a config and a
tokenizer made here, no weights and nothing downloaded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_POSITIONS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only model of the Llama family."""

    name: str
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    model_type: str = "llama"

    @property
    def config(self) -> dict[str, Any]:
        """``config.json``."""
        architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": _MAX_POSITIONS,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "dtype": "bfloat16",
        }

    def write(self, folder: Path) -> Path:
        """A folder that loads with random weights."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, self.vocab)}
        backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
        backend.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        ).save_pretrained(path)
        return path


TINY = Shape(
    name="tiny", hidden=64, inner=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab=512, tied=True
)
SHAPES = {
    shape.name: shape
    for shape in (
        TINY,
        Shape(
            name="qwen3-0.6b",
            model_type="qwen3",
            hidden=1024,
            inner=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab=151936,
            tied=True,
        ),
        Shape(
            name="llama-1b",
            hidden=2048,
            inner=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            vocab=128256,
            tied=True,
        ),
        Shape(
            name="llama-7b",
            hidden=4096,
            inner=11008,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            vocab=32000,
        ),
        Shape(
            name="llama-8b",
            hidden=4096,
            inner=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab=128256,
        ),
    )
}


def random_prompts(lengths: Sequence[int], *, vocab: int, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Prompts of random token ids; the first ``shared`` tokens are the same in all."""
    source = random.Random(seed)
    prefix = [source.randrange(3, vocab) for _ in range(shared)]
    return [prefix[:length] + [source.randrange(3, vocab) for _ in range(length - shared)] for length in lengths]
