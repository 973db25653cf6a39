"""PagedAttention: our attention in a Hugging Face network, and the probe that proves it is used.

Owns what every layer calls in a forward pass. Knows nothing of scheduling. Invariant: a network passes the probe only
if our attention is called exactly once in every layer, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from kvq.engine.errors import ModelError
from kvq.engine.fused import AttentionCall
from kvq.engine.inputs import StepInputs
from kvq.engine.kv_store import KVStore, LayerShape
from kvq.kernels.backend import Backend

PROBE_TOKENS = 4

_instances = count()


@dataclass(slots=True)
class ForwardContext:
    """What our attention needs in each layer of one forward pass."""

    inputs: StepInputs
    store: KVStore
    backend: Backend
    step: Any


@dataclass(slots=True)
class _Probe:
    """Records each attention call of a forward pass instead of using a cache."""

    calls: list[AttentionCall] = field(default_factory=list)


class PagedAttention:
    """The function that transformers calls in every layer of one network.

    What it needs comes in by ``context``, set around each forward pass, since some models do not pass keyword
    arguments on to their attention.
    """

    def __init__(self) -> None:
        self.context: ForwardContext | _Probe | None = None
        self.name = f"kvq_paged_{next(_instances)}"

    def __call__(
        self,
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
        **_unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        context = self.context
        if isinstance(context, _Probe):
            context.calls.append(
                AttentionCall(
                    layer=getattr(module, "layer_idx", None),
                    shape=LayerShape(num_kv_heads=k.shape[1], key_dim=k.shape[2], value_dim=v.shape[2]),
                    group=q.shape[1] // k.shape[1],
                    scale=scale,
                    sliding_window=sliding_window,
                    plain=softcap is None and s_aux is None,
                )
            )
            return v.new_zeros(1, q.shape[0], q.shape[1], v.shape[2]), None
        assert context is not None
        backend = context.backend
        keys, values = context.store.keys[module.layer_idx], context.store.values[module.layer_idx]
        scales = context.store.scales[module.layer_idx]
        backend.write_kv(k, v, keys, values, context.step, scales=scales)
        if context.inputs.copies:
            backend.copy_blocks(context.inputs.copies, keys, values, scales=scales)
        out = backend.paged_attention(
            q,
            keys,
            values,
            context.step,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            scales=scales,
        )
        return out[None], None


def register_attention(network: Any) -> PagedAttention:
    """Have ``network``, and it alone, call an attention of its own in every layer."""
    from transformers import AttentionInterface

    attention = PagedAttention()
    AttentionInterface.register(attention.name, attention)
    network.set_attn_implementation(attention.name)
    return attention


@torch.inference_mode()
def probe(network: Any, attention: PagedAttention) -> list[AttentionCall]:
    """Run ``PROBE_TOKENS`` tokens; what each layer asked of our attention, in order.

    Raises:
        ModelError: it was not called once in every layer, or the pass failed.
    """
    name = type(network).__name__
    num_layers = int(network.config.get_text_config().num_hidden_layers)
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=network.device)
    positions = torch.arange(PROBE_TOKENS, device=network.device)[None]
    attention.context = recorded = _Probe()
    try:
        network(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    except (TypeError, ValueError, RuntimeError, AttributeError) as err:
        raise ModelError(f"{name} cannot be served: a probing forward pass failed: {err}") from err
    called = [call.layer for call in recorded.calls]
    if called != list(range(num_layers)):
        raise ModelError(
            f"{name} cannot be served: kvq's attention was called in layers {called}, "
            f"but the model has layers 0 to {num_layers - 1}; it uses attention of its own"
        )
    return recorded.calls


def longest_window(calls: Sequence[AttentionCall]) -> int | None:
    """Tokens that any layer looks back, the token itself included; None where one looks back to the first."""
    windows = [call.sliding_window for call in calls]
    return None if None in windows else max(w for w in windows if w is not None)
