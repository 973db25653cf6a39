"""What the card can do: copy bandwidth and matrix product rate, the yardsticks of all that follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured by PyTorch. Copy counts the bytes read and the bytes written."""

    copy_gb_per_s: float
    matmul_tflop_per_s: float


def measure(device: Device) -> Rates:
    num_bytes = 1 << (24 if device.toy else 32)
    side = 256 if device.toy else 8192
    source = torch.ones(num_bytes // 4, device=device.device)
    target = torch.empty_like(source)
    copy_s = device.time_s(lambda: target.copy_(source))
    a = torch.randn(side, side, device=device.device, dtype=device.dtype)
    b = torch.randn(side, side, device=device.device, dtype=device.dtype)
    product = torch.empty_like(a)
    matmul_s = device.time_s(lambda: torch.mm(a, b, out=product))
    return Rates(copy_gb_per_s=2 * num_bytes / copy_s / 1e9, matmul_tflop_per_s=2 * side**3 / matmul_s / 1e12)
