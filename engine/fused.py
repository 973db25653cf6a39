"""FusedDecoder: the layers of the Llama family as one chain of compiled CPU kernels.

Owns packed weights and workspace; computes what the Hugging Face modules compute, with fewer and faster passes: QKV
and gate-up in one product each, residuals added inside the products, buffers reused from step to step, and in the last
layer only the rows that are sampled from. Knows one structure (see ``FAMILY``); ``model.py`` proves it equal before
using it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvq.engine.inputs import ForwardOutput
from kvq.engine.kv_store import KVStore, LayerShape
from kvq.engine.lora import StepAdapters
from kvq.engine.model_shape import position_limit
from kvq.engine.rotary import RotaryTable
from kvq.kernels.cpu import CpuKernels, CpuStep, PackedLinear
from kvq.kernels.huge_pages import huge_tensor

# Decoder layers known to be: x + o(attention(qkv(norm(x)))), then x + down(silu(gate(norm(x))) * up(norm(x))).
FAMILY = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


_KEPT_LOGITS = 512  # rows

Pack = Callable[..., PackedLinear]  # CpuKernels.pack_linear or pack_int8


def is_fusible(network: Any) -> bool:
    """Whether the layers are of a known structure; what they ask of attention may still be another."""
    layers = getattr(getattr(network, "model", None), "layers", None) or ()
    known = {type(layer).__name__ for layer in layers}
    return bool(known) and known <= FAMILY and network.config.hidden_act == "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a layer asked of its attention in the probing forward pass. ``plain``: no soft-cap, no sinks."""

    layer: int | None
    shape: LayerShape
    group: int
    scale: float
    sliding_window: int | None
    plain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(weight=module.weight.detach().float().contiguous(), eps=float(module.variance_epsilon))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: _Norm
    qkv: PackedLinear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: PackedLinear
    post_norm: _Norm
    gate_up: PackedLinear
    down: PackedLinear
    scale: float
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workspace:
    """Buffers for ``num_tokens`` rows; fresh large tensors would be page-faulted in anew at every step."""

    hidden: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attention: torch.Tensor
    gate_up: torch.Tensor  # of one row where the product is gated
    gated: torch.Tensor


