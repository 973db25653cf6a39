"""Model: a Hugging Face causal language model that computes with our attention.

Owns loading, registering attention and the probe that proves it is used. Knows nothing of scheduling.
Invariant: a Model that exists calls our attention exactly once in every layer, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvq.engine.config import EngineConfig
from kvq.engine.errors import ModelError
from kvq.engine.kv_store import KVStore, LayerShape
from kvq.engine.tokenizer import ModelSource
from kvq.kernels import ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvq.engine.inputs import StepInputs

ATTENTION_NAME = "kvq_paged"
_PROBE_TOKENS = 4


@dataclass(slots=True)
class ForwardContext:
    """What our attention needs in each layer of one forward pass."""

    inputs: StepInputs
    store: KVStore


@dataclass(slots=True)
class _Probe:
    """Records each attention call of a forward pass instead of using a cache."""

    modules: list[Any] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kvq_context: ForwardContext | _Probe | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    if kvq_context is None:
        raise ModelError("the model did not pass on the attention arguments; it cannot be served")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if isinstance(kvq_context, _Probe):
        kvq_context.modules.append(module)
        kvq_context.shapes.append(
            LayerShape(num_kv_heads=k.shape[1], key_dim=k.shape[2], value_dim=v.shape[2])
        )
        return v.new_zeros(1, q.shape[0], q.shape[1], v.shape[2]), None
    layer, store, inputs = module.layer_idx, kvq_context.store, kvq_context.inputs
    keys, values = store.keys[layer], store.values[layer]
    ops.write_kv(k, v, keys, values, inputs.metadata.slot_mapping)
    store.copy(layer, inputs.copies)
    out = ops.paged_attention(
        q, keys, values, inputs.metadata, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return out[None], None


class Model:
    """The network and the shape of its KV cache."""

    def __init__(self, network: Any, layers: Sequence[LayerShape]) -> None:
        self.network = network
        self.layers = tuple(layers)
        self.hf_config = network.config.get_text_config()

    @classmethod
    def load(cls, config: EngineConfig, *, device: torch.device, dtype: torch.dtype) -> Model:
        """Load weights (or draw them, with ``load_format="dummy"``) and probe the attention.

        Raises:
            ModelError: when there is no such model, or it does not compute with our attention.
        """
        network = _load_network(config, dtype).to(device).eval()
        network.requires_grad_(requires_grad=False)
        _register_attention()
        network.set_attn_implementation(ATTENTION_NAME)
        return cls(network, _probe(network))

    @property
    def max_position_embeddings(self) -> int | None:
        """Most tokens the model was made for; None where it does not say."""
        limit = getattr(self.hf_config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return int(self.hf_config.vocab_size)

    def bytes_per_token(self, itemsize: int) -> int:
        """KV bytes of one token over all layers."""
        return sum(layer.bytes_per_token(itemsize) for layer in self.layers)

    def forward(self, inputs: StepInputs, store: KVStore) -> torch.Tensor:
        """Logits [R, vocab_size] of the rows that are sampled; the KV of all T tokens is written to ``store``."""
        output = self.network(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=inputs.logits_rows,
            kvq_context=ForwardContext(inputs, store),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _load_network(config: EngineConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = ModelSource.resolve(config.model)
    arguments = {"trust_remote_code": config.trust_remote_code, **source.load_arguments}
    try:
        if config.load_format == "dummy":
            hf_config = AutoConfig.from_pretrained(source.path, **arguments)
            torch.manual_seed(config.seed)
            return AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        with _quiet_progress():
            return AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype, **arguments)
    except (OSError, ValueError, KeyError) as err:
        raise ModelError(f"cannot load the model {config.model}: {err}") from err


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """transformers' own progress bars would run into ours."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


@torch.inference_mode()
def _probe(network: Any) -> list[LayerShape]:
    """Run a few tokens and see our attention called once in every layer."""
    name = type(network).__name__
    num_layers = int(network.config.get_text_config().num_hidden_layers)
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=network.device)
    positions = torch.arange(_PROBE_TOKENS, device=network.device)[None]
    probe = _Probe()
    try:
        network(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, kvq_context=probe)
    except (TypeError, ValueError, RuntimeError, AttributeError) as err:
        raise ModelError(f"{name} cannot be served: a probing forward pass failed: {err}") from err
    called = [getattr(module, "layer_idx", None) for module in probe.modules]
    if called != list(range(num_layers)):
        raise ModelError(
            f"{name} cannot be served: kvq's attention was called in layers {called}, "
            f"but the model has layers 0 to {num_layers - 1}; it uses attention of its own"
        )
    return probe.shapes


