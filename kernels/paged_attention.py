# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton attention over the paged cache: prefill of many prompts at once, and decode with the context split.

Knows one layer's cache and the step's metadata. Chooses per part of the batch: decode rows go to the split (or grouped)
kernel, the rest to prefill. Invariant: plain prefill and decode give a sequence the same bits whatever it was
batched with, since tiles and splits lie at fixed positions of its own context.

Layouts: query and output ``[T, num_heads, head_dim]``, caches ``[num_blocks, num_kv_heads, block_size, head_dim]``;
float32, float16 or bfloat16, accumulated in float32; caches also of eight bits with scales (``kv_scales``). The formula
is that of ``reference.paged_attention``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvq.kernels.attention_call import AttentionCall, has_large_shared
from kvq.kernels.attention_config import DECODE_SPLIT_LEN, decode_config, prefill_config
from kvq.kernels.attention_merge import Partials, merge_launch
from kvq.kernels.attention_tile import LOG2E, attend_range, find_owner, find_segment, normalize
from kvq.kernels.grouped_attention import prefix_launch
from kvq.kernels.kv_scales import KVScales
from kvq.kernels.launch import Launch
from kvq.kernels.metadata import AttentionMetadata

_STEP_POINTERS = ["table_ptr", "query_start_ptr", "seq_lens_ptr", "group_start_ptr", "group_prefix_ptr"]


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
    """See ``reference.paged_attention``. Launches on the current stream and never synchronises."""
    call = AttentionCall(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        out=torch.empty(query.shape, dtype=query.dtype, device=query.device),
        metadata=metadata,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        scales=scales,
        large_shared=has_large_shared(query.device),
    )
    for launch in attention_launches(call):
        launch.run()
    return call.out


def attention_launches(call: AttentionCall) -> list[Launch]:
    """The kernels of one attention call, in order; together they write every row of ``call.out``."""
    launches: list[Launch] = []
    if call.metadata.num_decodes:
        launches += _decode_launches(call)
    if call.metadata.num_decodes < call.metadata.num_seqs:
        launches.append(_prefill_launch(call))
    return launches


