"""Compiling ahead: every kernel variant that ``bench.gpu_check`` will launch, on all processor cores at once.

Triton compiles a variant when it is first launched, one to three seconds each, on one core. The check launches some
three hundred: more than its six minutes. So processes of their own, which never touch the card, walk through
the same calls on CPU tensors and compile what is launched; the check finds it in Triton's cache. Owns nothing but that
cache's warmth: what is missed here is compiled when it is launched.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from subprocess import CalledProcessError
from typing import Any

import torch
from torch.nn import functional as F

from bench.gpu import kernel_check, tile_sweep
from bench.gpu.device import Device
from bench.shapes import SHAPES, TINY, Shape
from kvq.kernels import attention_call, ops, paged_attention
from kvq.kernels.kv_scales import FP8_CAPABILITY
from kvq.kernels.launch import Launch
from tests.kernels.batches import TOLERANCE_BY_DTYPE, paged_batch

_ROWS = 30
_EPS = 1e-5


def start(device: Device) -> Callable[[], dict[str, float]]:
    """Begin compiling for ``device``; the call returned waits for the end and says what was done."""
    capability = torch.cuda.get_device_capability(device.device)
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    shares = [pool.submit(compile_share, capability, worker, workers) for worker in range(workers)]
    pool.shutdown(wait=False)
    return lambda: {"workers": workers, "variants": sum(share.result() for share in shares)}


def compile_share(capability: tuple[int, int], worker: int, workers: int, walk: Callable[[], Any] | None = None) -> int:
    """Compile this worker's variants of what ``walk`` (by default: everything) launches; how many there were.

    For a process of its own: it replaces the card's driver, and what a launch does, for good.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    class Absent:
        """Stands for the driver of a card that is not asked."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int = 0) -> int:
            return 0

    seen: set[str] = set()

    def compile_only(launch: Launch) -> None:
        variant = launch.variant
        if 0 in launch.grid or zlib.crc32(variant.encode()) % workers != worker or variant in seen:
            return
        seen.add(variant)
        _build_launcher(launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options))

    triton.runtime.driver.set_active(Absent())
    fp8 = torch.float8_e4m3fn if capability >= FP8_CAPABILITY else torch.uint8
    large = capability in attention_call.LARGE_SHARED_CAPABILITIES
    for owner, name, value in (
        (Launch, "run", compile_only),
        (ops, "runs_triton_on", lambda _device: True),
        (paged_attention, "has_large_shared", lambda _device: large),
        (kernel_check, "fp8_storage", lambda _device: fp8),
        (kernel_check, "reference", _Nothing()),
    ):
        setattr(owner, name, value)
    torch.set_num_threads(1)
    (walk or everything)()
    return len(seen)


def _build_launcher(compiled: Any) -> None:
    """Up to Triton 3.6 a kernel's first launch also has gcc compile a launcher in C, half a second each."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return
    with suppress(AssertionError, ImportError, OSError, RuntimeError, CalledProcessError):  # no libcuda, no gcc
        driver.CudaLauncher(compiled.src, compiled.metadata)


class _Nothing:
    """Definitions that are not needed where nothing is computed."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: None


def everything() -> None:
    """Each call that the check makes, once."""
    device = Device(device=torch.device("cpu"), toy=False)
    for dtype in TOLERANCE_BY_DTYPE:
        for _ in kernel_check.cases(device, dtype):
            pass
    kernel_check.draws(device)
    _engine(TINY, torch.float32)
    for shape in SHAPES.values():
        _engine(shape, torch.bfloat16)
    for tile in tile_sweep.tiles():
        with tile.chosen():
            for batch in _batches(SHAPES["llama-8b"], torch.bfloat16):
                ops.paged_attention(batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale=1.0)


def _engine(shape: Shape, dtype: torch.dtype) -> None:
    """What a step of the Llama family launches (``kvq.engine.fused_gpu``), with random weights of this shape."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    hidden, weight = torch.zeros(_ROWS, shape.hidden, dtype=dtype), torch.zeros(shape.hidden, dtype=dtype)
    ops.rms_norm(hidden, weight, _EPS)
    ops.add_rms_norm(hidden, hidden, weight, _EPS)
    ops.silu_mul(torch.zeros(_ROWS, 2 * shape.inner, dtype=dtype))
    for batch in _batches(shape, dtype):
        metadata, cache = batch.metadata, (batch.key_cache, batch.value_cache)
        rows = metadata.num_tokens
        widths = [heads * dim, kv_heads * dim, kv_heads * dim]
        parts = torch.split(torch.zeros(rows, sum(widths), dtype=dtype), widths, dim=1)
        query, key, value = (part.view(rows, -1, dim) for part in parts)
        if shape.model_type == "qwen3":
            query, key = (ops.rms_norm(x, torch.zeros(dim, dtype=dtype), _EPS) for x in (query, key))
        angles = F.pad(torch.zeros(1, rows, 1, dtype=dtype), (0, dim - 1))[0]
        query = ops.rotary_write_kv(query, key, value, angles, angles, *cache, metadata.slot_mapping)
        ops.paged_attention(query, *cache, metadata, scale=dim**-0.5)


def _batches(shape: Shape, dtype: torch.dtype) -> Iterator[Any]:
    """Prompts with decodes in one piece, decodes in several, and decodes that share a prefix."""
    sizes: dict[str, Any] = {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
    }
    yield paged_batch(seq_lens=[40, 30], query_lens=[1, 30], dtype=dtype, **sizes)
    yield paged_batch(seq_lens=[700], query_lens=[1], dtype=dtype, **sizes)
    yield paged_batch(seq_lens=[64] * 4, query_lens=[1] * 4, groups=[(4, 48)], dtype=dtype, **sizes)
