"""GpuDecoder: the layers of the Llama family on the Triton kernels.

Owns the joined weights; computes what the Hugging Face modules compute, with fewer passes over memory: QKV and gate-up
in one product each, rotary with the KV write, the residual with the norm, SiLU with its product. Knows one structure;
``model.py`` proves it equal before using it. Invariant: the modules' weights are views of the joined ones, so that
nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvq.engine.fused import FAMILY, AttentionCall
from kvq.engine.inputs import ForwardOutput, StepInputs
from kvq.engine.kv_store import KVStore
from kvq.kernels import ops
from kvq.kernels.backend import Backend

_Linear = tuple[torch.Tensor, torch.Tensor | None]  # weight [N, K], bias [N]
_Norm = tuple[torch.Tensor, float]  # weight, eps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: _Norm
    qkv: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: _Linear
    post_norm: _Norm
    gate_up: _Linear
    down: _Linear
    scale: float
    sliding_window: int | None


class GpuDecoder:
    """The decoder of one network; ``build`` says whether there is one."""

    def __init__(self, network: Any, layers: Sequence[_Layer], backend: Backend) -> None:
        base, attention = network.model, network.model.layers[0].self_attn
        self._layers = tuple(layers)
        self._backend = backend
        self._embedding = base.embed_tokens.weight
        self._rotary = base.rotary_emb
        self._norm = _norm(base.norm)
        self._head = (network.lm_head.weight, network.lm_head.bias)
        self._head_dim = int(attention.head_dim)
        self._widths = [linear.out_features for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]

    @classmethod
    def build(cls, network: Any, calls: Sequence[AttentionCall], backend: Backend) -> GpuDecoder | None:
        """Join ``network``'s weights; None when its structure is not the known one."""
        layers = getattr(getattr(network, "model", None), "layers", None)
        if not layers or any(type(layer).__name__ not in FAMILY for layer in layers):
            return None
        if network.config.hidden_act != "silu" or not all(call.plain for call in calls):
            return None
        return cls(network, [_join(layer, call) for layer, call in zip(layers, calls, strict=True)], backend)

    def forward(self, inputs: StepInputs, store: KVStore, step: Any) -> ForwardOutput:
        """Logits and hidden states of the wanted rows; the KV of all T tokens is written to ``store``."""
        residual = F.embedding(inputs.input_ids[0], self._embedding)
        cos, sin = (x[0] for x in self._rotary(residual[None], position_ids=inputs.position_ids))
        normed = ops.rms_norm(residual, *self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, normed, cos, sin, inputs, store, step)
            normed, residual = ops.add_rms_norm(F.linear(attended, *layer.output), residual, *layer.post_norm)
            update = F.linear(ops.silu_mul(F.linear(normed, *layer.gate_up)), *layer.down)
            if index + 1 < len(self._layers):
                normed, residual = ops.add_rms_norm(update, residual, *self._layers[index + 1].input_norm)
        rows = inputs.logits_rows
        if inputs.pooled_rows is not None:
            rows = torch.cat((rows, inputs.pooled_rows))
        normed, _ = ops.add_rms_norm(update[rows], residual[rows], *self._norm)
        num_logits = len(inputs.logits_rows)
        return ForwardOutput(
            logits=F.linear(normed[:num_logits], *self._head),
            hidden=None if inputs.pooled_rows is None else normed[num_logits:],
        )

    def _attend(
        self,
        index: int,
        layer: _Layer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: StepInputs,
        store: KVStore,
        step: Any,
    ) -> torch.Tensor:
        """Write the layer's KV, copy blocks, attend: [T, num_heads * head_dim]."""
        keys, values, scales = store.keys[index], store.values[index], store.scales[index]
        query, key, value = (
            part.view(len(normed), -1, self._head_dim)
            for part in torch.split(F.linear(normed, *layer.qkv), self._widths, dim=1)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = ops.rms_norm(query, *layer.query_norm), ops.rms_norm(key, *layer.key_norm)
        slots = inputs.metadata.slot_mapping
        query = ops.rotary_write_kv(query, key, value, cos, sin, keys, values, slots, scales)
        if inputs.copies:
            self._backend.copy_blocks(inputs.copies, keys, values, scales=scales)
        return self._backend.paged_attention(
            query, keys, values, step, scale=layer.scale, sliding_window=layer.sliding_window, scales=scales
        ).flatten(1)


def _norm(module: Any) -> _Norm:
    return module.weight, float(module.variance_epsilon)


def _join(layer: Any, call: AttentionCall) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_norm(attention.q_norm) if has_norms else None,
        key_norm=_norm(attention.k_norm) if has_norms else None,
        output=(attention.o_proj.weight, attention.o_proj.bias),
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj.weight, mlp.down_proj.bias),
        scale=call.scale,
        sliding_window=call.sliding_window,
    )


def _joined(*linears: Any) -> _Linear:
    """Linear layers that read the same input, as one product; their weights become views of it."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    start = 0
    for linear in linears:
        linear.weight.data = weight[start : start + linear.out_features]
        start += linear.out_features
    biases = [linear.bias for linear in linears]
    return weight, None if biases[0] is None else torch.cat([b.detach() for b in biases])
