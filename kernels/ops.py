"""The one place that chooses an implementation: Triton on a GPU, otherwise the reference.

Every function has the contract of its namesake in ``kvq.kernels.reference`` and the choice never changes
what is computed. Triton is imported at the first call that needs it, so this file works without it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from kvq.kernels import reference
from kvq.kernels.kv_scales import KVScales
from kvq.kernels.metadata import AttentionMetadata

__all__ = [
    "AttentionMetadata",
    "add_rms_norm",
    "paged_attention",
    "rms_norm",
    "rotary_write_kv",
    "runs_triton_on",
    "silu_mul",
    "write_kv",
]

_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton_on(device: torch.device) -> bool:
    """True where the Triton kernels compute."""
    return device.type == "cuda" and _has_triton()


def _runs_triton(x: torch.Tensor) -> bool:
    return x.dtype in _TRITON_DTYPES and runs_triton_on(x.device)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    if _runs_triton(key):
        from kvq.kernels import kv_write

        kv_write.write_kv(key, value, key_cache, value_cache, slot_mapping, scales)
    else:
        reference.write_kv(key, value, key_cache, value_cache, slot_mapping, scales)


def rotary_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    if _runs_triton(query):
        from kvq.kernels import kv_write

        return kv_write.rotary_write_kv(query, key, value, cos, sin, key_cache, value_cache, slot_mapping, scales)
    return reference.rotary_write_kv(query, key, value, cos, sin, key_cache, value_cache, slot_mapping, scales)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    attend = reference.paged_attention
    if _runs_triton(query) and key_cache.shape == value_cache.shape:
        from kvq.kernels import paged_attention as triton_attention

        attend = triton_attention.paged_attention
    return attend(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        scales=scales,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if _runs_triton(x):
        from kvq.kernels import norms

        return norms.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if _runs_triton(x):
        from kvq.kernels import norms

        return norms.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if _runs_triton(gate_up):
        from kvq.kernels import norms

        return norms.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
