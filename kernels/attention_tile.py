# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The inner loop that all attention kernels share: a tile of query rows over a range of cached keys.

Owns the online softmax (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023) and the walk through the block
table. Does not know where the query rows come from. Invariant: the weight of a key that is not visible is exactly
zero and its bits are never loaded, so that results depend neither on other sequences nor on empty slots.

Softmax state of a tile of M rows, all float32: ``acc [M, BLOCK_D]`` the weighted values so far, ``row_max [M]`` the
largest score so far in units of log2, ``row_sum [M]`` the sum of ``exp2(score - row_max)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq.kernels.kv_codes import decode

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_segment(start_ptr, first, count, block: tl.constexpr, rows_per_item: tl.constexpr, tile):
    """Which of ``count`` segments tile number ``tile`` belongs to, when every segment starts a new tile.

    Segment ``i`` begins at row ``start[first + i] * rows_per_item`` (counted from the first segment) and owns the
    tiles from ``row // block + i`` on: enough for all its rows, and monotone, so that a binary search replaces a
    host-side list of tiles. Returns the segment and its first tile.
    """
    origin = tl.load(start_ptr + first)
    low = 0
    high = count
    while low < high:
        mid = (low + high) // 2
        mid_row = (tl.load(start_ptr + first + mid) - origin) * rows_per_item
        if mid_row // block + mid <= tile:
            low = mid + 1
        else:
            high = mid
    segment = low - 1
    first_row = (tl.load(start_ptr + first + segment) - origin) * rows_per_item
    return segment, first_row // block + segment


@triton.jit
def find_owner(start_ptr, count, item):
    """Which of ``count`` segments ``item`` lies in; segment ``i`` covers ``start[i] .. start[i + 1]``."""
    low = 0
    high = count
    while low < high:
        mid = (low + high) // 2
        if tl.load(start_ptr + mid) <= item:
            low = mid + 1
        else:
            high = mid
    return low - 1


@triton.jit
def attend_range(
    acc,
    row_max,
    row_sum,
    q,  # [M, BLOCK_D]
    q_pos,  # [M], absolute positions of the query rows
    k_ptr,  # cache pointers at the KV head
    v_ptr,
    k_scale_ptr,  # the layer's scales; None where the cache holds numbers as they are
    v_scale_ptr,
    kv_head,
    table_ptr,  # block table row of the sequence
    begin,  # key positions begin .. end, in steps of BLOCK_N from begin
    end,
    low,  # keys outside low .. high are not loaded (MASKED only)
    high,
    stride_block,
    qk_scale,  # scale * log2(e), or scale alone with a soft cap
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys at positions ``begin .. end`` into the softmax state. 4 M N D operations, 2 N D loads."""
    n_offs = tl.arange(0, BLOCK_N)
    d_offs = tl.arange(0, BLOCK_D)
    # Block ids are looked up one iteration ahead: loads of keys that hang on a load of the same iteration would not be
    # pipelined (Triton splits its stages among the two, and holds one tile of keys instead of several).
    next_ids = tl.load(table_ptr + (begin + n_offs) // BLOCK_SIZE, mask=begin + n_offs < end, other=0)
    for start in range(begin, end, BLOCK_N):
        k_pos = start + n_offs
        block_ids = next_ids
        ahead = k_pos + BLOCK_N
        next_ids = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        if MASKED:
            n_mask = (k_pos >= low) & (k_pos < high)
        rows = block_ids.to(tl.int64) * stride_block + (k_pos % BLOCK_SIZE) * HEAD_DIM
        offs = rows[:, None] + d_offs[None, :]
        scale_offs = block_ids.to(tl.int64) * (stride_block // HEAD_DIM) + kv_head * BLOCK_SIZE + k_pos % BLOCK_SIZE

        # k, v: [BLOCK_N, BLOCK_D]
        if MASKED:
            kv_mask = n_mask[:, None] & (d_offs < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offs, mask=kv_mask, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + offs)
        else:
            k = tl.load(k_ptr + offs, mask=(d_offs < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(decode(k, q.dtype)), input_precision=PRECISION) * qk_scale  # [M, BLOCK_N]
        if k_scale_ptr is not None:
            # A key's scale is one factor of its column; a value's goes into its weight.
            if MASKED:
                k_scales = tl.load(k_scale_ptr + scale_offs, mask=n_mask, other=0.0)
                v_scales = tl.load(v_scale_ptr + scale_offs, mask=n_mask, other=0.0)
            else:
                k_scales = tl.load(k_scale_ptr + scale_offs)
                v_scales = tl.load(v_scale_ptr + scale_offs)
            scores = scores * k_scales[None, :]
        if SOFTCAP is not None:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = (SOFTCAP * LOG2E) * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
        if MASKED:
            visible = n_mask[None, :]
            if CAUSAL:
                visible = visible & (k_pos[None, :] <= q_pos[:, None])
            if WINDOW is not None:
                visible = visible & (k_pos[None, :] > q_pos[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        if MASKED:
            # A row that has seen no key keeps -inf; the difference of two of them would be NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if v_scale_ptr is not None:
            weights = weights * v_scales[None, :]
        row_max = new_max

        if MASKED:
            v = tl.load(v_ptr + offs, mask=kv_mask, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            v = tl.load(v_ptr + offs)
        else:
            v = tl.load(v_ptr + offs, mask=(d_offs < HEAD_DIM)[None, :], other=0.0)
        acc = tl.dot(weights.to(q.dtype), decode(v, q.dtype), acc, input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def normalize(acc, row_max, row_sum):
    """The attention output of the rows and its log2-sum-exp: what partial results are merged by.

    A row without any key yields zeros and ``-inf``.
    """
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(safe_sum))
    return acc / safe_sum[:, None], lse
