"""Triton attention (prefill, decode, grouped) against attention by definition. Run by ``test_interpreted.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq.kernels.paged_attention import paged_attention
from tests.kernels.batches import PagedBatch, assert_close, expected_attention, paged_batch, quantised

MIXED: dict[str, Any] = {"seq_lens": [1, 16, 17, 61, 5, 33, 131], "query_lens": [1, 1, 1, 1, 5, 17, 73]}
GROUPED: dict[str, Any] = {
    "seq_lens": [49, 61, 48, 17, 161, 170, 199, 161, 162],
    "query_lens": [1] * 9,
    "groups": [(3, 32), (1, 0), (5, 160)],
}
OPTIONS = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 37},
    {"softcap": 2.0},
    {"sinks": torch.tensor([-2.0, 0.0, 1.5, 9.0])},
    {"sliding_window": 16, "softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
]


def attend(batch: PagedBatch, **options: Any) -> torch.Tensor:
    return paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, scales=batch.scales, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [MIXED, GROUPED], ids=["mixed", "grouped"])
def test_every_dtype_is_within_its_tolerance(dtype: torch.dtype, shape: dict[str, Any]) -> None:
    batch = paged_batch(**shape, dtype=dtype, head_dim=64)
    assert_close(attend(batch, scale=0.125), expected_attention(batch, scale=0.125))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [MIXED, GROUPED], ids=["mixed", "grouped"])
def test_caches_of_eight_bits_are_read_by_their_scales(
    kv_dtype: torch.dtype, dtype: torch.dtype, shape: dict[str, Any]
) -> None:
    batch = quantised(paged_batch(**shape, dtype=dtype, head_dim=64), kv_dtype)
    assert_close(attend(batch, scale=0.125, **OPTIONS[5]), expected_attention(batch, scale=0.125, **OPTIONS[5]))


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("shape", [MIXED, GROUPED], ids=["mixed", "grouped"])
def test_window_softcap_and_sinks_combine(options: dict[str, Any], shape: dict[str, Any]) -> None:
    batch = paged_batch(**shape)
    assert_close(attend(batch, scale=0.3, **options), expected_attention(batch, scale=0.3, **options))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(3, 3, 64), (9, 3, 80), (8, 1, 96), (10, 2, 128), (71, 1, 8), (2, 1, 256)],
)
@pytest.mark.parametrize("shape", [MIXED, GROUPED], ids=["mixed", "grouped"])
def test_any_group_and_head_dim(num_heads: int, num_kv_heads: int, head_dim: int, shape: dict[str, Any]) -> None:
    batch = paged_batch(**shape, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_close(attend(batch, scale=head_dim**-0.5), expected_attention(batch, scale=head_dim**-0.5))


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_any_block_size(block_size: int) -> None:
    batch = paged_batch(**MIXED, block_size=block_size)
    assert_close(attend(batch, scale=0.2), expected_attention(batch, scale=0.2))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[5], {"sliding_window": 600}], ids="-".join)
def test_a_long_context_is_split_and_merged(options: dict[str, Any]) -> None:
    batch = paged_batch(seq_lens=[1100, 512, 513, 3], query_lens=[1, 1, 1, 1])
    assert_close(attend(batch, scale=0.2, **options), expected_attention(batch, scale=0.2, **options))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5], {"sliding_window": 90}], ids="-".join)
@pytest.mark.parametrize("host_knows_prefix", [True, False])
def test_a_long_shared_prefix_is_split_and_merged(options: dict[str, Any], host_knows_prefix: bool) -> None:
    batch = paged_batch(seq_lens=[529, 1141, 601, 40, 17, 18], query_lens=[1] * 6, groups=[(3, 528), (1, 0), (2, 16)])
    if not host_knows_prefix:
        batch = replace(batch, metadata=replace(batch.metadata, max_prefix_len=None))
    assert_close(attend(batch, scale=0.2, **options), expected_attention(batch, scale=0.2, **options))


def test_a_group_of_more_rows_than_a_tile_is_attended_whole() -> None:
    batch = paged_batch(
        seq_lens=[33 + i % 7 for i in range(45)], query_lens=[1] * 45, groups=[(1, 16), (43, 32), (1, 0)]
    )
    assert_close(attend(batch, scale=0.2), expected_attention(batch, scale=0.2))


def test_a_padding_row_yields_zeros_and_disturbs_nobody() -> None:
    batch = paged_batch(seq_lens=[7, 0, 20, 0, 9], query_lens=[1, 1, 1, 1, 4])
    out = attend(batch, scale=0.2)
    assert_close(out, expected_attention(batch, scale=0.2))
    assert out[1].eq(0).all()


def test_a_strided_query_is_read_in_place() -> None:
    batch = paged_batch(**MIXED)
    fused = torch.cat((batch.query, torch.full_like(batch.query, torch.nan)), dim=-2)
    batch = replace(batch, query=fused[:, : batch.query.shape[1]])
    assert not batch.query.is_contiguous()
    assert_close(attend(batch, scale=0.2), expected_attention(batch, scale=0.2))


def alone(batch: PagedBatch, seq: int, num_decodes: int) -> PagedBatch:
    """The same sequence over the same cache, as the only one of its step."""
    metadata = batch.metadata
    begin, end = metadata.query_start_loc[seq : seq + 2].tolist()
    seq_len = int(metadata.seq_lens[seq])
    single = replace(
        metadata,
        num_seqs=1,
        query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=metadata.seq_lens[seq : seq + 1],
        block_tables=metadata.block_tables[seq : seq + 1],
        slot_mapping=metadata.slot_mapping[begin:end],
        max_query_len=end - begin,
        max_seq_len=seq_len,
        num_decodes=num_decodes,
    )
    return replace(batch, query=batch.query[begin:end], metadata=single)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5]], ids="-".join)
def test_a_sequence_gets_the_same_bits_whatever_it_was_batched_with(options: dict[str, Any]) -> None:
    batch = paged_batch(seq_lens=[700, 61, 3, 90, 131], query_lens=[1, 1, 1, 17, 120])
    together = attend(batch, scale=0.2, **options)
    for seq in range(5):
        begin, end = batch.metadata.query_start_loc[seq : seq + 2].tolist()
        single = attend(alone(batch, seq, num_decodes=int(seq < 3)), scale=0.2, **options)
        assert torch.equal(single, together[begin:end])


def test_a_prompt_gets_the_same_bits_whole_or_in_chunks() -> None:
    batch = paged_batch(seq_lens=[150], query_lens=[150])
    whole = attend(batch, scale=0.2)
    for begin, end in [(0, 64), (64, 133), (133, 150)]:
        metadata = replace(
            batch.metadata,
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            slot_mapping=batch.metadata.slot_mapping[begin:end],
            max_query_len=end - begin,
            max_seq_len=end,
        )
        chunk = replace(batch, query=batch.query[begin:end], metadata=metadata)
        assert torch.equal(attend(chunk, scale=0.2), whole[begin:end])


def test_tensors_that_do_not_fit_are_refused() -> None:
    batch = paged_batch(**MIXED)
    with pytest.raises(ValueError, match="does not fit"):
        attend(replace(batch, query=batch.query[..., :16]), scale=0.2)
    with pytest.raises(ValueError, match="block_size"):
        attend(replace(batch, metadata=replace(batch.metadata, block_size=8)), scale=0.2)
