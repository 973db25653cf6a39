"""MemoryBudget: how many KV blocks there are, by arithmetic, before anything is allocated.

Owns the size formula and the refusal of what cannot fit. Knows bytes and tokens; imports no torch.
Formula: KV bytes per token = layers x 2 x kv_heads x head_dim x bytes(dtype).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvq.engine.config import EngineConfig
from kvq.engine.errors import DoesNotFit

# A CPU's memory is everybody's: by default the cache takes at most this share of what is free, and this much.
_CPU_FREE_SHARE = 0.4
_CPU_DEFAULT_LIMIT = 4 << 30


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return num_layers * 2 * num_kv_heads * head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The cache that fits, and the longest sequence it allows."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def num_tokens(self) -> int:
        """Tokens the whole cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_full_sequences(self) -> float:
        """Sequences of ``max_model_len`` tokens that fit at the same time."""
        return self.num_tokens / self.max_model_len

    @classmethod
    def plan(
        cls, config: EngineConfig, *, bytes_per_token: int, available_bytes: int, model_limit: int | None
    ) -> MemoryBudget:
        """Decide the number of blocks.

        Args:
            bytes_per_token: KV bytes of one token.
            available_bytes: memory that may be used for KV.
            model_limit: the model's own longest sequence.

        Raises:
            DoesNotFit: naming the setting to change and a value that works, max_model_len first.
        """
        wanted = config.max_model_len or model_limit
        if config.max_model_len and model_limit and config.max_model_len > model_limit:
            raise DoesNotFit(
                "max_model_len", f"is {config.max_model_len}, but the model was made for {model_limit} tokens at most"
            )
        block_bytes = bytes_per_token * config.block_size
        if config.num_gpu_blocks_override is not None:
            num_blocks = config.num_gpu_blocks_override
            if num_blocks * block_bytes > available_bytes:
                raise DoesNotFit(
                    "num_gpu_blocks_override",
                    f"{num_blocks} blocks take {num_blocks * block_bytes >> 20} MiB, but {available_bytes >> 20} MiB "
                    f"are available; at most {max(0, available_bytes) // block_bytes} fit",
                )
        else:
            num_blocks = max(0, available_bytes) // block_bytes
            if wanted is not None:  # more than every sequence at full length is of no use
                num_blocks = min(num_blocks, config.max_num_seqs * -(-wanted // config.block_size) + 1)
        capacity = num_blocks * config.block_size
        if config.max_model_len is not None and capacity < config.max_model_len:
            raise DoesNotFit(
                "max_model_len",
                f"{config.max_model_len} tokens need {config.max_model_len * bytes_per_token >> 20} MiB of KV cache, "
                f"but there is room for {capacity} tokens: set max_model_len to {max(capacity, 1)} or less, "
                f"or give the cache more memory",
            )
        if capacity < 2:
            raise DoesNotFit(
                "kv_cache_memory",
                f"no memory is left for the KV cache: one block of {config.block_size} tokens takes {block_bytes} "
                f"bytes, {max(0, available_bytes)} are available",
            )
        return cls(
            num_blocks=num_blocks,
            block_size=config.block_size,
            bytes_per_token=bytes_per_token,
            max_model_len=min(wanted or capacity, capacity),
        )


def available_cpu_bytes(config: EngineConfig) -> int:
    """Memory for the KV cache on a CPU.

    Raises:
        DoesNotFit: when ``kv_cache_memory`` is more than the machine has free.
    """
    free = free_memory_bytes()
    if config.kv_cache_memory is None:
        return min(int(free * _CPU_FREE_SHARE), _CPU_DEFAULT_LIMIT)
    if config.kv_cache_memory > free:
        raise DoesNotFit(
            "kv_cache_memory",
            f"is {config.kv_cache_memory >> 20} MiB, but only {free >> 20} MiB are free; "
            f"set it to {free * 8 // 10} or less",
        )
    return config.kv_cache_memory


def free_memory_bytes() -> int:
    """Memory the kernel says can be used without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except FileNotFoundError:  # not Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
