# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton scatter of new keys and values into the paged cache, alone or fused with the rotary embedding.

Knows the cache layout ``[num_blocks, num_kv_heads, block_size, head_dim]`` and slots, nothing of sequences. Pure
bandwidth: every element is read once and written once. Invariant: only the slots of ``slot_mapping`` are touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq.kernels.attention_config import next_power_of_2
from kvq.kernels.kv_codes import encode, row_scales
from kvq.kernels.kv_scales import KVScales
from kvq.kernels.launch import Launch

_TILE = 2048  # elements of a program: 16 bytes per thread of 4 warps, a few times over


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """See ``reference.write_kv``. Rows may be strided (slices of a fused projection)."""
    write_kv_launch(key, value, key_cache, value_cache, slot_mapping, scales).run()


def write_kv_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> Launch:
    _check_rows(key, value, key_cache, value_cache, scales)
    num_tokens, num_kv_heads, head_dim = key.shape
    block_d = next_power_of_2(head_dim)
    block_h = max(1, min(next_power_of_2(num_kv_heads), _TILE // block_d))
    return Launch(
        kernel=_write_kv_kernel,
        grid=(num_tokens, triton.cdiv(num_kv_heads, block_h)),
        arguments={
            "key_ptr": key,
            "value_ptr": value,
            "k_cache_ptr": key_cache,
            "v_cache_ptr": value_cache,
            "k_scale_ptr": None if scales is None else scales.keys,
            "v_scale_ptr": None if scales is None else scales.values,
            "slot_ptr": slot_mapping,
            "stride_kt": key.stride(0),
            "stride_kh": key.stride(1),
            "stride_vt": value.stride(0),
            "stride_vh": value.stride(1),
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": key_cache.shape[2],
            "BLOCK_H": block_h,
            "BLOCK_D": block_d,
        },
    )


def rotary_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """See ``reference.rotary_write_kv``: saves the rotated keys' way to memory and back, and two kernels."""
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotary_write_kv_launch(query, key, value, cos, sin, key_cache, value_cache, slot_mapping, rotated, scales).run()
    return rotated


def rotary_write_kv_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotated: torch.Tensor,
    scales: KVScales | None = None,
) -> Launch:
    _check_rows(key, value, key_cache, value_cache, scales)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rotary_dim = cos.shape[1]
    if rotary_dim > head_dim or rotary_dim % 2 or cos.shape != sin.shape:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit head_dim {head_dim}")
    if query.stride(2) != 1 or cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError("query, cos and sin must be contiguous in their last dimension, cos and sin alike")
    block_h = max(1, min(next_power_of_2(num_kv_heads), _TILE // next_power_of_2(head_dim)))
    return Launch(
        kernel=_rotary_write_kv_kernel,
        grid=(num_tokens, triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_h)),
        arguments={
            "query_ptr": query,
            "key_ptr": key,
            "value_ptr": value,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "k_cache_ptr": key_cache,
            "v_cache_ptr": value_cache,
            "k_scale_ptr": None if scales is None else scales.keys,
            "v_scale_ptr": None if scales is None else scales.values,
            "slot_ptr": slot_mapping,
            "rotated_ptr": rotated,
            "stride_qt": query.stride(0),
            "stride_qh": query.stride(1),
            "stride_kt": key.stride(0),
            "stride_kh": key.stride(1),
            "stride_vt": value.stride(0),
            "stride_vh": value.stride(1),
            "stride_ct": cos.stride(0),
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "HALF_DIM": rotary_dim // 2,
            "BLOCK_SIZE": key_cache.shape[2],
            "BLOCK_H": block_h,
            "BLOCK_D": next_power_of_2(head_dim),
            "BLOCK_HALF": next_power_of_2(rotary_dim // 2),
            "BLOCK_REST": next_power_of_2(head_dim - rotary_dim),
        },
    )


def _check_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scales: KVScales | None,
) -> None:
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    if key.shape != value.shape or key.shape[1:] != (num_kv_heads, head_dim):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit key_cache {tuple(key_cache.shape)}"
        )
    if value_cache.shape != key_cache.shape or not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("key_cache and value_cache must have one shape and be contiguous")
    if scales is not None and not scales.keys.shape == scales.values.shape == key_cache.shape[:3]:
        raise ValueError(f"scales {tuple(scales.keys.shape)} do not fit key_cache {tuple(key_cache.shape)}")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("key and value must be contiguous in their last dimension")


@triton.jit
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program: BLOCK_H KV heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    h_offs = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d_offs = tl.arange(0, BLOCK_D)
    mask = (h_offs < NUM_KV_HEADS)[:, None] & (d_offs < HEAD_DIM)[None, :]
    # key, value: [BLOCK_H, BLOCK_D]
    key = tl.load(key_ptr + token * stride_kt + h_offs[:, None] * stride_kh + d_offs[None, :], mask=mask, other=0.0)
    value = tl.load(value_ptr + token * stride_vt + h_offs[:, None] * stride_vh + d_offs[None, :], mask=mask, other=0.0)
    rows = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + h_offs) * BLOCK_SIZE + slot % BLOCK_SIZE
    cache_offs = rows[:, None] * HEAD_DIM + d_offs[None, :]
    _store_rows(key, k_cache_ptr, cache_offs, mask, k_scale_ptr, rows, h_offs < NUM_KV_HEADS)
    _store_rows(value, v_cache_ptr, cache_offs, mask, v_scale_ptr, rows, h_offs < NUM_KV_HEADS)


