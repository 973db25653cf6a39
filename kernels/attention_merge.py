# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Partial attention results over parts of a context, and their merge by log-sum-exp.

``out = sum_i out_i * 2^(lse_i - max) / sum_i 2^(lse_i - max)``: exact, because ``2^lse_i`` is the softmax
denominator of part ``i`` (Flash-Decoding; Hydragen section 3.1; FlashInfer cascade). Invariant: a part with
``lse = -inf`` is empty and its output is never read; parts are summed in the order of their index, so that adding
empty ones changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvq.kernels.attention_config import next_power_of_2
from kvq.kernels.launch import Launch

_CHUNK = 16  # parts loaded together


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """``out [rows, num_heads, num_splits, head_dim]``, ``lse [rows, num_heads, num_splits]`` (log2), in float32."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def empty(cls, rows: torch.Tensor, *, num_splits: int) -> Partials:
        """Uninitialised partials for output rows ``[rows, num_heads, head_dim]``."""
        num_rows, num_heads, head_dim = rows.shape
        shape = (num_rows, num_heads, num_splits)
        return cls(
            out=torch.empty((*shape, head_dim), dtype=torch.float32, device=rows.device),
            lse=torch.empty(shape, dtype=torch.float32, device=rows.device),
        )


def merge_launch(partials: Partials, out: torch.Tensor) -> Launch:
    """Merge all splits into the contiguous ``out [rows, num_heads, head_dim]``."""
    num_rows, num_heads, num_splits, head_dim = partials.out.shape
    return Launch(
        kernel=_merge_kernel,
        grid=(num_rows * num_heads,),
        arguments={
            "part_out_ptr": partials.out,
            "part_lse_ptr": partials.lse,
            "out_ptr": out,
            "num_splits": num_splits,
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "CHUNK": _CHUNK,
        },
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    part_out_ptr, part_lse_ptr, out_ptr, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program: one (row, head). Reads 4 D bytes per live part."""
    row = tl.program_id(0).to(tl.int64)
    d_offs = tl.arange(0, BLOCK_D)
    d_mask = d_offs < HEAD_DIM
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, num_splits, CHUNK):
        s_offs = start + tl.arange(0, CHUNK)
        # lse: [CHUNK]
        lse = tl.load(part_lse_ptr + row * num_splits + s_offs, mask=s_offs < num_splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(top - shift)
        # parts: [CHUNK, BLOCK_D]
        parts = tl.load(
            part_out_ptr + (row * num_splits + s_offs)[:, None] * HEAD_DIM + d_offs[None, :],
            mask=(lse > float("-inf"))[:, None] & d_mask[None, :],
            other=0.0,
        )
        acc = acc * decay + tl.sum(parts * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + d_offs, out.to(out_ptr.dtype.element_ty), mask=d_mask)
