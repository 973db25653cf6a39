"""Triton KV write, rotary, norms and activation against the reference. Run by ``test_interpreted.py``."""

from __future__ import annotations

import pytest
import torch

from kvq.kernels import kv_write, norms, reference
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (7, 576), (3, 2049), (2, 5, 64), (0, 64)], ids=str)
def test_norms_equal_the_float64_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    assert_close(norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight, 1e-5))
    normed, total = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(total, x.double() + residual.double())
    assert_close(normed, reference.rms_norm(total.double(), weight, 1e-5))


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
