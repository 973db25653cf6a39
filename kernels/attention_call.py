"""One attention call: its tensors, its options, and the kernel arguments that all parts of it share.

Owns the check that the tensors fit each other; the kernels assume it. Knows no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvq.kernels.attention_config import KVCodes
from kvq.kernels.kv_scales import KVScales
from kvq.kernels.metadata import AttentionMetadata

# Cards whose programs may use 227 KiB of shared memory.
LARGE_SHARED_CAPABILITIES = ((9, 0), (10, 0), (10, 3))


@cache
def has_large_shared(device: torch.device) -> bool:
    """Whether tiles for ``large_shared`` run on ``device``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in LARGE_SHARED_CAPABILITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """``query``, ``out``: ``[T, num_heads, head_dim]``; caches ``[num_blocks, num_kv_heads, block_size, head_dim]``."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    out: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    scales: KVScales | None = None
    large_shared: bool = False

    def __post_init__(self) -> None:
        query, cache = tuple(self.query.shape), tuple(self.key_cache.shape)
        if query[2] != cache[3] or query[1] % cache[1] or query[2] % 8:
            raise ValueError(f"query {query} does not fit key_cache {cache}, or its head_dim is not a multiple of 8")
        if self.value_cache.shape != self.key_cache.shape or cache[2] != self.metadata.block_size:
            raise ValueError(
                f"key_cache {cache}, value_cache {tuple(self.value_cache.shape)} and "
                f"block_size {self.metadata.block_size} do not agree"
            )
        if self.scales is not None and not (
            tuple(self.scales.keys.shape) == tuple(self.scales.values.shape) == cache[:3]
        ):
            raise ValueError(f"scales {tuple(self.scales.keys.shape)} do not fit key_cache {cache}")
        if not (self.key_cache.is_contiguous() and self.value_cache.is_contiguous() and self.out.is_contiguous()):
            raise ValueError("key_cache, value_cache and out must be contiguous")
        if self.query.stride(2) != 1 or self.metadata.block_tables.stride(1) != 1:
            raise ValueError("query and block_tables must be contiguous in their last dimension")

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def kv_codes(self) -> KVCodes:
        if self.scales is None:
            return KVCodes.NONE
        return KVCodes.BITS if self.key_cache.dtype == torch.uint8 else KVCodes.NUMBERS

    @property
    def decode_rows(self) -> torch.Tensor:
        """The output rows of the decode sequences."""
        return self.out[: self.metadata.num_decodes]

    @property
    def arguments(self) -> dict[str, Any]:
        """What every attention kernel takes, by the kernels' parameter names."""
        return {
            "q_ptr": self.query,
            "k_cache_ptr": self.key_cache,
            "v_cache_ptr": self.value_cache,
            "k_scale_ptr": None if self.scales is None else self.scales.keys,
            "v_scale_ptr": None if self.scales is None else self.scales.values,
            "table_ptr": self.metadata.block_tables,
            "seq_lens_ptr": self.metadata.seq_lens,
            "scale": self.scale,
            "stride_qt": self.query.stride(0),
            "stride_qh": self.query.stride(1),
            "table_stride": self.metadata.block_tables.stride(0),
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": self.metadata.block_size,
            "WINDOW": self.sliding_window,
            "SOFTCAP": self.softcap,
            # Concerns float32 only: three tensor-core products keep its accuracy.
            "PRECISION": "tf32x3",
        }