class FusedDecoder:
    """Embedding, decoder layers, final norm and head of one model. Make one with ``build``."""

    def __init__(self, network: Any, kernels: CpuKernels, layers: Sequence[_Layer]) -> None:
        base = network.model
        attention = base.layers[0].self_attn
        self._kernels = kernels
        self._layers = tuple(layers)
        self._embedding = base.embed_tokens.weight.detach()
        self._rotary = RotaryTable(base.rotary_emb, longest=position_limit(network.config))
        self._norm = _Norm.of(base.norm)
        self._head = kernels.pack_linear(network.lm_head.weight, network.lm_head.bias)
        self._head_dim = int(attention.head_dim)
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._workspace: _Workspace | None = None
        self._logits = torch.empty(0, self._head.out_features)

    @classmethod
    def build(
        cls,
        network: Any,
        kernels: CpuKernels,
        calls: Sequence[AttentionCall],
        *,
        quantization: str | None = None,
        uses_lora: bool = False,
    ) -> FusedDecoder | None:
        """Pack ``network``'s weights, with ``quantization="int8"`` as int8 but for the head.

        ``uses_lora``: adapters may be added to any product, so gates stay apart from what they gate.

        None when its structure is not the known one.
        """
        if not is_fusible(network) or not all(call.plain for call in calls):
            return None
        layers = network.model.layers
        pack = kernels.pack_int8 if quantization == "int8" else kernels.pack_linear
        gated = not uses_lora and kernels.can_gate(layers[0].mlp.gate_proj.out_features)
        packed = [_pack_layer(layer, pack, call, gated=gated) for layer, call in zip(layers, calls, strict=True)]
        return cls(network, kernels, packed)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_rows: torch.Tensor,
        pooled_rows: torch.Tensor | None,
        step: CpuStep,
        store: KVStore,
        copies: Sequence[tuple[int, int, int]],
        adapters: StepAdapters | None = None,
    ) -> ForwardOutput:
        """Logits and hidden states of the wanted rows of the flat batch ``input_ids`` [T]; KV goes to ``store``."""
        wanted = logits_rows if pooled_rows is None else torch.cat([logits_rows, pooled_rows])
        num_tokens, k = len(input_ids), self._kernels
        space = self._space(num_tokens)
        hidden = space.hidden[:num_tokens]
        torch.index_select(self._embedding, 0, input_ids, out=hidden)
        cos, sin = self._rotary.rows(position_ids)
        num_query, num_kv = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            normed = k.rms_norm(hidden, layer.input_norm.weight, layer.input_norm.eps, out=space.normed)
            qkv = torch.split(layer.qkv(normed, out=space.qkv[:num_tokens]), [num_query, num_kv, num_kv], dim=1)
            if adapters is not None:
                for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True):
                    adapters.add(f"model.layers.{index}.self_attn.{name}", normed, part)
            query, key, value = (part.view(num_tokens, -1, self._head_dim) for part in qkv)
            if layer.query_norm is not None and layer.key_norm is not None:
                query = _norm_heads(k, query, layer.query_norm)
                key = _norm_heads(k, key, layer.key_norm)
            k.rotary(query, cos, sin)
            k.rotary(key, cos, sin)
            k.write_kv(key, value, store.keys[index], store.values[index], step)
            if copies:
                k.copy_blocks(copies, store.keys[index], store.values[index])
            if index == last:
                step = replace(step, order=_only(step.order, wanted))
            attended = k.paged_attention(
                query,
                store.keys[index],
                store.values[index],
                step,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                out=space.attention,
            ).flatten(1)
            if index == last:
                hidden, attended = hidden[wanted], attended[wanted]
                adapters = None if adapters is None else adapters.only(wanted)
            layer.output(attended, out=hidden, accumulate=True)
            if adapters is not None:
                adapters.add(f"model.layers.{index}.self_attn.o_proj", attended, hidden)
            normed = k.rms_norm(hidden, layer.post_norm.weight, layer.post_norm.eps, out=space.normed)
            if layer.gate_up.gated:
                gated = layer.gate_up(normed, out=space.gated[: len(hidden)])
            else:
                gate_up = layer.gate_up(normed, out=space.gate_up[: len(hidden)])
                if adapters is not None:
                    for name, half in zip(("gate_proj", "up_proj"), gate_up.chunk(2, dim=1), strict=True):
                        adapters.add(f"model.layers.{index}.mlp.{name}", normed, half)
                gated = k.silu_mul(gate_up, out=space.gated)
            layer.down(gated, out=hidden, accumulate=True)
            if adapters is not None:
                adapters.add(f"model.layers.{index}.mlp.down_proj", gated, hidden)
        normed, num_logits = k.rms_norm(hidden, self._norm.weight, self._norm.eps), len(logits_rows)
        return ForwardOutput(
            logits=self._head(normed[:num_logits], out=self._logits_space(num_logits)),
            hidden=None if pooled_rows is None else normed[num_logits:],
        )

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Passes inside compute the last layer only, in the buffers that all layers share."""
        layers, self._layers = self._layers, self._layers[-1:]
        try:
            yield
        finally:
            self._layers = layers

    def _space(self, num_tokens: int) -> _Workspace:
        if self._workspace is None or len(self._workspace.hidden) < num_tokens:
            layer, rows = self._layers[0], max(num_tokens, 64)
            width = self._embedding.shape[1]
            self._workspace = _Workspace(
                hidden=_buffer(rows, width),
                normed=_buffer(rows, width),
                qkv=_buffer(rows, layer.qkv.out_features),
                attention=_buffer(rows, self._num_heads, self._head_dim),
                gate_up=_buffer(1 if layer.gate_up.gated else rows, layer.gate_up.num_columns),
                gated=_buffer(rows, layer.down.in_features),
            )
        return self._workspace

    def _logits_space(self, rows: int) -> torch.Tensor:
        """Overwritten by the next step; the logits of whole prompts, which are many, get memory of their own."""
        if rows > _KEPT_LOGITS:
            return _buffer(rows, self._head.out_features)
        if len(self._logits) < rows:
            self._logits = _buffer(max(rows, 64), self._head.out_features)
        return self._logits[:rows]


def _buffer(*shape: int) -> torch.Tensor:
    return huge_tensor(shape, torch.float32)


def _pack_layer(layer: Any, pack: Pack, call: AttentionCall, *, gated: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        input_norm=_Norm.of(layer.input_layernorm),
        qkv=_joined(pack, attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_Norm.of(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_Norm.of(attention.k_norm) if hasattr(attention, "k_norm") else None,
        output=_joined(pack, attention.o_proj),
        post_norm=_Norm.of(layer.post_attention_layernorm),
        gate_up=_joined(pack, mlp.gate_proj, mlp.up_proj, gated=gated),
        down=_joined(pack, mlp.down_proj),
        scale=call.scale,
        sliding_window=call.sliding_window,
    )


def _joined(pack: Pack, *linears: Any, gated: bool = False) -> PackedLinear:
    """Linear layers that read the same input, as one product."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    return pack(weight, None if biases[0] is None else torch.cat([b.detach() for b in biases]), gated=gated)


def _norm_heads(kernels: CpuKernels, x: torch.Tensor, norm: _Norm) -> torch.Tensor:
    """RMSNorm over each head's dimensions (Qwen3)."""
    return kernels.rms_norm(x.reshape(-1, x.shape[2]), norm.weight, norm.eps).view(x.shape)


def _only(order: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The entries of ``order`` that are in ``rows``."""
    wanted = torch.zeros(len(order), dtype=torch.bool)
    wanted[rows] = True
    return order[wanted[order]]
