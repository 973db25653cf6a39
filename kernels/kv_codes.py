# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Keys and values of eight bits inside Triton kernels: rows to codes and scales, codes back to numbers.

Owns the bits; what codes and scales mean is said in ``kv_scales``, and the codes are the same, bit for bit. uint8 is
e4m3 on a card that cannot convert it: a handful of integer operations per element.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_scales(largest_values, dtype: tl.constexpr):
    """Scales of rows whose largest magnitudes are ``largest_values``, for codes of type ``dtype``."""
    largest: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    return tl.where(largest_values == 0.0, 1.0, tl.div_rn(largest_values, tl.full([], largest, tl.float32)))


@triton.jit
def encode(x, scales, dtype: tl.constexpr):
    """Codes of ``x [R, D]`` (float32) with ``scales [R]``."""
    # Divided as the reference does: a product with the inverse could be fused, and rounds elsewhere.
    steps = tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
    if dtype == tl.int8:
        # Adding 1.5 * 2^23 leaves the nearest whole number in the low bits, the even one in a tie.
        return ((steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
    elif dtype == tl.uint8:
        signs = (steps.to(tl.int32, bitcast=True) >> 24) & 0x80
        size = tl.minimum(tl.abs(steps), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # Below 2^-6 the numbers are multiples of 2^-9: adding 2^14 leaves the nearest in the low bits.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        # From there on: round to three mantissa bits, to even in a tie, and change the exponent's bias from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        return (tl.where(size < 0.015625, small, normal) | signs).to(tl.uint8)
    else:
        return tl.clamp(steps, -448.0, 448.0).to(dtype)


@triton.jit
def decode(codes, dtype: tl.constexpr):
    """The numbers that ``codes`` stand for before scaling, as ``dtype``; exact. Other types are only cast."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int16)
        # e4m3 is a float16 with its low mantissa bits missing and an exponent bias of 7 for 15: 2^8 apart.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(dtype)
    elif codes.dtype == tl.int8:
        return codes.to(tl.float32).to(dtype)
    else:
        return codes.to(dtype)