def _prefill_launch(call: AttentionCall) -> Launch:
    metadata = call.metadata
    config = prefill_config(
        head_dim=call.head_dim,
        element_bytes=call.query.element_size(),
        kv_codes=call.kv_codes,
        large_shared=call.large_shared,
    )
    heads_per_tile = min(call.group, config.block_m)
    block_q = config.block_m // heads_per_tile
    num_seqs = metadata.num_seqs - metadata.num_decodes
    num_tiles = (call.query.shape[0] - metadata.num_decodes) // block_q + num_seqs
    return Launch(
        kernel=_prefill_kernel,
        grid=(num_tiles, call.num_kv_heads * triton.cdiv(call.group, heads_per_tile)),
        arguments=call.arguments
        | {
            "out_ptr": call.out,
            "query_start_ptr": metadata.query_start_loc,
            "sinks_ptr": call.sinks,
            "first_seq": metadata.num_decodes,
            "num_seqs": num_seqs,
            "HEADS_PER_TILE": heads_per_tile,
            "BLOCK_Q": block_q,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": config.block_d,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
    )


def _decode_launches(call: AttentionCall) -> list[Launch]:
    metadata = call.metadata
    config = decode_config(head_dim=call.head_dim, element_bytes=call.query.element_size(), group=call.group)
    heads_per_tile = min(call.group, config.block_m)

    launches: list[Launch] = []
    partials: Partials | None = None
    num_prefix_splits = 0
    groups: dict[str, Any] = {"group_start_ptr": None, "group_prefix_ptr": None, "num_groups": 0}
    prefix = prefix_launch(call, num_suffix_splits=_num_splits(metadata.max_suffix_len or metadata.max_seq_len))
    num_splits = _num_splits(metadata.max_seq_len) if prefix is None else prefix.num_suffix_splits
    if prefix is not None:
        launches.append(prefix.launch)
        num_prefix_splits, partials = prefix.num_splits, prefix.partials
        groups = {name: prefix.launch.arguments[name] for name in groups}
    elif num_splits > 1:
        partials = Partials.empty(call.decode_rows, num_splits=num_splits)

    launches.append(
        Launch(
            kernel=_decode_kernel,
            grid=(
                metadata.num_decodes,
                call.num_kv_heads * triton.cdiv(call.group, heads_per_tile),
                num_splits,
            ),
            arguments=call.arguments
            | groups
            | {
                "out_ptr": call.out,
                "sinks_ptr": call.sinks,
                "part_out_ptr": None if partials is None else partials.out,
                "part_lse_ptr": None if partials is None else partials.lse,
                "first_split": num_prefix_splits,
                "num_part_splits": num_prefix_splits + num_splits,
                "SPLIT_LEN": DECODE_SPLIT_LEN,
                "HEADS_PER_TILE": heads_per_tile,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_D": config.block_d,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            max_registers=config.max_registers,
        )
    )
    if partials is not None:
        launches.append(merge_launch(partials, call.decode_rows))
    return launches


def _num_splits(num_tokens: int) -> int:
    return int(triton.cdiv(max(1, num_tokens), DECODE_SPLIT_LEN))


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs"], do_not_specialize_on_alignment=_STEP_POINTERS)
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    scale,
    stride_qt,
    stride_qh,
    table_stride,
    first_seq,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program: BLOCK_Q query tokens x HEADS_PER_TILE heads of one KV head, which read its K and V once."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    # Later tiles see more keys: start the long ones first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES

    segment, first_tile = find_segment(query_start_ptr, first_seq, num_seqs, BLOCK_Q, 1, tile)
    seq = first_seq + segment
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    first_query = (tile - first_tile) * BLOCK_Q
    if first_query >= query_len:
        return

    m_offs = tl.arange(0, BLOCK_M)
    d_offs = tl.arange(0, BLOCK_D)
    query_offs = first_query + m_offs // HEADS_PER_TILE
    group_offs = head_tile * HEADS_PER_TILE + m_offs % HEADS_PER_TILE
    head_offs = kv_head * GROUP + group_offs
    m_mask = (m_offs < BLOCK_Q * HEADS_PER_TILE) & (query_offs < query_len) & (group_offs < GROUP)
    q_mask = m_mask[:, None] & (d_offs < HEAD_DIM)[None, :]
    token_offs = query_start + query_offs

    # q: [BLOCK_M, BLOCK_D]
    q_rows = token_offs.to(tl.int64) * stride_qt + head_offs * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + d_offs[None, :], mask=q_mask, other=0.0)
    context_len = seq_len - query_len
    q_pos = context_len + query_offs

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if sinks_ptr is None:
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    else:
        row_max = tl.load(sinks_ptr + head_offs, mask=m_mask, other=0.0).to(tl.float32) * LOG2E
        row_sum = tl.full([BLOCK_M], 1.0, dtype=tl.float32)

    qk_scale = scale
    if SOFTCAP is None:
        qk_scale = scale * LOG2E
    stride_block = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    k_ptr = k_cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    table_row_ptr = table_ptr + seq.to(tl.int64) * table_stride

    # Keys low .. high are visible to some row. Without a window those below masked_from are visible to all rows, and
    # need no mask; a window cuts the front of every row, and is short.
    first_pos = context_len + first_query
    high = tl.minimum(first_pos + BLOCK_Q, seq_len)
    if WINDOW is None:
        low = 0
        masked_from = (first_pos + 1) // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = attend_range(
            acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, kv_head, table_row_ptr,
            0, masked_from, low, high, stride_block, qk_scale,
            False, True, None, SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    else:
        low = tl.maximum(first_pos - WINDOW + 1, 0)
        masked_from = low // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = attend_range(
        acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, kv_head, table_row_ptr,
        masked_from, high, low, high, stride_block, qk_scale,
        True, True, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    out, _lse = normalize(acc, row_max, row_sum)
    out_offs = (token_offs.to(tl.int64) * NUM_HEADS + head_offs)[:, None] * HEAD_DIM + d_offs[None, :]
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(
    do_not_specialize=["table_stride", "num_groups", "first_split", "num_part_splits"],
    do_not_specialize_on_alignment=_STEP_POINTERS,
)
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    sinks_ptr,
    part_out_ptr,
    part_lse_ptr,
    group_start_ptr,
    group_prefix_ptr,
    scale,
    stride_qt,
    stride_qh,
    table_stride,
    num_groups,
    first_split,
    num_part_splits,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program: one sequence, the heads of one KV head, SPLIT_LEN tokens of context (Flash-Decoding, Dao 2023).

    With groups the context starts behind the shared prefix. With partial buffers the split's result goes there, else
    (one split, no groups) to the output.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    seq = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    split = tl.program_id(2)

    m_offs = tl.arange(0, BLOCK_M)
    d_offs = tl.arange(0, BLOCK_D)
    group_offs = head_tile * HEADS_PER_TILE + m_offs
    head_offs = kv_head * GROUP + group_offs
    m_mask = (m_offs < HEADS_PER_TILE) & (group_offs < GROUP)
    q_mask = m_mask[:, None] & (d_offs < HEAD_DIM)[None, :]
    row_offs = seq.to(tl.int64) * NUM_HEADS + head_offs

    seq_len = tl.load(seq_lens_ptr + seq)
    context_start = 0
    if group_start_ptr is not None:
        group = find_owner(group_start_ptr, num_groups, seq)
        context_start = tl.load(group_prefix_ptr + group)
    low = context_start + split * SPLIT_LEN
    high = tl.minimum(low + SPLIT_LEN, seq_len)
    if WINDOW is not None:
        # Keep the tiles where they would lie without a window: whole tiles that are out of sight are skipped.
        begin = low + tl.maximum(seq_len - WINDOW - low, 0) // BLOCK_N * BLOCK_N
        low = tl.maximum(low, seq_len - WINDOW)
    else:
        begin = low

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 (decided at compile time)
        # The sink is one more key without a value, and must be counted once: by the first split.
        if split == 0:
            row_max = tl.load(sinks_ptr + head_offs, mask=m_mask, other=0.0).to(tl.float32) * LOG2E
            row_sum = tl.full([BLOCK_M], 1.0, dtype=tl.float32)

    if begin < high:
        # q: [BLOCK_M, BLOCK_D]
        q = tl.load(
            q_ptr + seq.to(tl.int64) * stride_qt + head_offs[:, None] * stride_qh + d_offs[None, :],
            mask=q_mask,
            other=0.0,
        )
        qk_scale = scale
        if SOFTCAP is None:
            qk_scale = scale * LOG2E
        # All rows stand at the same position: low and high say everything about what they see.
        acc, row_max, row_sum = attend_range(
            acc, row_max, row_sum, q, m_offs,
            k_cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM, v_cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM,
            k_scale_ptr, v_scale_ptr, kv_head, table_ptr + seq.to(tl.int64) * table_stride,
            begin, high, low, high, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, qk_scale,
            True, False, None, SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    out, lse = normalize(acc, row_max, row_sum)
    if part_out_ptr is None:
        tl.store(
            out_ptr + row_offs[:, None] * HEAD_DIM + d_offs[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask
        )
    else:
        part_offs = row_offs * num_part_splits + first_split + split
        tl.store(part_lse_ptr + part_offs, lse, mask=m_mask)
        # An empty split writes no output. One that saw only the sink writes zeros: its lse is finite.
        live_mask = q_mask & (lse > float("-inf"))[:, None]
        tl.store(part_out_ptr + part_offs[:, None] * HEAD_DIM + d_offs[None, :], out, mask=live_mask)
