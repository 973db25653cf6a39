"""Tile shapes and split lengths of the attention kernels, as pure functions of the problem's shape.

Knows numbers only: no tensors, no Triton. Invariant: nothing here that shapes a plain prefill or decode depends on what
else is in the batch, so the same sequence gives the same bits whatever it was batched with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Chosen so that nothing spills for sm_80, 90 and 100, and shared memory stays under 99 KiB (consumer cards).

    Where ``large_shared`` is said to be there it may take up to 227 KiB.
    """

    block_m: int  # query rows of a program
    block_n: int  # keys per iteration
    block_d: int  # head_dim rounded up to a power of two
    num_warps: int
    num_stages: int
    # A limit just below the hardware's 255 keeps ptxas from spilling for an occupancy these tiles cannot reach.
    max_registers: int | None = None


class KVCodes(Enum):
    """How a cache of eight bits is read."""

    NONE = "none"  # not eight bits
    NUMBERS = "numbers"  # the card converts them
    BITS = "bits"  # e4m3 taken apart by integer operations


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _padded(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def prefill_config(
    *, head_dim: int, element_bytes: int, kv_codes: KVCodes = KVCodes.NONE, large_shared: bool = False
) -> TileConfig:
    """Large tiles: the work is a matrix product. Keys that must be decoded take registers, and then smaller ones.

    Three stages, so that the next tiles of keys are on their way while one is multiplied; two hold a single tile on
    sm_80, and begin its successor late on sm_90.
    """
    block_d = _padded(head_dim)
    if element_bytes == 4:
        return replace(_float32_config(block_d), num_warps=8)
    if block_d <= 128 and kv_codes is KVCodes.BITS:
        return TileConfig(block_m=64, block_n=64, block_d=block_d, num_warps=8, num_stages=2, max_registers=248)
    if block_d <= 128 and kv_codes is KVCodes.NUMBERS:
        # At head_dim 128, 64 keys spill for sm_80 in one to three stages, however int8 is widened; 32 do with a limit.
        return TileConfig(block_m=128, block_n=32, block_d=block_d, num_warps=8, num_stages=3)
    if block_d <= 64:
        return TileConfig(block_m=128, block_n=64, block_d=block_d, num_warps=8, num_stages=3, max_registers=248)
    if block_d <= 128:
        # 64 keys in three stages take 128 KiB, and spill for sm_80 (64 bytes).
        block_n = 64 if large_shared else 32
        return TileConfig(block_m=128, block_n=block_n, block_d=block_d, num_warps=8, num_stages=3)
    if kv_codes is not KVCodes.NONE:
        return TileConfig(block_m=64, block_n=16, block_d=block_d, num_warps=8, num_stages=3)
    stages = 3 if large_shared else 2
    return TileConfig(block_m=64, block_n=32, block_d=block_d, num_warps=8, num_stages=stages, max_registers=248)


def prefix_config(*, head_dim: int, element_bytes: int, kv_codes: KVCodes = KVCodes.NONE) -> TileConfig | None:
    """As prefill, with fewer rows: a group rarely fills 128.

    ``None`` for large float32 heads, whose operands leave no registers for the partial results.
    """
    block_d = _padded(head_dim)
    if element_bytes == 4:
        return _float32_config(block_d) if block_d <= 128 else None
    if block_d <= 64 and kv_codes is KVCodes.NONE:
        return TileConfig(block_m=64, block_n=64, block_d=block_d, num_warps=4, num_stages=2, max_registers=248)
    if block_d <= 128:
        return TileConfig(block_m=64, block_n=32, block_d=block_d, num_warps=4, num_stages=3, max_registers=248)
    return TileConfig(block_m=64, block_n=32, block_d=block_d, num_warps=8, num_stages=2, max_registers=248)


def _float32_config(block_d: int) -> TileConfig:
    """Products in three tf32 parts hold their operands twice in registers: small tiles."""
    if block_d <= 64:
        return TileConfig(block_m=64, block_n=16, block_d=block_d, num_warps=4, num_stages=2, max_registers=248)
    if block_d <= 128:
        return TileConfig(block_m=32, block_n=32, block_d=block_d, num_warps=8, num_stages=2)
    return TileConfig(block_m=16, block_n=16, block_d=block_d, num_warps=8, num_stages=2)


def decode_config(*, head_dim: int, element_bytes: int, group: int) -> TileConfig:
    """A row per query head of one KV head, 16 (what a tensor core takes) to 32; loads are what costs."""
    block_d = _padded(head_dim)
    return TileConfig(
        block_m=min(32, max(16, next_power_of_2(group))),
        block_n=max(16, min(64, 16384 // (block_d * element_bytes))),
        block_d=block_d,
        num_warps=8 if block_d * element_bytes >= 1024 else 4,
        num_stages=2 if block_d * element_bytes >= 1024 else 3,
        max_registers=248 if block_d * element_bytes < 1024 else None,
    )


DECODE_SPLIT_LEN = 512  # tokens; a multiple of every block_n. Fixed, so that splits never depend on the batch


def prefix_split_len(*, num_tiles: int, num_kv_heads: int, max_prefix_len: int, num_programs: int = 264) -> int:
    """Tokens per split of a shared prefix: as long as possible while ``num_programs`` are busy.

    Every split writes a float32 partial result per query row, so splitting is paid in bandwidth. 264 is two programs
    for each of the 132 multiprocessors of an H100.
    """
    num_splits = max(1, num_programs // max(1, num_tiles * num_kv_heads))
    split_len = -(-max_prefix_len // num_splits)
    return max(256, -(-split_len // 128) * 128)


def grouping_pays(*, num_sequences: int, prefix_len: int) -> bool:
    """Whether decode should read this shared prefix once for the group instead of once per sequence.

    Below these sizes the second pass and the merge cost more than the loads they save (the prefix of a small group
    comes out of the L2 cache anyway).
    """
    return num_sequences >= 4 and prefix_len >= 256
