"""Every kernel that ``kvq.kernels.ops`` chooses on this device against the reference, on awkward batches.

The batches and the tolerances are the tests' own; the references run in float64 on the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.device import Device
from kvq.engine.request import SamplingParams
from kvq.engine.sampler import Sampler
from kvq.engine.step import SampleSpec
from kvq.kernels import ops, reference
from kvq.kernels.kv_scales import KVScales, fp8_storage
from kvq.kernels.metadata import AttentionMetadata
from tests.kernels.batches import TOLERANCE_BY_DTYPE, PagedBatch, paged_batch, quantised

# (name, batch, options of the call)
_SHAPES: dict[str, dict[str, Any]] = {
    "prefill": {"seq_lens": [1, 17, 300, 64], "query_lens": [1, 17, 200, 64]},
    "decode": {"seq_lens": [1, 16, 17, 515, 1031], "query_lens": [1, 1, 1, 1, 1]},
    "mixed": {"seq_lens": [33, 700, 129, 20], "query_lens": [1, 1, 129, 5]},
    "groups": {
        "seq_lens": [300, 310, 290, 400, 301, 80],
        "query_lens": [1, 1, 1, 1, 1, 1],
        "groups": [(5, 272), (1, 0)],
    },
}
_HEADS = {"mha": (4, 4, 64), "gqa4": (8, 2, 128), "gqa8": (8, 1, 64), "odd": (6, 2, 80)}
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 50},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
}


def check(device: Device) -> dict[str, Any]:
    """One result per case: the largest error and whether it is within the tolerance of its type."""
    dtypes = (torch.float32,) if device.toy and not device.is_gpu else tuple(TOLERANCE_BY_DTYPE)
    results: dict[str, Any] = {}
    for dtype in dtypes:
        for name, actual, expected in cases(device, dtype):
            tolerance = TOLERANCE_BY_DTYPE[dtype]
            error = (actual.double() - expected.double()).abs()
            allowed = tolerance.atol + tolerance.rtol * expected.double().abs()
            within = bool((error <= allowed).all()) and not bool(actual.isnan().any())
            results[f"{name}/{str(dtype).removeprefix('torch.')}"] = {"max_error": float(error.max()), "ok": within}
    results |= draws(device)
    failed = [name for name, result in results.items() if not result["ok"]]
    return {"cases": results, "num_cases": len(results), "failed": failed, "ok": not failed}


def cases(device: Device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield from _row_cases(device, dtype)
    for heads_name, (num_heads, num_kv_heads, head_dim) in _HEADS.items():
        for shape_name, shape in _SHAPES.items():
            batch = _to(
                device,
                paged_batch(**shape, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype),
            )
            if shape_name == "mixed":
                yield from _write_cases(f"{heads_name}", batch)
            if heads_name == "gqa4":
                yield from _eight_bit_cases(device, shape_name, batch)
            for option_name, options in _OPTIONS.items():
                if shape_name == "groups" and option_name == "window":
                    continue  # the engine forms no groups in layers with a window
                arguments = dict(options)
                if arguments.get("sinks"):
                    arguments["sinks"] = torch.randn(num_heads, device=device.device, dtype=dtype)
                yield (
                    f"attention/{shape_name}/{heads_name}/{option_name}",
                    ops.paged_attention(
                        batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale=0.2, **arguments
                    ),
                    reference.paged_attention(
                        batch.query.double(),
                        batch.key_cache.double(),
                        batch.value_cache.double(),
                        batch.metadata,
                        scale=0.2,
                        **{name: _double(value) for name, value in arguments.items()},
                    ),
                )


def _eight_bit_cases(device: Device, name: str, batch: PagedBatch) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Caches in int8 and fp8: attention over what the codes stand for; a write gives the reference's numbers."""
    for kv_dtype in (torch.int8, fp8_storage(device.device)):
        coded = quantised(batch, kv_dtype)
        tensors = (coded.key_cache, coded.value_cache, coded.metadata)
        label = str(kv_dtype).removeprefix("torch.")
        yield (
            f"attention/{name}/{label}",
            ops.paged_attention(coded.query, *tensors, scale=0.2, scales=coded.scales),
            reference.paged_attention(coded.query.double(), *tensors, scale=0.2, scales=coded.scales),
        )
        written = []
        for side in (ops, reference):
            caches = torch.zeros_like(coded.key_cache), torch.zeros_like(coded.value_cache)
            keys, values = (torch.zeros(coded.key_cache.shape[:3], device=device.device) for _ in range(2))
            scales = KVScales(keys=keys, values=values)
            side.write_kv(batch.key, batch.value, *caches, batch.metadata.slot_mapping, scales)
            written.append((*(cache.view(torch.uint8) for cache in caches), keys, values))
        for part, actual, expected in zip(("keys", "values", "key scales", "value scales"), *written, strict=True):
            yield f"write_kv/{name}/{label}/{part}", actual, expected


