"""Backend: the kernels as the engine calls them, chosen once at load.

On a CPU in fp32 the compiled kernels, which have a key cache layout of their own; everywhere else ``ops``, which picks
Triton or the reference call by call. The choice changes speed, never what is computed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from kvq.kernels import ops
from kvq.kernels.cpu import CpuKernels
from kvq.kernels.cpu_build import NoCompiler
from kvq.kernels.kv_scales import KVScales, as_bytes
from kvq.kernels.metadata import AttentionMetadata

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What both implementations offer. ``step`` is what ``prepare`` made of the step's metadata."""

    name: str

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """Once a step, before the first layer."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: Any,
        *,
        scales: KVScales | None = None,
    ) -> None:
        """Write key and value [T, H_kv, D] to the step's slots; ``scales`` belong to caches of eight bits."""

    def copy_blocks(
        self,
        copies: Sequence[tuple[int, int, int]],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        """Copy the first n slots of block src to dst, for each (src, dst, n) in order."""

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: Any,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, H, D] over the cache -> [T, H, D_v]."""


class OpsBackend:
    """``kvq.kernels.ops`` behind the Backend calls; a step is its metadata."""

    name = "ops"

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: AttentionMetadata,
        *,
        scales: KVScales | None = None,
    ) -> None:
        ops.write_kv(key, value, key_cache, value_cache, step.slot_mapping, scales)

    def copy_blocks(
        self,
        copies: Sequence[tuple[int, int, int]],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        caches = [as_bytes(key_cache), as_bytes(value_cache)]
        if scales is not None:
            caches += [scales.keys, scales.values]
        for src, dst, offsets in _slots(tuple(copies), key_cache.device):
            for cache in caches:
                cache[dst, :, offsets] = cache[src, :, offsets]

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        return ops.paged_attention(
            query,
            key_cache,
            value_cache,
            step,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            scales=scales,
        )


def choose_backend(
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    head_dims: set[tuple[int, int]],
    max_group: int,
) -> Backend:
    """The fastest backend for a model whose layers have these head sizes and at most ``max_group`` heads per KV head.

    ``head_dims``: of keys and of values. ``kv_dtype`` is how both are stored.

    ``KVQ_CPU_KERNELS=0`` keeps to PyTorch on a CPU.
    """
    if device.type != "cpu" or dtype != torch.float32 or os.environ.get("KVQ_CPU_KERNELS") == "0":
        return OpsBackend()
    if kv_dtype != torch.float32:
        logger.warning("kv_cache_dtype: the compiled CPU kernels hold KV in float32 only, the slower PyTorch ones run")
        return OpsBackend()
    if len(head_dims) != 1 or max_group > CpuKernels.max_group:
        return OpsBackend()
    try:
        head_dim, value_dim = head_dims.pop()
        return CpuKernels(block_size=block_size, head_dim=head_dim, value_dim=value_dim)
    except NoCompiler as err:
        logger.warning("the compiled CPU kernels are not used, the PyTorch ones are (slower): %s", err)
        return OpsBackend()


@lru_cache(maxsize=1)
def _slots(copies: tuple[tuple[int, int, int], ...], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """(source blocks, destination blocks, offsets) of each level's slots; made once for all layers of a step.

    Through pinned memory on the way to a GPU, so that the host does not wait for the work before.
    """
    found = []
    for level in _levels(copies):
        slots = torch.tensor([(c[0], c[1], offset) for c in level for offset in range(c[2])], dtype=torch.int64).T
        if device.type == "cuda":
            slots = slots.contiguous().pin_memory().to(device, non_blocking=True)
        found.append(tuple(slots))
    return found


def _levels(copies: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Copies that may be done at once: one whose source is another's destination comes a level later."""
    level_by_dst: dict[int, int] = {}
    levels: list[list[tuple[int, int, int]]] = []
    for copy in copies:
        level = level_by_dst.get(copy[0], -1) + 1
        level_by_dst[copy[1]] = level
        if level == len(levels):
            levels.append([])
        levels[level].append(copy)
    return levels