@triton.jit
def _store_rows(x, cache_ptr, offs, mask, scale_ptr, rows, row_mask):
    """Store ``x [R, D]``, zero where masked: as it is, or as codes whose scales go to ``scale_ptr + rows``."""
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if scale_ptr is None:
        tl.store(cache_ptr + offs, x.to(dtype), mask=mask)
    else:
        wide = x.to(tl.float32)
        scales = row_scales(tl.max(tl.abs(wide), 1), dtype)
        tl.store(scale_ptr + rows, scales, mask=row_mask)
        tl.store(cache_ptr + offs, encode(wide, scales, dtype), mask=mask)


@triton.jit
def _rotary_write_kv_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_ptr,
    rotated_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ct,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """A program: BLOCK_H query heads of one token, or BLOCK_H KV heads of it with their values."""
    NUM_QUERY_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tile < NUM_QUERY_TILES:
        h_offs = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate_rows(
            query_ptr + token * stride_qt, h_offs * stride_qh, rotated_ptr, None, token * NUM_HEADS + h_offs,
            h_offs < NUM_HEADS,
            cos_ptr + token * stride_ct, sin_ptr + token * stride_ct, HEAD_DIM, HALF_DIM, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        h_offs = (tile - NUM_QUERY_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        h_mask = h_offs < NUM_KV_HEADS
        slot = tl.load(slot_ptr + token)
        rows = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + h_offs) * BLOCK_SIZE + slot % BLOCK_SIZE
        _rotate_rows(
            key_ptr + token * stride_kt, h_offs * stride_kh, k_cache_ptr, k_scale_ptr, rows, h_mask,
            cos_ptr + token * stride_ct, sin_ptr + token * stride_ct, HEAD_DIM, HALF_DIM, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
        d_offs = tl.arange(0, BLOCK_D)
        mask = h_mask[:, None] & (d_offs < HEAD_DIM)[None, :]
        # value: [BLOCK_H, BLOCK_D]
        value = tl.load(
            value_ptr + token * stride_vt + h_offs[:, None] * stride_vh + d_offs[None, :], mask=mask, other=0.0
        )
        _store_rows(value, v_cache_ptr, rows[:, None] * HEAD_DIM + d_offs[None, :], mask, v_scale_ptr, rows, h_mask)


@triton.jit
def _rotate_rows(
    in_ptr, in_rows, out_ptr, out_scale_ptr, out_rows, row_mask, cos_ptr, sin_ptr,
    HEAD_DIM: tl.constexpr, HALF_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate head rows of one token in float32; the dimensions behind the rotary ones are copied."""
    half_offs = tl.arange(0, BLOCK_HALF)
    half_mask = half_offs < HALF_DIM
    # cos, sin: [BLOCK_HALF] for each half
    cos_first = tl.load(cos_ptr + half_offs, mask=half_mask, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_ptr + HALF_DIM + half_offs, mask=half_mask, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_ptr + half_offs, mask=half_mask, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin_ptr + HALF_DIM + half_offs, mask=half_mask, other=0.0).to(tl.float32)[None, :]
    mask = row_mask[:, None] & half_mask[None, :]
    in_ptrs = in_ptr + in_rows[:, None] + half_offs[None, :]
    out_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + half_offs[None, :]
    # first, second: [BLOCK_H, BLOCK_HALF]; rest: [BLOCK_H, BLOCK_REST]
    first = tl.load(in_ptrs, mask=mask, other=0.0)
    second = tl.load(in_ptrs + HALF_DIM, mask=mask, other=0.0)
    in_dtype: tl.constexpr = in_ptr.dtype.element_ty
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    first = (wide_first * cos_first - wide_second * sin_first).to(in_dtype)
    second = (wide_second * cos_second + wide_first * sin_second).to(in_dtype)
    has_rest: tl.constexpr = HEAD_DIM > 2 * HALF_DIM
    if has_rest:
        rest_offs = 2 * HALF_DIM + tl.arange(0, BLOCK_REST)
        rest_mask = row_mask[:, None] & (rest_offs < HEAD_DIM)[None, :]
        rest_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + rest_offs[None, :]
        rest = tl.load(in_ptr + in_rows[:, None] + rest_offs[None, :], mask=rest_mask, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if out_scale_ptr is None:
        tl.store(out_ptrs, first.to(dtype), mask=mask)
        tl.store(out_ptrs + HALF_DIM, second.to(dtype), mask=mask)
        if has_rest:
            tl.store(rest_ptrs, rest.to(dtype), mask=rest_mask)
    else:
        largest = tl.max(tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))), 1)
        if has_rest:
            largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), 1))
        scales = row_scales(largest, dtype)
        tl.store(out_scale_ptr + out_rows, scales, mask=row_mask)
        tl.store(out_ptrs, encode(first.to(tl.float32), scales, dtype), mask=mask)
        tl.store(out_ptrs + HALF_DIM, encode(second.to(tl.float32), scales, dtype), mask=mask)
        if has_rest:
            tl.store(rest_ptrs, encode(rest.to(tl.float32), scales, dtype), mask=rest_mask)
