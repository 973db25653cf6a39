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
    """Sizes of one model. ``num_parameters`` counts shared ones once; ``num_layer_parameters`` of them are in
    the decoder's layers, which ``quantization`` is about."""

    kv: KVShape
    vocab_size: int
    max_position_embeddings: int | None
    num_parameters: int
    num_layer_parameters: int

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
        text = hf_config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None)
        num_parameters, num_layer_parameters = _parameter_counts(hf_config, trust_remote_code=trust_remote_code)
        return cls(
            kv=kv_shape(text),
            vocab_size=int(text.vocab_size),
            max_position_embeddings=None if limit is None else int(limit),
            num_parameters=num_parameters,
            num_layer_parameters=num_layer_parameters,
        )


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


def _parameter_counts(hf_config: Any, *, trust_remote_code: bool) -> tuple[int, int]:
    """All parameters, and the layers'. Built on torch's meta device, where a network has shapes and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError) as err:
        raise ModelError(f"the model is no causal language model that transformers knows: {err}") from err
    layers = getattr(network.get_decoder(), "layers", None) or ()
    return _count(network), sum(map(_count, layers))


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
