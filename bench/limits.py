"""Limits: what the machine can do, measured now, and the least time that leaves for a workload.

``python -m bench.limits``. Owns two things: Limits (GEMM rate and memory bandwidth, measured) and Floor (operations and
bytes of a workload, counted). Achieved / floor says how much is left to gain, whatever the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import load_average, num_cores

_GEMM_SIDE = 2048
_ARRAY_BYTES = 1 << 29  # far beyond any cache
KIND = "limits"
FLOOR_KIND = "floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rates of this machine. Copy counts the bytes read and the bytes written."""

    gemm_gflop_per_s: float
    read_gb_per_s: float
    copy_gb_per_s: float
    num_threads: int
    load_average: float | None

    @classmethod
    def measure(
        cls, *, num_threads: int, array_bytes: int = _ARRAY_BYTES, gemm_side: int = _GEMM_SIDE, seconds: float = 1.0
    ) -> Limits:
        """Measure for about five times ``seconds``, in float32, by PyTorch."""
        import torch

        torch.set_num_threads(num_threads)
        before = load_average()
        a, b = torch.randn(gemm_side, gemm_side), torch.randn(gemm_side, gemm_side)
        product = torch.empty(gemm_side, gemm_side)
        gemm_s = _best_s(lambda: torch.mm(a, b, out=product), seconds=2 * seconds)
        source = torch.ones(array_bytes // 4)
        target = torch.empty_like(source)
        read_s = _best_s(source.max, seconds=seconds)
        copy_s = _best_s(lambda: target.copy_(source), seconds=seconds)
        return cls(
            gemm_gflop_per_s=2 * gemm_side**3 / gemm_s / 1e9,
            read_gb_per_s=array_bytes / read_s / 1e9,
            copy_gb_per_s=2 * array_bytes / copy_s / 1e9,
            num_threads=num_threads,
            load_average=before,
        )

    @classmethod
    def toy(cls) -> Limits:
        """To try the code out."""
        return cls.measure(num_threads=1, array_bytes=1 << 20, gemm_side=64, seconds=0.01)

    def __str__(self) -> str:
        return (
            f"GEMM {self.gemm_gflop_per_s:.0f} GFLOP/s, read {self.read_gb_per_s:.1f} GB/s, "
            f"copy {self.copy_gb_per_s:.1f} GB/s (float32, {self.num_threads} threads)"
        )

    @classmethod
    def median(cls, several: Sequence[Limits]) -> Limits:
        """Of several measurements, the middle of each rate."""

        def middle(name: str) -> float:
            return float(statistics.median(getattr(limits, name) for limits in several))

        return cls(
            gemm_gflop_per_s=middle("gemm_gflop_per_s"),
            read_gb_per_s=middle("read_gb_per_s"),
            copy_gb_per_s=middle("copy_gb_per_s"),
            num_threads=several[0].num_threads,
            load_average=several[0].load_average,
        )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": KIND, **asdict(self)}, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Limits | None:
        """The limits in ``path``; None for a JSON file of another kind."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("kind", None) != KIND:
            return None
        return cls(**content)


def _best_s(call: Callable[[], Any], *, seconds: float) -> float:
    """The shortest of as many calls as fit: a limit is what the machine does undisturbed."""
    call()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Operations and bytes of one decoder-only model; an operation is a multiplication or an addition."""

    layer_weights: int  # parameters in the linear layers, head not counted
    head_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int = 4

    @classmethod
    def of_config(cls, config: dict[str, Any], *, element_bytes: int = 4) -> ModelCost:
        """From a ``config.json`` of the Llama family."""
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(
            layer_weights=config["num_hidden_layers"] * (attention + 3 * hidden * inner),
            head_weights=hidden * config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            element_bytes=element_bytes,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    def step_s(self, limits: Limits, *, num_sequences: int, context: int) -> float:
        """The least time for a token of each sequence: the larger of operations and of weights and KV read once."""
        weights = self.layer_weights + self.head_weights
        operations = num_sequences * (2 * weights + self.attention_ops(context))
        num_bytes = weights * self.element_bytes + num_sequences * context * self.kv_bytes_per_token
        return max(operations / limits.gemm_gflop_per_s, num_bytes / limits.read_gb_per_s) / 1e9

    def attention_ops(self, num_keys: int) -> int:
        """Of one query token that sees ``num_keys`` keys: two products of all heads in all layers."""
        return 4 * num_keys * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least work that answers a workload: every distinct prompt token computed once, nothing twice.

    ``linear_ops``: linear layers for each distinct prompt token and each output token fed back, the head where a token
    is sampled. ``attention_ops``: of the same tokens. ``bytes_read``: the weights once for each step of the longest
    answer, and the KV that each output token sees (a prompt's KV once for all its samples).
    """

    workload: str

    distinct_prompt_tokens: int
    prompt_tokens: int
    output_tokens: int
    linear_ops: int
    attention_ops: int
    bytes_read: int

    @classmethod
    def count(
        cls, workload: str, cost: ModelCost, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> Floor:
        """``outputs`` are the lengths of the samples of each prompt."""
        distinct_tokens = attention = 0
        before: tuple[int, ...] = ()
        for prompt in sorted(tuple(p) for p in prompts):
            shared = _num_shared(before, prompt)
            distinct_tokens += len(prompt) - shared
            attention += sum(cost.attention_ops(position + 1) for position in range(shared, len(prompt)))
            before = prompt
        num_output, kv_tokens_read = 0, 0
        for tokens, lengths in zip(prompts, outputs, strict=True):
            for length in lengths:
                num_output += length
                # The first token comes from the prompt's last row; the last one is never fed back.
                contexts = range(len(tokens) + 1, len(tokens) + length)
                attention += sum(cost.attention_ops(context) for context in contexts)
                kv_tokens_read += sum(context - len(tokens) for context in contexts)
            kv_tokens_read += len(tokens) * max(0, max(lengths) - 1)  # once for all samples
        num_fed_back = num_output - sum(len(lengths) for lengths in outputs)
        num_sampled_rows = num_fed_back + len(prompts)
        linear = 2 * (distinct_tokens + num_fed_back) * cost.layer_weights + 2 * num_sampled_rows * cost.head_weights
        num_steps = max(length for lengths in outputs for length in lengths)
        weight_bytes = (cost.layer_weights + cost.head_weights) * cost.element_bytes
        return cls(
            workload=workload,
            distinct_prompt_tokens=distinct_tokens,
            prompt_tokens=sum(map(len, prompts)),
            output_tokens=num_output,
            linear_ops=linear,
            attention_ops=attention,
            bytes_read=num_steps * weight_bytes + kv_tokens_read * cost.kv_bytes_per_token,
        )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": FLOOR_KIND, **asdict(self)}, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Floor | None:
        """The floor in ``path``; None for a JSON file of another kind."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("kind", None) != FLOOR_KIND:
            return None
        return cls(**content)

    def linear_s(self, limits: Limits) -> float:
        """The linear layers alone at the GEMM rate: the yardstick of the tables."""
        return self.linear_ops / limits.gemm_gflop_per_s / 1e9

    def seconds(self, limits: Limits) -> float:
        """The larger of all operations at the GEMM rate and all bytes at the read bandwidth."""
        operations_s = (self.linear_ops + self.attention_ops) / limits.gemm_gflop_per_s / 1e9
        return max(operations_s, self.bytes_read / limits.read_gb_per_s / 1e9)


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    limits = Limits.measure(num_threads=arguments.threads)
    print(limits)
    if arguments.output is not None:
        limits.write(arguments.output)


if __name__ == "__main__":
    main()
