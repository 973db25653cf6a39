"""Ahead-of-time compilation of the Triton kernels, as a call with given shapes would compile them.

Owns the cases and the reading of the compiled code's resources. Runs in worker processes; needs no GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.kernels.batches import attention_call, paged_batch, quantised

CAPABILITIES = (80, 90, 100)
LARGE_SHARED_CAPABILITIES = (90, 100)  # larger tiles run there; smaller ones on sm_80 and consumer cards
FP8_CAPABILITIES = (90, 100)  # sm_80 holds fp8 as uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    dtype: torch.dtype
    head_dim: int = 128
    group: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    kv_dtype: torch.dtype | None = None  # eight bits, with scales

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), f"dim{self.head_dim}", f"group{self.group}", *self.options]
        return "-".join(words if self.kv_dtype is None else [*words, str(self.kv_dtype).removeprefix("torch.")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    kernel: str
    capability: int
    num_registers: int
    spilled_bytes: int
    shared_bytes: int


def use_cache(folder: Path) -> None:
    """Compile afresh: Triton's cache in the home folder is left alone."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def compile_attention(case: Case) -> list[Usage]:
    """Prefill, decode in one piece, in splits and behind shared prefixes, the prefix pass, and the merge."""
    capabilities = FP8_CAPABILITIES if case.kv_dtype == torch.float8_e4m3fn else CAPABILITIES
    return [
        _usage(launch, capability)
        for capability in capabilities
        for launch in _attention_launches(case, large_shared=capability in LARGE_SHARED_CAPABILITIES)
    ]


def _attention_launches(case: Case, *, large_shared: bool) -> list[Any]:
    from kvq.kernels.paged_attention import attention_launches

    launches = {}
    for seq_len, groups in ((100, None), (1000, None), (100, [(2, 64)])):
        batch = paged_batch(
            seq_lens=[seq_len, seq_len, 50],
            query_lens=[1, 1, 30],
            num_heads=2 * case.group,
            num_kv_heads=2,
            head_dim=case.head_dim,
            dtype=case.dtype,
            groups=groups,
        )
        if case.kv_dtype is not None:
            batch = quantised(batch, case.kv_dtype)
        sinks = torch.zeros(2 * case.group, dtype=case.dtype) if case.options.get("sinks") else None
        call = attention_call(batch, large_shared=large_shared, **(case.options | {"sinks": sinks}))
        for launch in attention_launches(call):
            is_none = tuple(value is None for value in launch.arguments.values())
            launches[launch.kernel.__name__, is_none] = launch
    return list(launches.values())


def decode_pipeline(capability: int) -> str:
    """How many tiles of keys the decode kernel holds, and how many loads may be under way when it waits for one."""
    launches = _attention_launches(Case(dtype=torch.bfloat16), large_shared=False)
    decode = next(launch for launch in launches if launch.kernel.__name__ == "_decode_kernel")
    code = decode.compile_for(capability).asm["ttgir"]
    tiles = set(re.findall(r"%k\w* = ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x", code))
    loop = code[code.index("scf.for") :]
    waits = re.findall(r"%k\w* = ttg.async_wait .*num = (\d+)", loop)
    return f"tiles {' '.join(sorted(tiles))} waits {' '.join(waits)}"


def compile_rows(dtype: torch.dtype) -> list[Usage]:
    """KV write, rotary with KV write, the norms and the activation."""
    from kvq.kernels import kv_write, norms

    launches = []
    for head_dim, rotary_dim in [(64, 64), (80, 32), (256, 256)]:
        batch = paged_batch(seq_lens=[9], query_lens=[9], num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
        target = (batch.key_cache, batch.value_cache, batch.metadata.slot_mapping)
        cos = torch.zeros(9, rotary_dim, dtype=dtype)
        launches += [
            kv_write.write_kv_launch(batch.key, batch.value, *target),
            kv_write.rotary_write_kv_launch(
                batch.query, batch.key, batch.value, cos, cos, *target, torch.empty_like(batch.query)
            ),
        ]
    for num_cols in (128, 576, 8192):
        x = torch.zeros(9, num_cols, dtype=dtype)
        launches += [
            norms.rms_norm_launch(x, None, x[0], 1e-5, x, None),
            norms.rms_norm_launch(x, x, x[0], 1e-5, x, x),
            norms.silu_mul_launch(x, x[:, : num_cols // 2].contiguous()),
        ]
    return _compile(launches)


def compile_draws(dtype: torch.dtype) -> list[Usage]:
    """Draws from logits of small and large vocabularies."""
    from kvq.kernels.sampling import draw_launch

    launches = []
    for vocab in (1000, 151_936):
        real, whole, wide = (torch.zeros(2, dtype=d) for d in (torch.float32, torch.int32, torch.int64))
        options = {"temperature": real, "top_k": whole, "top_p": real, "min_p": real, "keys": wide, "tokens": wide}
        launches.append(draw_launch(torch.zeros(2, vocab, dtype=dtype), rows=whole, **options))
    return _compile(launches)


def compile_eight_bit_writes(kv_dtype: torch.dtype) -> list[Usage]:
    """KV write and rotary with KV write into caches of eight bits."""
    from kvq.kernels import kv_write

    launches = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        batch = paged_batch(seq_lens=[9], query_lens=[9], num_heads=8, num_kv_heads=2, head_dim=128, dtype=dtype)
        batch = quantised(batch, kv_dtype)
        target = (batch.key_cache, batch.value_cache, batch.metadata.slot_mapping)
        cos = torch.zeros(9, 64, dtype=dtype)
        rotated = torch.empty_like(batch.query)
        launches += [
            kv_write.write_kv_launch(batch.key, batch.value, *target, batch.scales),
            kv_write.rotary_write_kv_launch(
                batch.query, batch.key, batch.value, cos, cos, *target, rotated, batch.scales
            ),
        ]
    return _compile(launches, kv_dtype)


def _compile(launches: list[Any], kv_dtype: torch.dtype | None = None) -> list[Usage]:
    capabilities = FP8_CAPABILITIES if kv_dtype == torch.float8_e4m3fn else CAPABILITIES
    return [_usage(launch, capability) for launch in launches for capability in capabilities]


def _usage(launch: Any, capability: int) -> Usage:
    import triton

    compiled = launch.compile_for(capability)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.kernel)
        cubin.flush()
        command = [tool, "--dump-resource-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return Usage(
        kernel=launch.kernel.__name__,
        capability=capability,
        num_registers=found["REG"],
        spilled_bytes=found["STACK"] + found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )
