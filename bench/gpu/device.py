"""The device measured on, and how a call on it is timed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_L2_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or the CPU for trying things out. ``toy``: sizes for the latter."""

    device: torch.device
    toy: bool

    @classmethod
    def choose(cls, *, toy: bool) -> Device:
        """The GPU where there is one; without one only toy sizes make sense."""
        if torch.cuda.is_available() and not toy:
            return cls(device=torch.device("cuda"), toy=False)
        return cls(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"), toy=True)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU, float32 on a CPU."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def describe(self) -> dict[str, Any]:
        if not self.is_gpu:
            return {"name": "cpu", "torch": torch.__version__}
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give unused memory back."""
        gc.collect()  # engines and networks hold themselves in circles
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def recover(self) -> bool:
        """Give unused memory back after a part; False where the card answers no more."""
        try:
            self.free()
        except RuntimeError as err:  # an illegal address, say, which every later call is told of
            print(f"the GPU's context is lost: {err}", flush=True)
            return False
        return True

    def time_s(self, *calls: Callable[[], Any], repeats: int = 20) -> float:
        """Median seconds of a call on the device, with cold L2 and without the host.

        ``calls`` do the same on different memory, one after the other in one replayed graph, as in a step: what
        starting a graph costs would weigh more than a short call.
        """
        _run_all(calls)
        self.synchronize()
        if not self.is_gpu:
            return statistics.median(_wall_s(calls[0]) for _ in range(3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run_all(calls)
        flush = torch.empty(_L2_FLUSH_BYTES, dtype=torch.int8, device=self.device)
        pairs = []
        for _ in range(repeats):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3 / len(calls)


def _run_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _wall_s(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
