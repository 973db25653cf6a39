"""Staging: how small tensors go to the device and come back without the host waiting.

Owns pinned memory and the events that say when a copy has arrived. On a CPU both ways are the values themselves.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """``values`` on the device; through pinned memory on the way to a GPU, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class OnTheWay:
    """A tensor that is being copied to the host behind the work queued before it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
