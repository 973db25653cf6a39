# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Grouped-prefix decode: the shared part of a group's context is read once, as a matrix product for all its queries.

Decode reads each sequence's whole context for one query row per head; sequences that share a prefix of P tokens
read the same P keys again and again. Here a program takes BLOCK_M (sequence, head) rows of one group over a split
of the prefix: the bytes of the prefix are divided by the rows of a tile, and the tensor cores do the work. The
suffixes are attended by the plain decode kernel, and ``attention_merge`` joins the parts.
Sources: Hydragen (Juravsky et al. 2024), FastTree (Pan et al. 2025), FlashInfer's cascade attention.

Knows the groups of the step's metadata, not how they were found.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvq.kernels.attention_call import AttentionCall
from kvq.kernels.attention_config import prefix_config, prefix_split_len
from kvq.kernels.attention_merge import Partials
from kvq.kernels.attention_tile import LOG2E, attend_range, find_segment, normalize
from kvq.kernels.launch import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLaunch:
    """The prefix pass, and the buffers it shares with the suffix pass: its parts are the first ``num_splits``."""

    launch: Launch
    partials: Partials
    num_splits: int
    num_suffix_splits: int


def prefix_launch(call: AttentionCall, *, num_suffix_splits: int) -> PrefixLaunch | None:
    """The prefix pass over all groups, with room behind its parts for ``num_suffix_splits`` more.

    ``None`` where the step has no groups, or heads of this size have no tile: then every sequence is attended alone.
    """
    metadata = call.metadata
    config = prefix_config(head_dim=call.head_dim, element_bytes=call.query.element_size(), kv_codes=call.kv_codes)
    if config is None or metadata.group_start_loc is None or metadata.group_prefix_len is None:
        return None
    num_groups = metadata.group_prefix_len.shape[0]
    num_full_tiles = metadata.num_decodes * call.group // config.block_m
    num_tiles = num_full_tiles + num_groups
    max_prefix_len = metadata.max_seq_len if metadata.max_prefix_len is None else metadata.max_prefix_len
    # Tiles beyond the full ones are mostly empty, above all in a captured step, which has room for more groups.
    split_len = prefix_split_len(
        num_tiles=max(1, num_full_tiles), num_kv_heads=call.num_kv_heads, max_prefix_len=max_prefix_len
    )
    num_splits = triton.cdiv(max_prefix_len, split_len)
    partials = Partials.empty(call.decode_rows, num_splits=num_splits + num_suffix_splits)
    launch = Launch(
        kernel=_prefix_kernel,
        grid=(num_tiles, call.num_kv_heads, num_splits),
        arguments=call.arguments
        | {
            "part_out_ptr": partials.out,
            "part_lse_ptr": partials.lse,
            "group_start_ptr": metadata.group_start_loc,
            "group_prefix_ptr": metadata.group_prefix_len,
            "num_groups": num_groups,
            "num_part_splits": num_splits + num_suffix_splits,
            "split_len": split_len,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": config.block_d,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
    )
    return PrefixLaunch(launch=launch, partials=partials, num_splits=num_splits, num_suffix_splits=num_suffix_splits)


@triton.jit(
    do_not_specialize=["table_stride", "num_groups", "num_part_splits", "split_len"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "group_start_ptr", "group_prefix_ptr"],
)
def _prefix_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    seq_lens_ptr,
    part_out_ptr,
    part_lse_ptr,
    group_start_ptr,
    group_prefix_ptr,
    scale,
    stride_qt,
    stride_qh,
    table_stride,
    num_groups,
    num_part_splits,
    split_len,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program: BLOCK_M (sequence, head) rows of a group x one KV head x one split of the prefix.

    4 M P D operations for 2 P D loaded elements. A group without a prefix only records that its parts are empty.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    group, first_tile = find_segment(group_start_ptr, 0, num_groups, BLOCK_M, GROUP, tile)
    first_seq = tl.load(group_start_ptr + group)
    num_rows = (tl.load(group_start_ptr + group + 1) - first_seq) * GROUP
    first_row = (tile - first_tile) * BLOCK_M
    if first_row >= num_rows:
        return

    m_offs = first_row + tl.arange(0, BLOCK_M)
    d_offs = tl.arange(0, BLOCK_D)
    m_mask = m_offs < num_rows
    q_mask = m_mask[:, None] & (d_offs < HEAD_DIM)[None, :]
    seq_offs = first_seq + m_offs // GROUP
    head_offs = kv_head * GROUP + m_offs % GROUP
    q_pos = m_offs  # only a window asks for positions
    if WINDOW is not None:
        q_pos = tl.load(seq_lens_ptr + seq_offs, mask=m_mask, other=1) - 1

    low = split * split_len
    high = tl.minimum(low + split_len, tl.load(group_prefix_ptr + group))
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if low < high:
        # q: [BLOCK_M, BLOCK_D]
        q_rows = seq_offs.to(tl.int64) * stride_qt + head_offs * stride_qh
        q = tl.load(q_ptr + q_rows[:, None] + d_offs[None, :], mask=q_mask, other=0.0)
        qk_scale = scale
        if SOFTCAP is None:
            qk_scale = scale * LOG2E
        stride_block = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        k_ptr = k_cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
        v_ptr = v_cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
        table_row_ptr = table_ptr + first_seq.to(tl.int64) * table_stride
        # The prefix lies before every query of the group, so there is no causal mask; a window hides it row by row.
        full_high = low
        if WINDOW is None:
            full_high = low + (high - low) // BLOCK_N * BLOCK_N
            acc, row_max, row_sum = attend_range(
                acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, kv_head, table_row_ptr,
                low, full_high, low, high, stride_block, qk_scale,
                False, False, None, SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
        acc, row_max, row_sum = attend_range(
            acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, kv_head, table_row_ptr,
            full_high, high, low, high, stride_block, qk_scale,
            True, False, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    out, lse = normalize(acc, row_max, row_sum)
    part_offs = (seq_offs.to(tl.int64) * NUM_HEADS + head_offs) * num_part_splits + split
    tl.store(part_lse_ptr + part_offs, lse, mask=m_mask)
    live_mask = q_mask & (lse > float("-inf"))[:, None]
    tl.store(part_out_ptr + part_offs[:, None] * HEAD_DIM + d_offs[None, :], out, mask=live_mask)
