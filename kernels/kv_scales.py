"""KVScales: keys and values stored in eight bits, a scale for each token and head.

Owns what the stored codes mean. Knows tensors, not requests. Invariant: a head's row is coded by itself alone, so its
codes depend neither on the batch nor on calibration, and a shared prefix reads the same for all who share it.

A row ``x`` of one token and head becomes ``scale = max|x| / largest`` (float32; 1 for a row of zeros) and
``codes = round(x / scale)``, to the nearest and to even in a tie. ``largest`` is 127 for int8 and 448 for fp8, which is
e4m3 (OCP 8-bit floating point specification, section 5.1). Cards and processors that cannot convert fp8 store its bits
as uint8. Error of an element: half a step, max|x| / 254, for int8; 1/16 of itself for fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_BY_DTYPE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.uint8: 448.0}
# The first NVIDIA cards that convert fp8 in hardware.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """Scales of one layer's key and value cache, float32 ``[num_blocks, num_kv_heads, block_size]`` each."""

    keys: torch.Tensor
    values: torch.Tensor


def fp8_storage(device: torch.device) -> torch.dtype:
    """How fp8 is held on ``device``: as itself, or as its bits where nothing there converts it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        return torch.float8_e4m3fn
    return torch.uint8


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 where it is fp8, a type that not every operation that moves elements knows."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[..., D]`` of ``x [..., D]`` in one of ``LARGEST_BY_DTYPE``, and their scales ``[...]``."""
    wide = x.float()
    # Not by a number: PyTorch multiplies by its inverse on a GPU, and the last bit of a scale can move a code.
    scales = wide.abs().amax(-1) / torch.full((), LARGEST_BY_DTYPE[dtype], device=x.device)
    scales = torch.where(scales == 0, 1.0, scales)
    steps = wide / scales[..., None]
    if dtype == torch.int8:
        return steps.round().to(torch.int8), scales
    largest = LARGEST_BY_DTYPE[dtype]  # x / (x / 448) can round to just above it
    return steps.clamp(-largest, largest).to(torch.float8_e4m3fn).view(dtype), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows ``[..., D]`` that codes and scales stand for."""
    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return codes.to(dtype) * scales[..., None].to(dtype)
