"""Bytes mean the same wherever they are written."""

from __future__ import annotations

import pytest

from kvq.cli.sizes import bytes_from
from kvq.worker.byte_sizes import parse_bytes
from kvq.worker.config import load_settings


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("2g", 2 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("512", 512),
        ("7 B", 7),
        ("1TiB", 2**40),
        ("3kb", 3000),
    ],
)
def test_a_size_is_the_same_number_for_a_setting_and_for_a_plan(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert bytes_from(text) == num_bytes
    assert load_settings({"kv_cache_memory": text}, environ={}).engine["kv_cache_memory"] == num_bytes
    assert load_settings(environ={"KVQ_KV_CACHE_MEMORY": text}).engine["kv_cache_memory"] == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2 XB", "-1GB", "2iB", "1e9", "two"])
def test_what_is_no_size_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        parse_bytes(text)
