"""Sizing: the arithmetic of a KV cache, without a machine and without a model.

Owns the formula and what follows from it. Knows numbers only; nothing here allocates or refuses (budget.py does).
Formula: bytes per token = layers x kv_heads x (key_dim + value_dim) x bytes(dtype), which with heads of one size is
layers x 2 x kv_heads x head_dim x bytes(dtype), and with full multi-head attention layers x 2 x hidden x bytes(dtype).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
# KV in eight bits has a float32 scale for each token and head, of K and of V.
KV_SCALE_BYTES = {"float8": 4, "int8": 4}
# Activations of a step and the allocator's own waste, as a share of a GPU's memory.
ACTIVATION_SHARE = 1 / 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The KV cache of a model whose layers are alike."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V, and of their scales, that one token takes over all layers."""
        scale_bytes = 2 * KV_SCALE_BYTES.get(dtype, 0)
        head_bytes = (self.key_dim + self.value_dim) * DTYPE_BYTES[dtype] + scale_bytes
        return self.num_layers * self.num_kv_heads * head_bytes

    def formula(self, dtype: str) -> str:
        """The multiplication, for people."""
        if self.num_kv_heads == 1 and self.key_dim == self.value_dim:
            heads = f"2 (K and V) x {self.key_dim}"
        elif self.key_dim == self.value_dim:
            heads = f"2 (K and V) x {self.num_kv_heads} KV heads x {self.key_dim}"
        else:
            heads = f"{self.num_kv_heads} KV heads x ({self.key_dim} + {self.value_dim})"
        elements = f"{self.num_layers} layers x {heads} x {DTYPE_BYTES[dtype]} bytes ({dtype})"
        if dtype not in KV_SCALE_BYTES:
            return elements
        return f"{elements} + {self.num_layers} x 2 x {self.num_kv_heads} x {KV_SCALE_BYTES[dtype]} (scales)"


def logits_bytes(vocab_size: int) -> int:
    """What sampling takes for one running sequence: its row of logits in float32, scaled, sorted and summed up."""
    return 4 * 4 * vocab_size


def kv_budget_bytes(*, memory_bytes: int, utilization: float, weight_bytes: int, activation_bytes: int = 0) -> int:
    """What is left for the KV cache of the allowed share of a memory; not below 0."""
    return max(0, int(memory_bytes * utilization) - weight_bytes - activation_bytes)


def safe_concurrency(*, kv_bytes: int, bytes_per_token: int, length: int) -> int:
    """Sequences of ``length`` tokens that fit at the same time, sharing nothing."""
    return kv_bytes // (bytes_per_token * length)


def reserved_utilisation(lengths: Iterable[int], *, reserved_length: int) -> float:
    """Share of the memory that holds tokens when every sequence has ``reserved_length`` tokens set aside."""
    held = list(lengths)
    return sum(held) / (len(held) * reserved_length)


def paged_utilisation(lengths: Iterable[int], *, block_size: int) -> float:
    """The same with blocks given on demand: only the last block of a sequence is partly empty."""
    held = list(lengths)
    return sum(held) / sum(-(-length // block_size) * block_size for length in held)
