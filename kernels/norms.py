# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton row operations between the matrix products: RMSNorm, residual add with RMSNorm, SiLU x up.

Knows rows, any number of them, of float32, float16 or bfloat16; statistics are float32. Pure bandwidth: an element is
read and written once. Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq.kernels.attention_config import next_power_of_2
from kvq.kernels.launch import Launch

_TILE = 1024  # elements of a program when rows are short


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``reference.rms_norm``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_launch(x, None, weight, eps, out, None).run()
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.add_rms_norm``. Returns new tensors."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    rms_norm_launch(x, residual, weight, eps, out, total).run()
    return out, total


def rms_norm_launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> Launch:
    """With ``residual``: the sum goes to ``total`` and is what is normalised.

    Heads ``[T, H, D]`` that are a part of a fused projection are read in place.
    """
    num_cols = x.shape[-1]
    if weight.shape != (num_cols,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"weight {tuple(weight.shape)} or residual does not fit x {tuple(x.shape)}")
    if residual is not None or x.dim() != 3 or x.stride(2) != 1:
        x = x.reshape(-1, 1, num_cols)
    num_heads = x.shape[1]
    num_rows = x.shape[0] * num_heads
    block_d = next_power_of_2(num_cols)
    block_r = max(1, _TILE // block_d)
    return Launch(
        kernel=_rms_norm_kernel,
        grid=(triton.cdiv(num_rows, block_r),),
        arguments={
            "x_ptr": x,
            "residual_ptr": None if residual is None else residual.reshape(-1, num_cols),
            "weight_ptr": weight,
            "out_ptr": out,
            "total_ptr": total,
            "eps": eps,
            "num_rows": num_rows,
            "stride_xt": x.stride(0),
            "stride_xh": x.stride(1),
            "NUM_HEADS": num_heads,
            "NUM_COLS": num_cols,
            "BLOCK_R": block_r,
            "BLOCK_D": block_d,
        },
        num_warps=min(16, max(4, block_d // 512)),
    )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``reference.silu_mul``."""
    out = torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_launch(gate_up, out).run()
    return out


def silu_mul_launch(gate_up: torch.Tensor, out: torch.Tensor) -> Launch:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} has no two halves")
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    num_cols = out.shape[-1]
    block_d = min(_TILE, next_power_of_2(num_cols))
    return Launch(
        kernel=_silu_mul_kernel,
        grid=(rows.shape[0], triton.cdiv(num_cols, block_d)),
        arguments={"gate_up_ptr": rows, "out_ptr": out, "NUM_COLS": num_cols, "BLOCK_D": block_d},
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    num_rows,
    stride_xt,
    stride_xh,
    NUM_HEADS: tl.constexpr,
    NUM_COLS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program: BLOCK_R whole rows."""
    r_offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d_offs = tl.arange(0, BLOCK_D)
    mask = (r_offs < num_rows)[:, None] & (d_offs < NUM_COLS)[None, :]
    offs = r_offs.to(tl.int64)[:, None] * NUM_COLS + d_offs[None, :]
    x_rows = (r_offs // NUM_HEADS).to(tl.int64) * stride_xt + r_offs % NUM_HEADS * stride_xh
    # x: [BLOCK_R, BLOCK_D]
    x = tl.load(x_ptr + x_rows[:, None] + d_offs[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        dtype = total_ptr.dtype.element_ty
        total = (x + tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total_ptr + offs, total, mask=mask)
        x = total.to(tl.float32)
    # weight: [BLOCK_D]
    weight = tl.load(weight_ptr + d_offs, mask=d_offs < NUM_COLS, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / NUM_COLS + eps)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, NUM_COLS: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: BLOCK_D elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    d_offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d_offs < NUM_COLS
    # gate, up: [BLOCK_D]
    gate_ptr = gate_up_ptr + row * 2 * NUM_COLS
    gate = tl.load(gate_ptr + d_offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + NUM_COLS + d_offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_COLS + d_offs, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)
