"""Triton KV write, rotary, norms and activation against the reference. Run by ``test_interpreted.py``."""

from __future__ import annotations

import pytest
import torch

from kvq.kernels import kv_write, norms, reference
from kvq.kernels.kv_scales import KVScales, dequantise, quantise
from tests.kernels.batches import assert_close, paged_batch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXED = {"seq_lens": [1, 16, 17, 5, 33], "query_lens": [1, 1, 1, 5, 17]}


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 8), (3, 64), (2, 80), (40, 128)])
def test_write_kv_touches_the_mapped_slots_only(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    batch = paged_batch(**MIXED, num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    caches = torch.full_like(batch.key_cache, torch.nan), torch.full_like(batch.value_cache, torch.nan)
    expected = caches[0].clone(), caches[1].clone()
    kv_write.write_kv(batch.key, batch.value, *caches, batch.metadata.slot_mapping)
    reference.write_kv(batch.key, batch.value, *expected, batch.metadata.slot_mapping)
    assert same_bits(caches[0], expected[0])
    assert same_bits(caches[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(4, 2, 64, 64), (9, 3, 80, 32), (5, 1, 24, 24)]
)
def test_rotary_write_kv_equals_rotary_then_write(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    batch = paged_batch(**MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    num_tokens = batch.query.shape[0]
    fused = torch.cat((batch.query, batch.key, batch.value), dim=1)  # strided views, as a fused projection gives them
    query, key, value = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angle = torch.rand(num_tokens, rotary_dim) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    caches = torch.full_like(batch.key_cache, torch.nan), torch.full_like(batch.value_cache, torch.nan)
    expected = caches[0].clone(), caches[1].clone()
    rotated = kv_write.rotary_write_kv(query, key, value, cos, sin, *caches, batch.metadata.slot_mapping)
    wide = reference.rotary_write_kv(query, key, value, cos, sin, *expected, batch.metadata.slot_mapping)
    assert_close(rotated, wide)
    block_ids, offsets = batch.metadata.slot_mapping // 16, batch.metadata.slot_mapping % 16
    assert_close(caches[0][block_ids, :, offsets], expected[0][block_ids, :, offsets])
    assert torch.equal(caches[0].isnan(), expected[0].isnan())
    assert same_bits(caches[1], expected[1])


# Not float8_e4m3fn: a single cast, which the interpreter rounds wrongly. `bench.gpu_check` tries it on a card.
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bit_writes_give_the_references_codes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    batch = paged_batch(**MIXED, num_heads=9, num_kv_heads=3, head_dim=80, dtype=dtype)
    batch.key[0], batch.value[2] = 0, 1e-30
    num_tokens, slots = len(batch.query), batch.metadata.slot_mapping
    angle = torch.rand(num_tokens, 32) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def caches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, KVScales]:
        shape = batch.key_cache.shape
        keys, values = (torch.zeros(shape, dtype=kv_dtype) for _ in range(2))
        scales = KVScales(keys=torch.full(shape[:3], torch.nan), values=torch.full(shape[:3], torch.nan))
        return keys, values, slots, scales

    for turned in (False, True):
        actual, expected = caches(), caches()
        if turned:
            rows = (batch.query, batch.key, batch.value, cos, sin)
            kv_write.rotary_write_kv(*rows, *actual)
            reference.rotary_write_kv(*rows, *expected)
        else:
            kv_write.write_kv(batch.key, batch.value, *actual)
            reference.write_kv(batch.key, batch.value, *expected)
        if not (turned and dtype == torch.bfloat16):  # rotated rows are rounded by the interpreter, in its own way
            assert torch.equal(actual[0], expected[0])
            assert torch.equal(actual[1], expected[1])
            assert same_bits(actual[3].keys, expected[3].keys)
        assert same_bits(actual[3].values, expected[3].values)
        for place, scales in ((0, "keys"), (1, "values")):
            found, wanted = (
                dequantise(side[place], getattr(side[3], scales).nan_to_num(), torch.float64)
                for side in (actual, expected)
            )
            torch.testing.assert_close(found, wanted, rtol=1 / 8, atol=float(wanted.abs().max()) / 127)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8])
def test_codes_round_to_the_nearest_number_there_is(kv_dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(50, 64), torch.randn(50, 64) * torch.logspace(-9, 0, 64)))
    codes, scales = quantise(x, kv_dtype)
    number = torch.arange(-127, 128).to(torch.int8) if kv_dtype == torch.int8 else torch.arange(256).to(torch.uint8)
    there_is = dequantise(number[:, None], torch.ones(len(number)), torch.float64)[:, 0]
    there_is = there_is[~there_is.isnan()]
    steps = x.double() / scales[:, None].double()
    nearest = (steps[..., None] - there_is).abs().min(-1).values
    found = (dequantise(codes, torch.ones(100), torch.float64) - steps).abs()
    torch.testing.assert_close(found, nearest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (7, 576), (3, 2049), (2, 5, 64), (0, 64)], ids=str)
def test_norms_equal_the_float64_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    assert_close(norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight, 1e-5))
    normed, total = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(total, x.double() + residual.double())
    assert_close(normed, reference.rms_norm(total.double(), weight, 1e-5))


def test_heads_are_normed_inside_a_fused_projection() -> None:
    fused, weight = torch.randn(5, 7 * 16), torch.randn(16)
    heads = fused[:, 32:80].view(5, 3, 16)
    assert heads.data_ptr() != fused.data_ptr()
    assert torch.equal(norms.rms_norm(heads, weight, 1e-5), norms.rms_norm(heads.contiguous(), weight, 1e-5))
    assert norms.rms_norm_launch(heads, None, weight, 1e-5, heads, None).arguments["x_ptr"] is heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 3074), (2, 5, 64), (0, 64)], ids=str)
def test_silu_mul_equals_the_float64_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate_up = torch.randn(shape).to(dtype)
    assert_close(norms.silu_mul(gate_up), reference.silu_mul(gate_up.double()))


def test_rows_that_do_not_fit_are_refused() -> None:
    cache = torch.zeros(4, 2, 16, 32)
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        kv_write.write_kv(torch.zeros(3, 2, 16), torch.zeros(3, 2, 16), cache, cache.clone(), slots)
    with pytest.raises(ValueError, match="does not fit"):
        norms.rms_norm(torch.zeros(3, 8), torch.zeros(9), 1e-5)
