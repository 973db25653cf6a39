"""Memory in huge pages: what is streamed through from end to end, weights and the KV cache of a CPU.

Owns the mapping. With pages of 4 KiB a core that streams weights waits for address translations: in a virtual machine
two cores read 12 GB/s from small pages and 26 GB/s from huge ones. Where the system has none to give (or is not Linux)
the same memory comes in small pages.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20


def huge_empty(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros that take memory only once they are written, aligned to a page."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.zeros(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones stay small
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)


def huge_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on memory of its own."""
    return huge_empty(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)


class HugePages:
    """Hands out pieces of large mappings, each aligned to a cache line; a mapping lives as long as its pieces."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeros."""
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = huge_empty(max(num_bytes, _CHUNK_BYTES)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece

    def floats(self, count: int) -> torch.Tensor:
        """float32 [count], zeros."""
        return self.take(count * 4).view(torch.float32)
