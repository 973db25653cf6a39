"""The PyTorch reference against attention by definition, in float64."""

from __future__ import annotations

import pytest
import torch

from kvq.kernels import reference
from kvq.kernels.backend import OpsBackend
from kvq.kernels.kv_scales import KVScales
from tests.kernels.batches import assert_close, expected_attention, paged_batch

MIXED = {"seq_lens": [1, 16, 17, 61, 5, 33, 48, 300], "query_lens": [1, 1, 1, 1, 5, 17, 3, 290]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 64), (6, 1, 80)])
def test_a_mixed_batch_equals_attention_by_definition(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    batch = paged_batch(**MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    out = reference.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale=head_dim**-0.5
    )
    assert_close(out, expected_attention(batch, scale=head_dim**-0.5))


@pytest.mark.parametrize("sliding_window", [None, 1, 16, 37])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks_combine(sliding_window: int | None, softcap: float | None, with_sinks: bool) -> None:
    batch = paged_batch(**MIXED)
    options = {
        "scale": 0.3,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": torch.tensor([-2.0, 0.0, 1.5, 9.0]) if with_sinks else None,
    }
    out = reference.paged_attention(batch.query, batch.key_cache, batch.value_cache, batch.metadata, **options)
    assert_close(out, expected_attention(batch, **options))


def test_values_may_be_narrower_than_keys() -> None:
    batch = paged_batch(**MIXED)
    out = reference.paged_attention(
        batch.query, batch.key_cache, batch.value_cache[..., :24].contiguous(), batch.metadata, scale=0.2
    )
    assert_close(out, expected_attention(batch, scale=0.2)[..., :24])


def test_a_padding_row_yields_zeros_and_disturbs_nobody() -> None:
    batch = paged_batch(seq_lens=[7, 0, 20, 0], query_lens=[1, 1, 1, 1])
    out = reference.paged_attention(batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale=0.2)
    assert_close(out, expected_attention(batch, scale=0.2))
    assert out[1].eq(0).all()


def test_written_keys_and_values_are_the_ones_attention_reads() -> None:
    batch = paged_batch(**MIXED)
    key_cache, value_cache = batch.key_cache.clone(), batch.value_cache.clone()
    block_ids = batch.metadata.slot_mapping // 16
    key_cache[block_ids, :, batch.metadata.slot_mapping % 16] = torch.nan
    reference.write_kv(batch.key, batch.value, key_cache, value_cache, batch.metadata.slot_mapping)
    assert torch.equal(key_cache.nan_to_num(99), batch.key_cache.nan_to_num(99))
    assert torch.equal(value_cache.nan_to_num(99), batch.value_cache.nan_to_num(99))


def test_fp8_is_the_same_bits_whether_the_card_knows_the_type_or_not() -> None:
    batch = paged_batch(seq_lens=[20, 33], query_lens=[20, 33])
    found = []
    for kv_dtype in (torch.uint8, torch.float8_e4m3fn):
        caches = [torch.zeros(batch.key_cache.shape, dtype=kv_dtype) for _ in range(2)]
        keys, values = (torch.ones(batch.key_cache.shape[:3]) for _ in range(2))
        scales = KVScales(keys=keys, values=values)
        OpsBackend().write_kv(batch.key, batch.value, *caches, batch.metadata, scales=scales)
        OpsBackend().copy_blocks([(3, 1, 7)], *caches, scales=scales)
        attended = reference.paged_attention(batch.query, *caches, batch.metadata, scale=0.2, scales=scales)
        found.append([attended, keys, values, *(cache.view(torch.uint8) for cache in caches)])
    assert all(torch.equal(bits, numbers) for bits, numbers in zip(*found, strict=True))


def test_rotary_turns_each_pair_by_its_angle() -> None:
    x = torch.randn(5, 2, 12, dtype=torch.float64)
    angle = torch.rand(5, 4, dtype=torch.float64)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    out = reference.apply_rotary(x, cos, sin)
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag, x[..., 8:]), dim=-1))


def test_norms_and_activation_follow_their_formulas() -> None:
    x, residual, weight = torch.randn(3, 10), torch.randn(3, 10), torch.randn(10)
    total = x + residual
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    normed, new_residual = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, total)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(reference.silu_mul(x), x[:, :5] * x[:, :5].sigmoid() * x[:, 5:])
