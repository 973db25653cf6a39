"""Awkward paged batches, and an oracle that shares no code with the kernels.

Owns the test data: sequences of mixed lengths whose blocks are shuffled over the cache, with NaN in every slot
that holds none of their tokens, garbage in the unused block table entries, and prefix blocks that are really shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvq.kernels.attention_call import AttentionCall
from kvq.kernels.kv_scales import KVScales, dequantise, quantise
from kvq.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    rtol: float
    atol: float


# Against the float64 oracle on the same rounded inputs.
TOLERANCE_BY_DTYPE = {
    torch.float32: Tolerance(rtol=2e-5, atol=2e-5),  # float32 sums of up to a few hundred terms
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),  # 2^-11 on the weights and once more on the output
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1.6e-2),  # 2^-8, in the same two places
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    query: torch.Tensor
    key: torch.Tensor  # this step's rows, as write_kv takes them
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    keys_by_seq: list[torch.Tensor]  # [seq_len, num_kv_heads, head_dim], what the cache holds
    values_by_seq: list[torch.Tensor]
    scales: KVScales | None = None


def paged_batch(
    *,
    seq_lens: list[int],
    query_lens: list[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    groups: list[tuple[int, int]] | None = None,
    seed: int = 0,
) -> PagedBatch:
    """``groups`` lists ``(number of decode sequences, shared prefix in tokens)`` and covers all decodes."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_seqs = len(seq_lens)
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), num_seqs)
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 5
    free = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    key_cache = torch.full(shape, math.nan, dtype=dtype)
    value_cache = torch.full(shape, math.nan, dtype=dtype)

    prefix_by_seq: dict[int, tuple[int, int]] = {}  # follower -> (leader, shared tokens)
    start_loc = [0]
    for size, prefix_len in groups or []:
        for s in range(start_loc[-1] + 1, start_loc[-1] + size):
            prefix_by_seq[s] = (start_loc[-1], prefix_len)
        start_loc.append(start_loc[-1] + size)
    assert groups is None or start_loc[-1] == num_decodes
    shared_lens = [prefix_len for size, prefix_len in groups or [] for _ in range(size)]

    max_blocks = max(-(-n // block_size) for n in seq_lens) + 2
    tables = torch.randint(1 << 20, 1 << 21, (num_seqs, max_blocks), generator=generator)
    keys_by_seq: list[torch.Tensor] = []
    values_by_seq: list[torch.Tensor] = []
    slots: list[int] = []
    query_start = [0]
    for s, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        leader, shared = prefix_by_seq.get(s, (s, 0))
        assert shared % block_size == 0
        keys = torch.cat(
            (
                keys_by_seq[leader][:shared] if shared else rand(0, num_kv_heads, head_dim),
                rand(seq_len - shared, num_kv_heads, head_dim),
            )
        )
        values = torch.cat(
            (
                values_by_seq[leader][:shared] if shared else rand(0, num_kv_heads, head_dim),
                rand(seq_len - shared, num_kv_heads, head_dim),
            )
        )
        table = tables[leader, : shared // block_size].tolist()
        while len(table) * block_size < seq_len:
            table.append(free.pop())
        tables[s, : len(table)] = torch.tensor(table, dtype=torch.long)
        for position in range(seq_len):
            block_id, offset = table[position // block_size], position % block_size
            key_cache[block_id, :, offset] = keys[position]
            value_cache[block_id, :, offset] = values[position]
        first = seq_len - query_len
        slots += [table[p // block_size] * block_size + p % block_size for p in range(max(first, 0), seq_len)]
        slots += [free[-1] * block_size] * max(-first, 0)  # a padding row writes to a block nobody reads
        query_start.append(query_start[-1] + query_len)
        keys_by_seq.append(keys)
        values_by_seq.append(values)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def new_rows(by_seq: list[torch.Tensor]) -> torch.Tensor:
        rows = [x[-n:] if len(x) else rand(n, num_kv_heads, head_dim) for x, n in zip(by_seq, query_lens, strict=True)]
        return torch.cat(rows)

    metadata = AttentionMetadata(
        num_seqs=num_seqs,
        query_start_loc=int32(query_start),
        seq_lens=int32(seq_lens),
        block_tables=tables.int(),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
        num_decodes=num_decodes,
        group_start_loc=None if groups is None else int32(start_loc),
        group_prefix_len=None if groups is None else int32([prefix for _, prefix in groups]),
        max_prefix_len=None if groups is None else max(prefix for _, prefix in groups),
        max_suffix_len=None
        if groups is None
        else max(n - prefix for n, prefix in zip(seq_lens[:num_decodes], shared_lens, strict=True)),
    )
    return PagedBatch(
        query=rand(query_start[-1], num_heads, head_dim),
        key=new_rows(keys_by_seq),
        value=new_rows(values_by_seq),
        key_cache=key_cache,
        value_cache=value_cache,
        metadata=metadata,
        keys_by_seq=keys_by_seq,
        values_by_seq=values_by_seq,
    )


def attention_call(batch: PagedBatch, **options: Any) -> AttentionCall:
    """Attention over a batch, for what is launched and compiled rather than for what comes out."""
    return AttentionCall(
        query=batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        out=torch.empty_like(batch.query),
        metadata=batch.metadata,
        scale=0.1,
        scales=batch.scales,
        **options,
    )


def quantised(batch: PagedBatch, dtype: torch.dtype) -> PagedBatch:
    """The batch with caches of eight bits, NaN scales in the unused slots; sequences hold what the codes stand for."""

    def cache(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantise(x.nan_to_num(), dtype)
        return codes, torch.where(x.isnan().any(-1), math.nan, scales)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return dequantise(*quantise(x, dtype), torch.float64)

    (key_codes, key_scales), (value_codes, value_scales) = cache(batch.key_cache), cache(batch.value_cache)
    return replace(
        batch,
        key_cache=key_codes,
        value_cache=value_codes,
        scales=KVScales(keys=key_scales, values=value_scales),
        keys_by_seq=[rounded(x) for x in batch.keys_by_seq],
        values_by_seq=[rounded(x) for x in batch.values_by_seq],
    )


def expected_attention(
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by definition, in float64: per sequence, per query token."""
    query = batch.query.double()
    out = torch.zeros_like(query)
    starts = batch.metadata.query_start_loc.tolist()
    for s, (keys, values) in enumerate(zip(batch.keys_by_seq, batch.values_by_seq, strict=True)):
        seq_len, num_queries = keys.shape[0], starts[s + 1] - starts[s]
        group = query.shape[1] // keys.shape[1]
        keys = keys.double().repeat_interleave(group, dim=1)
        values = values.double().repeat_interleave(group, dim=1)
        for j in range(num_queries):
            position = seq_len - num_queries + j
            if position < 0:
                continue
            low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            visible = slice(low, position + 1)
            scores = torch.einsum("nhd,hd->hn", keys[visible], query[starts[s] + j]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            weights = torch.softmax(scores, dim=1)[:, : position + 1 - low]
            out[starts[s] + j] = torch.einsum("hn,nhd->hd", weights, values[visible])
    return out


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE_BY_DTYPE[actual.dtype]
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=False
    )
