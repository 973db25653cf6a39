"""KVStore: the K and V tensors of every layer.

Owns the memory of the cache. Knows no block numbers and not who holds them. Shape of each layer's tensors:
``[num_blocks, num_kv_heads, block_size, head_dim]`` (how the elements lie inside a block is the kernels' own affair).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """KV shape of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * itemsize


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
            torch.empty(num_blocks, s.num_kv_heads, block_size, s.value_dim, dtype=dtype, device=device) for s in layers
        ]
