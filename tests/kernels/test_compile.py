"""Every Triton kernel compiles for sm_80, 90 and 100 without spilling a register."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests.kernels.compiler import (
    Case,
    Usage,
    compile_attention,
    compile_draws,
    compile_eight_bit_writes,
    compile_rows,
    use_cache,
)

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # sm_80 stands for consumer cards, which have less

PLAIN: dict[str, object] = {}
ALL_OPTIONS: dict[str, object] = {"sliding_window": 100, "softcap": 20.0, "sinks": True}
EIGHT_BITS = [torch.int8, torch.uint8, torch.float8_e4m3fn]
ATTENTION_CASES = [
    *(Case(dtype=torch.bfloat16, head_dim=d, options=o) for d in (64, 128, 256) for o in (PLAIN, ALL_OPTIONS)),
    *(Case(dtype=torch.float32, head_dim=d, options=o) for d in (64, 128, 256) for o in (PLAIN, ALL_OPTIONS)),
    Case(dtype=torch.float16, options=ALL_OPTIONS),
    Case(dtype=torch.bfloat16, head_dim=80, options=ALL_OPTIONS),
    Case(dtype=torch.bfloat16, group=1),
    Case(dtype=torch.bfloat16, group=71),
    Case(dtype=torch.bfloat16, group=3, head_dim=64),
    Case(dtype=torch.float32, group=3, head_dim=64),
    *(Case(dtype=torch.bfloat16, kv_dtype=k) for k in EIGHT_BITS),
    Case(dtype=torch.bfloat16, head_dim=64, options=ALL_OPTIONS, kv_dtype=torch.int8),
    Case(dtype=torch.float16, kv_dtype=torch.int8),
    Case(dtype=torch.float32, kv_dtype=torch.int8),
    Case(dtype=torch.float32, kv_dtype=torch.uint8),
    Case(dtype=torch.bfloat16, head_dim=256, options=ALL_OPTIONS, kv_dtype=torch.int8),
]
ROW_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DRAW_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = [
    *map(str, ATTENTION_CASES),
    *map(str, ROW_DTYPES),
    *map(str, EIGHT_BITS),
    *(f"draws-{dtype}" for dtype in DRAW_DTYPES),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[Usage]]]]:
    """All cases by name, being compiled on two processes while the tests wait for their own."""
    folder = tmp_path_factory.mktemp("triton")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=use_cache, initargs=(folder,)) as pool:
        by_name = {str(case): pool.submit(compile_attention, case) for case in ATTENTION_CASES}
        by_name |= {str(dtype): pool.submit(compile_rows, dtype) for dtype in ROW_DTYPES}
        by_name |= {f"draws-{dtype}": pool.submit(compile_draws, dtype) for dtype in DRAW_DTYPES}
        by_name |= {str(dtype): pool.submit(compile_eight_bit_writes, dtype) for dtype in EIGHT_BITS}
        yield by_name
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(900)  # all cases wait in one queue
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_without_spilling(name: str, compiled: dict[str, Future[list[Usage]]]) -> None:
    usages = compiled[name].result()
    for usage in usages:
        print(
            f"{usage.kernel} sm_{usage.capability}: {usage.num_registers} registers, {usage.shared_bytes} shared bytes"
        )
    assert [usage for usage in usages if usage.spilled_bytes] == []
    assert [usage for usage in usages if usage.shared_bytes > SHARED_BYTES[usage.capability]] == []


@pytest.mark.parametrize("capability", [80, 90])
def test_decode_has_keys_on_their_way_while_it_multiplies(capability: int, tmp_path: Path) -> None:
    code = f"from tests.kernels.compiler import *; print(decode_pipeline({capability}))"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["tiles", "2", "waits", "2"], done.stderr[-4000:]
