"""Device: what an engine computes on, in which type, and the memory that is left there.

Owns the choice by settings and machine. Knows no model.
"""

from __future__ import annotations

import torch

from kvq.engine.budget import KVMemory
from kvq.engine.config import EngineConfig
from kvq.engine.errors import ConfigError

# Captured graphs and the allocator's own waste, as a share of a GPU's memory.
_GRAPH_SHARE = 1 / 50
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(config: EngineConfig) -> torch.device:
    """The GPU where there is one and it is wanted, else the CPU.

    Raises:
        ConfigError: a GPU is asked for that is not there.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device", "is cuda, but torch sees no GPU; use auto or cpu")
    return torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The setting, else float32 on a CPU and 16 bits on a GPU."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def available_gpu_memory(config: EngineConfig, *, activation_bytes: int) -> KVMemory:
    """What is left of the allowed share of the GPU once the weights are there, less what a step takes."""
    torch.cuda.empty_cache()  # what the profiling step and the joining of weights left with the allocator
    free, total = torch.cuda.mem_get_info()
    return KVMemory.of_gpu(
        total_bytes=total,
        utilization=config.gpu_memory_utilization,
        taken_bytes=total - free + activation_bytes + int(total * _GRAPH_SHARE),
    )
