"""MemoryBudget: how many KV blocks there are, by arithmetic, before anything is allocated.

Owns the refusal of what cannot fit. Knows bytes and tokens (the formula is in sizing.py); imports no torch. Invariant:
a refusal names the setting to change and a number that works, max_model_len first, then the memory for KV, then
max_num_seqs: that is the order in which they cost the user least.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from kvq.engine.config import EngineConfig
from kvq.engine.errors import DoesNotFit

# A CPU's memory is everybody's: by default the cache takes at most this share of what is free, and this much.
_CPU_FREE_SHARE = 0.4
_CPU_DEFAULT_LIMIT = 4 << 30
# A prompt of one token and its answer of one.
_SHORTEST_SEQUENCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """Memory that may be used for KV, and the setting that decides it.

    Args:
        available_bytes: as things are set; negative where more is taken than may be.
        most_bytes: the most that any value of the setting can make available.
        setting: ``kv_cache_memory``, or ``gpu_memory_utilization``, of which ``utilization`` of ``total_bytes`` is set.
    """

    available_bytes: int
    most_bytes: int
    setting: str = "kv_cache_memory"
    total_bytes: int = 0
    utilization: float = 0.0

    @classmethod
    def of_gpu(cls, *, total_bytes: int, utilization: float, taken_bytes: int) -> KVMemory:
        """What a share of a GPU leaves beside ``taken_bytes`` of weights, activations and other processes."""
        return cls(
            available_bytes=int(total_bytes * utilization) - taken_bytes,
            most_bytes=int(total_bytes * 0.99) - taken_bytes,
            setting="gpu_memory_utilization",
            total_bytes=total_bytes,
            utilization=utilization,
        )

    def value_for(self, needed_bytes: int) -> str | None:
        """The value of the setting that makes ``needed_bytes`` available; None where none does."""
        if needed_bytes > self.most_bytes:
            return None
        if self.setting == "kv_cache_memory":
            return str(needed_bytes)
        missing = needed_bytes - self.available_bytes
        return f"{min(0.99, math.ceil(100 * (self.utilization + missing / self.total_bytes)) / 100):.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The cache that fits, and the longest sequence it allows; beside it ``weight_bytes`` and ``activation_bytes``."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int
    weight_bytes: int = 0
    activation_bytes: int = 0

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

    def __str__(self) -> str:
        """For the log."""
        return (
            f"weights={_mib(self.weight_bytes)} activations={_mib(self.activation_bytes)} "
            f"kv_cache={_mib(self.kv_bytes)} blocks={self.num_blocks} max_model_len={self.max_model_len} "
            f"full_sequences={self.num_full_sequences:.1f}"
        )

    @classmethod
    def plan(
        cls,
        config: EngineConfig,
        *,
        bytes_per_token: int,
        memory: KVMemory,
        model_limit: int | None,
        bytes_per_sequence: int = 0,
        weight_bytes: int = 0,
        activation_bytes: int = 0,
    ) -> MemoryBudget:
        """Decide the number of blocks.

        Args:
            bytes_per_token: KV bytes of one token.
            memory: what may be used for KV and for what every running sequence takes besides.
            model_limit: the model's own longest sequence.
            bytes_per_sequence: what a running sequence takes of that memory besides KV (its rows of logits).
            weight_bytes, activation_bytes: what ``memory`` has been lessened by; told with the rest.

        Raises:
            DoesNotFit: naming the setting to change and a value that works.
        """
        wanted = config.max_model_len or model_limit
        if config.max_model_len and model_limit and config.max_model_len > model_limit:
            raise DoesNotFit(
                "max_model_len",
                f"is {config.max_model_len}, but the model was made for {model_limit} tokens at most; "
                f"set it to {model_limit} or less",
            )
        need = _Need(
            block_bytes=bytes_per_token * config.block_size,
            config=config,
            memory=memory,
            bytes_per_sequence=bytes_per_sequence,
        )
        if config.num_gpu_blocks_override is not None:
            num_blocks = config.num_gpu_blocks_override
            need.refuse_override(num_blocks)
        else:
            num_blocks = need.num_blocks(config.max_num_seqs)
        capacity = num_blocks * config.block_size
        if capacity < max(config.max_model_len or 0, _SHORTEST_SEQUENCE):
            need.refuse(capacity)
        if wanted is not None and config.num_gpu_blocks_override is None:
            # More than every sequence at full length is of no use.
            num_blocks = min(num_blocks, config.max_num_seqs * -(-wanted // config.block_size) + 1)
        return cls(
            num_blocks=num_blocks,
            block_size=config.block_size,
            bytes_per_token=bytes_per_token,
            max_model_len=min(wanted or capacity, capacity),
            weight_bytes=weight_bytes,
            activation_bytes=activation_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What a configuration asks of a memory; says what to change where that is too much."""

    block_bytes: int
    config: EngineConfig
    memory: KVMemory
    bytes_per_sequence: int

    def num_blocks(self, num_seqs: int) -> int:
        """Blocks that fit beside ``num_seqs`` running sequences."""
        return max(0, self.memory.available_bytes - num_seqs * self.bytes_per_sequence) // self.block_bytes

    def refuse_override(self, num_blocks: int) -> None:
        """Raise DoesNotFit where a number of blocks that was asked for is not there."""
        fits = self.num_blocks(self.config.max_num_seqs)
        if num_blocks > fits:
            raise DoesNotFit(
                "num_gpu_blocks_override",
                f"{num_blocks} blocks take {_mib(num_blocks * self.block_bytes)}, but "
                f"{_mib(max(0, self.memory.available_bytes))} are available; at most {fits} fit",
            )

    def refuse(self, capacity: int) -> None:
        """Raise DoesNotFit: ``capacity`` tokens are too few."""
        length = max(self.config.max_model_len or 0, _SHORTEST_SEQUENCE)
        kv_bytes = -(-length // self.config.block_size) * self.block_bytes
        others = self._remedies(kv_bytes)
        if capacity >= _SHORTEST_SEQUENCE:
            raise DoesNotFit(
                "max_model_len",
                f"{length} tokens need {_mib(kv_bytes)} of KV cache, but there is room for {capacity} tokens: "
                + "; or ".join([f"set max_model_len to {capacity} or less", *others]),
            )
        if self.num_blocks(1) * self.config.block_size < length:
            raise DoesNotFit(
                self.memory.setting,
                f"no memory is left for the KV cache: one block of {self.config.block_size} tokens takes "
                f"{self.block_bytes} bytes, {max(0, self.memory.available_bytes)} are available; "
                + ("; or ".join(others) or "no value of it is enough: take a smaller dtype, model or block_size"),
            )
        taken = _mib(self.config.max_num_seqs * self.bytes_per_sequence)
        raise DoesNotFit(
            "max_num_seqs",
            f"{self.config.max_num_seqs} running sequences take {taken} besides their KV cache, which leaves "
            f"no room for it: {others[-1]}",
        )

    def _remedies(self, kv_bytes: int) -> list[str]:
        """What helps besides a shorter max_model_len, with numbers; empty where nothing does."""
        if self.config.num_gpu_blocks_override is not None:
            return [f"raise num_gpu_blocks_override to {kv_bytes // self.block_bytes}"]
        found = []
        value = self.memory.value_for(kv_bytes + self.config.max_num_seqs * self.bytes_per_sequence)
        if value is not None:
            found.append(f"raise {self.memory.setting} to {value}")
        if self.bytes_per_sequence:
            num_seqs = (self.memory.available_bytes - kv_bytes) // self.bytes_per_sequence
            if num_seqs >= 1:
                found.append(f"lower max_num_seqs to {num_seqs}")
        return found


def available_cpu_memory(config: EngineConfig, *, free_bytes: int | None = None) -> KVMemory:
    """Memory for the KV cache on a CPU, of ``free_bytes`` (what the machine has free, by default).

    Raises:
        DoesNotFit: when ``kv_cache_memory`` is more than the machine has free.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    if config.kv_cache_memory is None:
        return KVMemory(available_bytes=min(int(free * _CPU_FREE_SHARE), _CPU_DEFAULT_LIMIT), most_bytes=free)
    if config.kv_cache_memory > free:
        raise DoesNotFit(
            "kv_cache_memory",
            f"is {_mib(config.kv_cache_memory)}, but only {_mib(free)} are free; set it to {free * 8 // 10} or less",
        )
    return KVMemory(available_bytes=config.kv_cache_memory, most_bytes=free)


def num_host_blocks(config: EngineConfig, *, block_bytes: int, free_bytes: int) -> int:
    """Blocks of KV that ``swap_space`` holds; ``free_bytes`` of host memory are free.

    Raises:
        DoesNotFit: when it is more than that.
    """
    wanted, free = config.swap_space * (1 << 30), max(0, free_bytes)
    if wanted > free:
        raise DoesNotFit(
            "swap_space",
            f"is {_mib(wanted)}, but only {_mib(free)} of host memory are free; "
            f"set it to {0.8 * free / (1 << 30):.1f} (GiB) or less",
        )
    return int(wanted) // block_bytes


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


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
