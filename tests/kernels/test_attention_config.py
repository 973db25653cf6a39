"""The pure choices behind the attention kernels, and that choosing needs no Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvq.kernels.attention_config import (
    DECODE_SPLIT_LEN,
    decode_config,
    grouping_pays,
    next_power_of_2,
    prefill_config,
    prefix_split_len,
)
from kvq.kernels.paged_attention import attention_launches
from tests.kernels.batches import attention_call, paged_batch

SHAPES = [(head_dim, element_bytes) for head_dim in (8, 64, 80, 96, 128, 192, 256) for element_bytes in (2, 4)]


@pytest.mark.parametrize(("head_dim", "element_bytes"), SHAPES)
@pytest.mark.parametrize("group", [1, 3, 8, 71])
def test_splits_begin_at_a_tile_and_tiles_hold_a_head(head_dim: int, element_bytes: int, group: int) -> None:
    decode = decode_config(head_dim=head_dim, element_bytes=element_bytes, group=group)
    prefill = prefill_config(head_dim=head_dim, element_bytes=element_bytes)
    assert DECODE_SPLIT_LEN % decode.block_n == 0
    assert decode.block_d == prefill.block_d >= head_dim
    assert min(decode.block_m, decode.block_n, prefill.block_m, prefill.block_n) >= 16


def test_powers_of_two_are_rounded_up() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_behind_a_shared_prefix_only_the_suffixes_are_split() -> None:
    batch = paged_batch(seq_lens=[1100] * 5 + [30], query_lens=[1] * 6, groups=[(5, 1088), (1, 0)])
    prefix, decode, _merge = attention_launches(attention_call(batch))
    assert decode.grid == (6, 2, 1)
    assert decode.arguments["first_split"] == prefix.grid[2] == decode.arguments["num_part_splits"] - 1 == 5


def test_prefix_splits_shrink_until_the_card_is_busy() -> None:
    busy = prefix_split_len(num_tiles=64, num_kv_heads=8, max_prefix_len=8192)
    idle = prefix_split_len(num_tiles=1, num_kv_heads=8, max_prefix_len=8192)
    assert busy == 8192
    assert idle == 256
    assert prefix_split_len(num_tiles=1, num_kv_heads=8, max_prefix_len=0) > 0


def test_small_groups_are_left_to_plain_decode() -> None:
    assert grouping_pays(num_sequences=64, prefix_len=4096)
    assert not grouping_pays(num_sequences=2, prefix_len=4096)
    assert not grouping_pays(num_sequences=64, prefix_len=16)


def test_the_operations_import_without_triton() -> None:
    code = "import sys, kvq.kernels.ops; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
