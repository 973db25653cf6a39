"""The machine a measurement was made on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a reader needs in order to compare: never a host name."""

    cpu_model: str
    cpu_flags: str  # the vector extensions that decide a GEMM's speed
    num_cores: int  # that this process may use
    memory_bytes: int
    os: str

    @classmethod
    def this(cls) -> Machine:
        info = _cpuinfo()
        family = f"family {info['cpu family']} model {info['model']}" if "cpu family" in info else ""
        flags = info.get("flags", info.get("Features", "")).split()
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "asimd", "sve", "bf16")
        return cls(
            cpu_model=" ".join(filter(None, [info.get("model name", platform.machine()), family])),
            cpu_flags=" ".join(flag for flag in wanted if flag in flags),
            num_cores=num_cores(),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            os=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        )


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Running processes over the last minute: above the number of cores, timings say little."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