def draws(device: Device) -> dict[str, Any]:
    """Tokens drawn by the kernel that the device has, beside those that the sampler draws row by row."""
    if not ops.runs_triton_on(device.device):
        return {}
    from kvq.kernels.sampling import TritonDraws

    options: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.999},
    ]
    params = [SamplingParams(temperature=0.7, **options[row % len(options)]) for row in range(60)]
    logits = 3 * torch.randn(len(params), 128_256, device=device.device)
    rows = tuple(
        (row, (SampleSpec(params=p, seed=row, index=0, position=7, token_ids=[1], num_prompt=1),))
        for row, p in enumerate(params)
    )
    expected = Sampler([]).sample(logits, rows, {})
    drawn = Sampler([], TritonDraws()).sample(logits, rows, {})
    num_different = sum(drawn[row] != expected[row] for row in range(len(params)))
    # A sum of 128,256 weights taken in another order may move the border of a nucleus by one token.
    return {"draws/128256": {"max_error": float(num_different), "ok": num_different <= 1}}


def _write_cases(name: str, batch: PagedBatch) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    caches = [torch.zeros_like(batch.key_cache) for _ in range(4)]
    slots = batch.metadata.slot_mapping
    ops.write_kv(batch.key, batch.value, caches[0], caches[1], slots)
    reference.write_kv(batch.key, batch.value, caches[2], caches[3], slots)
    yield f"write_kv/{name}/keys", caches[0], caches[2]
    yield f"write_kv/{name}/values", caches[1], caches[3]
    angles = torch.rand(len(batch.key), batch.key.shape[2] // 2, device=batch.key.device) * 6
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()
    cos, sin = cos.to(batch.key.dtype), sin.to(batch.key.dtype)
    actual = ops.rotary_write_kv(batch.query, batch.key, batch.value, cos, sin, caches[0], caches[1], slots)
    wide_keys, wide_values = caches[2].double(), caches[3].double()
    expected = reference.rotary_write_kv(
        batch.query.double(),
        batch.key.double(),
        batch.value.double(),
        cos.double(),
        sin.double(),
        wide_keys,
        wide_values,
        slots,
    )
    yield f"rotary_write_kv/{name}/query", actual, expected
    yield f"rotary_write_kv/{name}/keys", caches[0], wide_keys


def _row_cases(device: Device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for rows, width in ((1, 576), (37, 4096), (129, 960)):
        x = torch.randn(rows, width, device=device.device).to(dtype)
        residual = torch.randn(rows, width, device=device.device).to(dtype)
        weight = torch.randn(width, device=device.device).to(dtype)
        wide = (x.double(), residual.double(), weight.double())
        name = f"{rows}x{width}"
        yield f"rms_norm/{name}", ops.rms_norm(x, weight, 1e-5), reference.rms_norm(wide[0], wide[2], 1e-5)
        actual = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        # The sum is rounded to the type before it is normalised, on both sides.
        total = (x + residual).double()
        yield f"add_rms_norm/{name}/normed", actual[0], reference.rms_norm(total, wide[2], 1e-5)
        yield f"add_rms_norm/{name}/sum", actual[1], total
        gate_up = torch.randn(rows, 2 * width, device=device.device).to(dtype)
        yield f"silu_mul/{name}", ops.silu_mul(gate_up), reference.silu_mul(gate_up.double())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value


def _to(device: Device, batch: PagedBatch) -> PagedBatch:
    tensors = ("query", "key", "value", "key_cache", "value_cache")
    moved = {name: getattr(batch, name).to(device.device) for name in tensors}
    return replace(batch, **moved, metadata=metadata_to(batch.metadata, device.device))


def metadata_to(metadata: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    """The same metadata on another device."""
    names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "group_start_loc", "group_prefix_len")
    moved = {name: getattr(metadata, name) for name in names}
    return replace(metadata, **{name: value.to(device) for name, value in moved.items() if value is not None})
