"""ModelShape: what a model's configuration alone says of the memory it takes.

Owns the reading of a Hugging Face configuration; reads no weights and needs no GPU. What it says of the KV cache is
what the probing forward pass of a loaded model finds (a test holds the two equal).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvq.engine import gguf_cache
from kvq.engine.config import EngineConfig
from kvq.engine.errors import ModelError
from kvq.engine.sizing import DTYPE_BYTES, KVShape
from kvq.engine.tokenizer import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one model.

    ``num_parameters`` counts shared ones once; ``num_layer_parameters`` of them are in the decoder's layers, which
    ``quantization`` is about. ``has_fused_layers``: they are of a structure that is computed as one chain on a CPU.
    """

    kv: KVShape
    vocab_size: int
    max_position_embeddings: int | None
    num_parameters: int
    num_layer_parameters: int
    name: str
    has_fused_layers: bool

    def weight_bytes(self, dtype: str, quantization: str | None) -> int:
        """Bytes of the weights in ``dtype``, the layers' in ``quantization`` where there is one."""
        num_others = self.num_parameters - self.num_layer_parameters
        return num_others * DTYPE_BYTES[dtype] + self.num_layer_parameters * DTYPE_BYTES[quantization or dtype]

    @classmethod
    def load(cls, config: EngineConfig) -> ModelShape:
        """Read the configuration that ``config.model`` names.

        Raises:
            ModelError: when there is none, or it is no causal language model's.
        """
        return cls.of(_hf_config(config), trust_remote_code=config.trust_remote_code)

    @classmethod
    def of(cls, hf_config: Any, *, trust_remote_code: bool = False) -> ModelShape:
        """The sizes that a Hugging Face configuration says.

        Raises:
            ModelError: it is no causal language model's.
        """
        from kvq.engine.fused import is_fusible  # torch takes seconds to import

        text = hf_config.get_text_config()
        network = _empty_network(hf_config, trust_remote_code=trust_remote_code)
        layers = getattr(network.get_decoder(), "layers", None) or ()
        return cls(
            kv=kv_shape(text),
            vocab_size=int(text.vocab_size),
            max_position_embeddings=position_limit(text),
            num_parameters=_count(network),
            num_layer_parameters=sum(map(_count, layers)),
            name=type(network).__name__,
            has_fused_layers=is_fusible(network),
        )


def position_limit(hf_config: Any) -> int | None:
    """Most tokens that a model of this text configuration can be given; None where it does not say.

    LongRoPE has two sets of frequencies, and a step's longest sequence decides for all of them: only lengths that
    need the one set are offered, so that no sequence depends on its neighbours.
    """
    limit = getattr(hf_config, "max_position_embeddings", None)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = rope.get("original_max_position_embeddings", limit)
    return None if limit is None else int(limit)


def kv_shape(hf_config: Any) -> KVShape:
    """The KV cache of a text configuration: grouped-query, multi-query, and latent attention as expanded heads."""
    num_heads = int(hf_config.num_attention_heads)
    num_kv_heads = getattr(hf_config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(hf_config, "head_dim", None) or int(hf_config.hidden_size) // num_heads
    key_dim = value_dim = int(head_dim)
    if (nope_dim := getattr(hf_config, "qk_nope_head_dim", None)) is not None:  # DeepSeek's latent attention
        key_dim, value_dim = int(nope_dim) + int(hf_config.qk_rope_head_dim), int(hf_config.v_head_dim)
        num_kv_heads = num_heads
    if getattr(hf_config, "multi_query", False) and getattr(hf_config, "num_key_value_heads", None) is None:
        num_kv_heads = 1
    return KVShape(
        num_layers=int(hf_config.num_hidden_layers),
        num_kv_heads=int(num_kv_heads),
        key_dim=key_dim,
        value_dim=value_dim,
    )


def _hf_config(config: EngineConfig) -> Any:
    from transformers import AutoConfig

    source = ModelSource.resolve(config.model)
    arguments = {"trust_remote_code": config.trust_remote_code, **source.load_arguments}
    if source.gguf_path is not None:
        # Reading a GGUF's vocabulary takes seconds, and its converted weights lie beside their configuration.
        folder = gguf_cache.weights_folder(source.gguf_path, "float32")
        if folder is not None and folder.is_dir():
            source, arguments = ModelSource(path=str(folder)), {}
    try:
        return AutoConfig.from_pretrained(source.path, **arguments)
    except (OSError, ValueError, KeyError) as err:
        raise ModelError(f"cannot read the configuration of the model {config.model}: {err}") from err


def _empty_network(hf_config: Any, *, trust_remote_code: bool) -> Any:
    """Built on torch's meta device, where a network has shapes and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError) as err:
        raise ModelError(f"the model is no causal language model that transformers knows: {err}") from err


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
