"""KVStore: the K and V tensors of every layer.

Owns the memory of the cache. Knows no block numbers and not who holds them. Shape of each layer's tensors:
``[num_blocks, num_kv_heads, block_size, head_dim]`` (how the elements lie inside a block is the kernels' own affair).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_TIMED_SWAPS = 4


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
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.keys = [
            torch.empty(num_blocks, s.num_kv_heads, block_size, s.key_dim, dtype=dtype, device=device) for s in layers
        ]
        self.values = [
            torch.empty(num_blocks, s.num_kv_heads, block_size, s.value_dim, dtype=dtype, device=device) for s in layers
        ]
        self._host = [
            torch.empty(num_host_blocks, *cache.shape[1:], dtype=dtype, pin_memory=device.type == "cuda")
            for cache in self.keys + self.values
        ]

    def swap(self, outs: Sequence[tuple[int, int]], ins: Sequence[tuple[int, int]]) -> None:
        """Move blocks to host memory, (block, host block), then others back, (host block, block)."""
        if not outs and not ins:
            return
        for cache, host in zip(self.keys + self.values, self._host, strict=True):
            for block, host_block in outs:
                host[host_block].copy_(cache[block], non_blocking=True)
            for host_block, block in ins:
                cache[block].copy_(host[host_block], non_blocking=True)

    def seconds_per_swapped_block(self) -> float:
        """Measured time to move one block to the host (block 0, whose content does not matter yet)."""
        start = time.perf_counter()
        for _ in range(_TIMED_SWAPS):
            self.swap([(0, 0)], [])
        if self.keys[0].is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / _TIMED_SWAPS
