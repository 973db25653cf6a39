"""KVStore: the K and V tensors of every layer.

Owns the memory of the cache. Knows block numbers, not who holds them. Layout of each layer's tensors:
``[num_blocks, num_kv_heads, block_size, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvq.engine.cache_manager import BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """KV shape of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyIndex:
    """Block copies as index tensors, one element per copied token; to be done in this order of levels."""

    src_blocks: torch.Tensor
    dst_blocks: torch.Tensor
    offsets: torch.Tensor


class KVStore:
    """The paged cache of a whole model. The tensors are left uninitialised: what is read was written before."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.keys = [
            torch.empty(num_blocks, s.num_kv_heads, block_size, s.key_dim, dtype=dtype, device=device) for s in layers
        ]
        self.values = [
            torch.empty(num_blocks, s.num_kv_heads, block_size, s.value_dim, dtype=dtype, device=device)
            for s in layers
        ]

    def copy(self, layer: int, index: Sequence[CopyIndex]) -> None:
        """Copy parts of blocks inside one layer."""
        for level in index:
            for cache in (self.keys[layer], self.values[layer]):
                cache[level.dst_blocks, :, level.offsets] = cache[level.src_blocks, :, level.offsets]


def copy_index(copies: Sequence[BlockCopy], device: torch.device) -> tuple[CopyIndex, ...]:
    """Group copies into levels: a copy whose source is another copy's destination comes after it."""
    level_by_dst: dict[int, int] = {}
    levels: list[list[BlockCopy]] = []
    for copy in copies:
        level = level_by_dst.get(copy.src, -1) + 1
        level_by_dst[copy.dst] = level
        if level == len(levels):
            levels.append([])
        levels[level].append(copy)
    return tuple(_index(level, device) for level in levels)


def _index(copies: Sequence[BlockCopy], device: torch.device) -> CopyIndex:
    src = [c.src for c in copies for _ in range(c.num_tokens)]
    dst = [c.dst for c in copies for _ in range(c.num_tokens)]
    offsets = [o for c in copies for o in range(c.num_tokens)]
    return CopyIndex(
        src_blocks=torch.tensor(src, device=device),
        dst_blocks=torch.tensor(dst, device=device),
        offsets=torch.tensor(offsets, device=device),
    )
