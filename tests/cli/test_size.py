"""``kvq size``: the arithmetic, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvq.cli.sizes import size
from tests.cli.conftest import Kvq

SHAPE = ("--num-layers", 40, "--hidden-size", 4096, "--dtype", "float16")


def figures(kvq: Kvq, *args: object) -> dict[str, Any]:
    ran = kvq("size", *args, "--json")
    assert ran.code == 0, ran.err
    document: dict[str, Any] = json.loads(ran.out)
    return document


def test_the_worked_example_is_printed(kvq: Kvq) -> None:
    ran = kvq("size", *SHAPE, "--length", 2048, "--batch", 8)
    assert ran.code == 0
    for amount in ("655 kB", "1.34 GB", "10.7 GB"):
        assert amount in ran.out
    assert "40 layers x 2 (K and V) x 4096 x 2 bytes (float16)" in ran.out


def test_reserving_wastes_and_blocks_do_not(kvq: Kvq) -> None:
    ran = kvq("size", *SHAPE, "--length", 2048, "--batch", 10, "--mean-length", 500)
    for amount in ("13.4 GB", "3.28 GB", "24%", "98%"):
        assert amount in ran.out


def test_the_safe_concurrency_of_a_large_card_and_a_small_one(kvq: Kvq) -> None:
    large = figures(
        kvq, *SHAPE, "--length", 8000, "--memory", "80GB", "--weights", "14GB", "--activations", 0
    )  # fmt: skip
    assert large["kv_bytes"] == 58 * 10**9
    assert large["safe_concurrency"] == 11
    small = figures(kvq, *SHAPE, "--length", 4096, "--memory", "40GB", "--weights", "14GB")
    assert 4 <= small["safe_concurrency"] <= 8


def test_grouped_query_attention_is_sized_by_its_kv_heads(kvq: Kvq) -> None:
    found = figures(kvq, "--num-layers", 32, "--num-kv-heads", 8, "--head-dim", 128, "--length", 10)
    assert found["bytes_per_token"] == 32 * 2 * 8 * 128 * 2


def test_a_model_brings_its_shape_its_length_and_its_weights(kvq: Kvq, tiny_model_folder: Path) -> None:
    found = figures(kvq, "--model", tiny_model_folder, "--dtype", "float32", "--memory", "1GiB")
    assert found["bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert found["length"] == 2048
    assert found["weight_bytes"] > 0


def test_a_sequence_that_does_not_fit_is_said_so(kvq: Kvq) -> None:
    ran = kvq("size", *SHAPE, "--length", 100_000, "--memory", "40GB")
    assert "not one such sequence fits" in ran.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--num-layers with --hidden-size"),
        (("--num-layers", 4), "--num-layers with --hidden-size"),
        ((*SHAPE, "--num-kv-heads", 4, "--head-dim", 8), "--num-layers with --hidden-size"),
        (SHAPE, "--length is needed"),
        ((*SHAPE, "--length", 10, "--memory", "80X"), "or a number of bytes"),
        ((*SHAPE, "--length", 10, "--mean-length", 11), "more than --length"),
        ((*SHAPE, "--length", 10, "--gpu-memory-utilization", 1), "--gpu-memory-utilization"),
    ],
)
def test_what_cannot_be_sized_is_refused_with_what_is_missing(kvq: Kvq, args: tuple[object, ...], message: str) -> None:
    ran = kvq("size", *args)
    assert ran.code == 2
    assert message in ran.err


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (655_360, "655 kB"), (1_342_177_280, "1.34 GB"), (999_960_000, "1.00 GB")],
)
def test_sizes_are_printed_with_three_digits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
