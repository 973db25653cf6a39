"""KVStore: the K and V tensors of every layer, and their scales where they are held in eight bits.

Owns the memory of the cache. Knows no block numbers and not who holds them. Shape of each layer's tensors:
``[num_blocks, num_kv_heads, block_size, head_dim]`` (how the elements lie inside a block is the kernels' own affair).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvq.engine.config import EngineConfig
from kvq.kernels.huge_pages import huge_tensor
from kvq.kernels.kv_scales import LARGEST_BY_DTYPE, KVScales, fp8_storage

_TIMED_SWAPS = 4
# What a first batch of jobs fills, within reason.
_TOUCHED_TOKENS = 16_384
_TOUCHED_BYTES = 512 << 20
_SCALE_BYTES = 4


def kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """How KV is stored for a model that computes in ``dtype``."""
    name = config.kv_dtype_name(str(dtype).removeprefix("torch."))
    if name == "float8":
        return fp8_storage(device)
    stored: torch.dtype = getattr(torch, name)
    return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """KV shape of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V, and of their scales, that one token takes in this layer."""
        scale_bytes = 2 * _SCALE_BYTES if dtype in LARGEST_BY_DTYPE else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scale_bytes)


class KVStore:
    """The paged cache of a whole model. What is read was written before.

    Behind its blocks lies one that no sequence holds: rows that pad a step write their KV there.
    """

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
        self.padding_block = num_blocks
        num_blocks += 1
        self.keys = [_empty((num_blocks, s.num_kv_heads, block_size, s.key_dim), dtype, device) for s in layers]
        self.values = [_empty((num_blocks, s.num_kv_heads, block_size, s.value_dim), dtype, device) for s in layers]
        self.scales: list[KVScales | None] = [
            _empty_scales((num_blocks, shape.num_kv_heads, block_size), device) if dtype in LARGEST_BY_DTYPE else None
            for shape in layers
        ]
        self._tensors = self.keys + self.values
        if device.type == "cpu":
            self._touch(num_blocks)
        for scales in self.scales:
            if scales is not None:
                self._tensors += [scales.keys, scales.values]
        self._host = [
            torch.empty(num_host_blocks, *cache.shape[1:], dtype=cache.dtype, pin_memory=device.type == "cuda")
            for cache in self._tensors
        ]

    def _touch(self, num_blocks: int) -> None:
        """Have the system find memory for the blocks used first now, by all threads, not in the first steps."""
        block_bytes = sum(cache[0].nbytes for cache in self._tensors)
        touched = min(num_blocks, _TOUCHED_TOKENS // self.block_size, _TOUCHED_BYTES // block_bytes)
        for cache in self._tensors:
            cache[:touched].zero_()

    def swap(self, outs: Sequence[tuple[int, int]], ins: Sequence[tuple[int, int]]) -> None:
        """Move blocks to host memory, (block, host block), then others back, (host block, block)."""
        if not outs and not ins:
            return
        for cache, host in zip(self._tensors, self._host, strict=True):
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


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return huge_tensor(shape, dtype)


def _empty_scales(shape: tuple[int, int, int], device: torch.device) -> KVScales:
    keys, values = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    return KVScales(keys=keys, values=values)
