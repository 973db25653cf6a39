"""Attention on shapes that matter: bytes per second of decode, the worth of grouping, operations per second of prefill.

One layer of an 8B model (32 query heads, 8 KV heads, 128 dimensions), blocks of 16 tokens scattered over the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.gpu.device import Device
from bench.gpu.rates import Rates
from kvq.kernels import ops
from kvq.kernels.metadata import AttentionMetadata

_HEADS, _KV_HEADS, _DIM, _BLOCK = 32, 8, 128, 16
_MAX_KV_TOKENS = 4_500_000  # 18 GB of keys and values
_COLD_BYTES = 1 << 30  # read between two looks at the same keys: far more than any L2 cache holds
_MOST_CACHES = 16


def at_one_shape(device: Device, rates: Rates, kernel: str) -> dict[str, float]:
    """``prefill`` of two long prompts, or ``decode`` of 64 sequences."""
    if kernel == "prefill":
        return _prefill_point(device, rates, 2, 48 if device.toy else 8192)
    return _decode_point(device, rates, 4 if device.toy else 64, 40 if device.toy else 4096)


def decode(device: Device, rates: Rates) -> Iterator[dict[str, float]]:
    """Each sequence reads its own context once; the measure is the copy bandwidth."""
    batches = (1, 4) if device.toy else (1, 8, 32, 64, 128, 256)
    contexts = (40, 100) if device.toy else (512, 2048, 4096, 16384)
    for context in contexts:
        for batch in batches:
            if batch * context <= _MAX_KV_TOKENS:
                yield _decode_point(device, rates, batch, context)


def _decode_point(device: Device, rates: Rates, batch: int, context: int) -> dict[str, float]:
    tables = _scattered(batch, context, device)
    seconds = _time_decode(device, tables, [context] * batch, None)
    num_bytes = 2 * batch * context * _KV_HEADS * _DIM * device.dtype.itemsize
    device.free()
    return {
        "batch": batch,
        "context": context,
        "us": 1e6 * seconds,
        "gb_per_s": num_bytes / seconds / 1e9,
        "of_copy": num_bytes / seconds / 1e9 / rates.copy_gb_per_s,
    }


def grouped(device: Device) -> Iterator[dict[str, float]]:
    """One group of sequences with a common prefix: plain decode against grouped-prefix decode, own part 128 tokens."""
    prefixes = (32,) if device.toy else (512, 1024, 2048, 4096, 8192)
    sizes = (4,) if device.toy else (4, 16, 64, 256)
    own = 16 if device.toy else 128
    for prefix in prefixes:
        for size in sizes:
            tables = _scattered(size, prefix + own, device)
            tables[:, : prefix // _BLOCK] = tables[0, : prefix // _BLOCK]
            tables = torch.unique(tables, return_inverse=True)[1].int()  # no memory for blocks that nobody reads
            lengths = [prefix + own] * size
            plain_s = _time_decode(device, tables, lengths, None)
            grouped_s = _time_decode(device, tables, lengths, prefix)
            yield {
                "prefix": prefix,
                "group": size,
                "plain_us": 1e6 * plain_s,
                "grouped_us": 1e6 * grouped_s,
                "speedup": plain_s / grouped_s,
            }
            device.free()


def prefill(device: Device, rates: Rates) -> Iterator[dict[str, float]]:
    """Whole prompts, causal; operations are those of the visible half."""
    shapes = ((2, 48),) if device.toy else ((32, 512), (16, 1024), (4, 4096), (2, 8192), (1, 16384))
    for number, length in shapes:
        yield _prefill_point(device, rates, number, length)


def _prefill_point(device: Device, rates: Rates, number: int, length: int) -> dict[str, float]:
    tables = _scattered(number, length, device)
    metadata = _metadata(tables, [length] * number, [length] * number, num_decodes=0)
    seconds = _time(device, metadata, number * length, tables)
    ops_done = 4 * _HEADS * _DIM * number * length * (length + 1) // 2
    device.free()
    return {
        "sequences": number,
        "length": length,
        "us": 1e6 * seconds,
        "tflop_per_s": ops_done / seconds / 1e12,
        "of_matmul": ops_done / seconds / 1e12 / rates.matmul_tflop_per_s,
    }


def _time_decode(device: Device, tables: torch.Tensor, lengths: list[int], prefix: int | None) -> float:
    number = len(lengths)
    metadata = _metadata(tables, lengths, [1] * number, num_decodes=number, prefix=prefix)
    return _time(device, metadata, number, tables)


def _time(device: Device, metadata: AttentionMetadata, num_tokens: int, tables: torch.Tensor) -> float:
    shape = (int(tables.max()) + 1, _KV_HEADS, _BLOCK, _DIM)
    query = torch.randn(num_tokens, _HEADS, _DIM, device=device.device).to(device.dtype)
    cache_bytes = 2 * math.prod(shape) * device.dtype.itemsize

    def cache() -> torch.Tensor:
        return torch.empty(shape, dtype=device.dtype, device=device.device).normal_()

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return ops.paged_attention(query, keys, values, metadata, scale=_DIM**-0.5)

    num_caches = min(_MOST_CACHES, 1 + _COLD_BYTES // cache_bytes) if device.is_gpu else 1
    return device.time_s(*(partial(attend, cache(), cache()) for _ in range(num_caches)))


def _scattered(number: int, length: int, device: Device) -> torch.Tensor:
    """Block tables of sequences whose blocks lie anywhere."""
    per_sequence = -(-length // _BLOCK)
    order = torch.randperm(number * per_sequence, device=device.device)
    return order.view(number, per_sequence).int()


def _metadata(
    tables: torch.Tensor, seq_lens: list[int], query_lens: list[int], *, num_decodes: int, prefix: int | None = None
) -> AttentionMetadata:
    def int32(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=tables.device)

    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    groups: dict[str, Any] = {}
    if prefix is not None:
        groups = {
            "group_start_loc": int32([0, num_decodes]),
            "group_prefix_len": int32([prefix]),
            "max_prefix_len": prefix,
            "max_suffix_len": max(seq_lens) - prefix,
        }
    return AttentionMetadata(
        num_seqs=len(seq_lens),
        query_start_loc=int32(starts),
        seq_lens=int32(seq_lens),
        block_tables=tables,
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=tables.device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=_BLOCK,
        num_decodes=num_decodes,
        **groups,
    )
