"""The compiled CPU kernels: equal to the definition, and each row to the last bit independent of its company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq.kernels import backend as backends
from kvq.kernels import reference
from kvq.kernels.backend import OpsBackend, choose_backend
from kvq.kernels.cpu import CpuKernels, CpuStep, Gate
from kvq.kernels.cpu_build import NoCompiler, load_library
from kvq.kernels.metadata import AttentionMetadata

# fp32 sums of up to a thousand terms, in another order.
RTOL, ATOL = 2e-5, 2e-5


pytestmark = pytest.mark.usefixtures("two_threads")


def _metadata(query_lens: list[int], seq_lens: list[int], block_size: int) -> AttentionMetadata:
    generator = torch.Generator().manual_seed(3)
    num_blocks = [-(-n // block_size) for n in seq_lens]
    ids = torch.randperm(sum(num_blocks) + 5, generator=generator).int()
    tables = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    used = 0
    for row, count in enumerate(num_blocks):
        tables[row, :count] = ids[used : used + count]
        used += count
    start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
    return AttentionMetadata(
        num_seqs=len(seq_lens),
        query_start_loc=start_loc,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.zeros(int(start_loc[-1]), dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
        num_decodes=sum(1 for n in query_lens if n == 1),
    )


def _filled(
    kernels: CpuKernels, metadata: AttentionMetadata, num_kv_heads: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The same random KV in the reference's layout and in the CPU's; all other slots hold NaN."""
    block_size, head_dim, value_dim = kernels.block_size, kernels.head_dim, kernels.value_dim
    num_blocks = int(metadata.block_tables.max()) + 6
    keys = torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan)
    values = torch.full((num_blocks, num_kv_heads, block_size, value_dim), torch.nan)
    plain, cpu = (keys.clone(), values.clone()), (keys, values)
    step = kernels.prepare(metadata)
    for row, length in enumerate(metadata.seq_lens.tolist()):
        positions = torch.arange(length)
        blocks = metadata.block_tables[row, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        key, value = torch.randn(length, num_kv_heads, head_dim), torch.randn(length, num_kv_heads, value_dim)
        reference.write_kv(key, value, *plain, slots)
        kernels.write_kv(key, value, *cpu, replace(step, slot_mapping=slots))
    return plain, cpu


CASES: dict[str, dict[str, Any]] = {
    "grouped": {"block_size": 16, "head_dim": 64, "heads": 9, "kv_heads": 3},
    "window-and-sinks": {"block_size": 16, "head_dim": 64, "heads": 4, "kv_heads": 4, "window": 7, "sinks": True},
    "softcap": {"block_size": 32, "head_dim": 80, "heads": 8, "kv_heads": 2, "softcap": 30.0},
    "small-blocks": {"block_size": 4, "head_dim": 16, "heads": 6, "kv_heads": 2},
    "block-of-one": {"block_size": 1, "head_dim": 24, "heads": 2, "kv_heads": 1},
    "values-smaller-than-keys": {"block_size": 16, "head_dim": 24, "value_dim": 12, "heads": 4, "kv_heads": 4},
    "values-larger-than-keys": {"block_size": 8, "head_dim": 40, "value_dim": 80, "heads": 6, "kv_heads": 2},
    "everything": {
        "block_size": 64,
        "head_dim": 128,
        "heads": 4,
        "kv_heads": 2,
        "window": 33,
        "softcap": 10.0,
        "sinks": True,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_reference(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    kernels = CpuKernels(block_size=case["block_size"], head_dim=case["head_dim"], value_dim=case.get("value_dim"))
    metadata = _metadata([1, 1, 1, 5, 37, 16], [3, 50, 129, 5, 100, 33], case["block_size"])
    plain, cpu = _filled(kernels, metadata, case["kv_heads"])
    query = torch.randn(metadata.num_tokens, case["heads"], case["head_dim"])
    options: dict[str, Any] = {
        "scale": case["head_dim"] ** -0.5,
        "sliding_window": case.get("window"),
        "softcap": case.get("softcap"),
        "sinks": torch.randn(case["heads"]) if case.get("sinks") else None,
    }
    expected = reference.paged_attention(query, *plain, metadata, **options)
    out = torch.full_like(expected, torch.nan)
    got = kernels.paged_attention(query, *cpu, kernels.prepare(metadata), **options, out=out)
    torch.testing.assert_close(got, expected, rtol=RTOL, atol=ATOL)


def test_a_row_of_attention_is_the_same_alone_and_in_company() -> None:
    torch.manual_seed(1)
    kernels = CpuKernels(block_size=16, head_dim=64)
    metadata = _metadata([1, 1, 1, 5, 37, 16], [3, 50, 129, 5, 100, 33], 16)
    _, cpu = _filled(kernels, metadata, 3)
    query = torch.randn(metadata.num_tokens, 9, 64)
    step = kernels.prepare(metadata)
    together = kernels.paged_attention(query, *cpu, step, scale=0.125)
    for token in range(metadata.num_tokens):
        alone: CpuStep = replace(step, order=torch.tensor([token], dtype=torch.int32))
        got = kernels.paged_attention(query, *cpu, alone, scale=0.125)
        assert torch.equal(got[token], together[token]), f"token {token}"


@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), [(1, 64, 96), (3, 576, 1), (37, 100, 193)])
def test_linear_equals_torch_with_bias_and_accumulation(num_rows: int, in_features: int, out_features: int) -> None:
    torch.manual_seed(2)
    kernels = CpuKernels(block_size=16, head_dim=64)
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    x, y = torch.randn(num_rows, in_features), torch.randn(num_rows, out_features)
    expected = y + torch.nn.functional.linear(x, weight, bias)
    got = kernels.pack_linear(weight, bias)(x, out=y.clone(), accumulate=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_row_of_a_linear_layer_is_the_same_in_any_number_of_rows() -> None:
    torch.manual_seed(3)
    kernels = CpuKernels(block_size=16, head_dim=64)
    linear = kernels.pack_linear(torch.randn(200, 576))
    x = torch.randn(300, 576)
    together = linear(x)
    for num_rows in (1, 2, 5, 13, 14, 15, 29, 64, 299):
        assert torch.equal(linear(x[:num_rows].contiguous()), together[:num_rows]), f"{num_rows} rows"


def test_gates_inside_the_product_are_those_after_it() -> None:
    torch.manual_seed(5)
    kernels = CpuKernels(block_size=16, head_dim=64)
    weight, bias, x = torch.randn(2 * 48, 70), torch.randn(2 * 48), torch.randn(33, 70)
    for pack in (kernels.pack_linear, kernels.pack_int8):
        expected = kernels.silu_mul(pack(weight, bias)(x))
        assert torch.equal(pack(weight, bias, gated=True)(x), expected)


@pytest.mark.parametrize("sizes", [[7, 0, 1, 60, 0], [0, 0, 0], [3]])
def test_each_group_of_rows_goes_through_a_layer_of_its_own_to_the_bits_it_would_have_alone(sizes: list[int]) -> None:
    torch.manual_seed(7)
    kernels = CpuKernels(block_size=16, head_dim=64)
    for gated in (False, True):
        layers = [kernels.pack_linear(torch.randn(64, 576), torch.randn(64), gated=gated) for _ in sizes]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        x = torch.randn(sum(sizes), 576)
        together = kernels.group_linear(layers)(x, starts)
        alone = [layer(part) for layer, part in zip(layers, x.split(sizes), strict=True)]
        assert torch.equal(together, torch.cat(alone))


def test_weighted_rows_are_added_in_order_and_each_sum_is_the_same_in_company() -> None:
    torch.manual_seed(8)
    kernels = CpuKernels(block_size=16, head_dim=64)
    x, rows, weights = torch.randn(50, 97), torch.randint(50, (33, 5)), torch.randn(33, 5)
    together = kernels.weighted_rows(x, rows, weights)
    torch.testing.assert_close(together, (x[rows] * weights[..., None]).sum(1), rtol=RTOL, atol=ATOL)
    for row in range(33):
        assert torch.equal(kernels.weighted_rows(x, rows[row : row + 1], weights[row : row + 1])[0], together[row])


def test_a_neighbour_that_shares_a_block_does_not_pass_on_its_nan() -> None:
    torch.manual_seed(6)
    kernels = CpuKernels(block_size=16, head_dim=64)
    metadata = _metadata([1, 1], [16, 30], 16)
    _, (key_cache, value_cache) = _filled(kernels, metadata, 3)
    tables = metadata.block_tables.clone()
    tables[1, 0] = tables[0, 0]
    step = kernels.prepare(replace(metadata, block_tables=tables))
    query = torch.randn(2, 9, 64)
    before = kernels.paged_attention(query, key_cache, value_cache, step, scale=0.125)
    key_cache[tables[1, 1]] = value_cache[tables[1, 1]] = torch.nan
    after = kernels.paged_attention(query, key_cache, value_cache, step, scale=0.125)
    assert torch.equal(after[0], before[0])
    assert after[1].isnan().all()


def test_row_wise_kernels_equal_torch() -> None:
    torch.manual_seed(4)
    kernels = CpuKernels(block_size=16, head_dim=64)
    x, weight = torch.randn(33, 70), torch.randn(70)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (70,), weight, 1e-5), rtol=1e-5, atol=1e-5
    )
    gate_up = 30 * torch.randn(33, 2 * 37)
    expected = torch.nn.functional.silu(gate_up[:, :37]) * gate_up[:, 37:]
    torch.testing.assert_close(kernels.silu_mul(gate_up), expected, rtol=1e-5, atol=1e-5)
    heads, angles = torch.randn(9, 3, 64), torch.randn(9, 32)
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)
    rotated = torch.cat([-heads[..., 32:], heads[..., :32]], -1)
    expected = heads * cos[:, None] + rotated * sin[:, None]
    kernels.rotary(heads, cos.contiguous(), sin.contiguous())
    torch.testing.assert_close(heads, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", Gate)
def test_activations_equal_torch_and_no_element_depends_on_where_it_lies(gate: Gate) -> None:
    kernels = CpuKernels(block_size=16, head_dim=64)
    functional = torch.nn.functional
    definitions: dict[Gate, Callable[[torch.Tensor], torch.Tensor]] = {
        Gate.SILU: functional.silu,
        Gate.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
        Gate.GELU_QUICK: lambda x: x * torch.sigmoid(1.702 * x),
        Gate.SIGMOID: torch.sigmoid,
    }
    x = 20 * torch.randn(331, 97, generator=torch.Generator().manual_seed(4))
    found = kernels.gate(x, gate)
    torch.testing.assert_close(found, definitions[gate](x.double()).float(), rtol=1e-5, atol=1e-5)
    for row in (0, 1, 170, 330):
        assert torch.equal(kernels.gate(x[row].clone(), gate), found[row])
        assert torch.equal(kernels.gate(x[row, 50:].clone(), gate), found[row, 50:])


def test_block_copies_are_done_in_order_and_touch_only_the_tokens_named() -> None:
    kernels, ops = CpuKernels(block_size=8, head_dim=16, value_dim=24), OpsBackend()
    key, value = torch.randn(4, 2, 8, 16), torch.randn(4, 2, 8, 24)
    copies = [(0, 1, 5), (1, 2, 3)]
    expected_value = value.clone()
    ops.copy_blocks(copies, key.clone(), expected_value)
    # The CPU's keys lie transposed in their block.
    expected_key = key.view(4, 2, 16, 8).transpose(2, 3).contiguous()
    ops.copy_blocks(copies, expected_key, value.clone())
    kernels.copy_blocks(copies, key, value)
    assert torch.equal(value, expected_value)
    assert torch.equal(key.view(4, 2, 16, 8).transpose(2, 3), expected_key)


def test_the_slots_of_a_steps_copies_are_found_once_for_all_layers() -> None:
    layers = [torch.randn(4, 2, 8, 16) for _ in range(6)]
    before = backends._slots.cache_info()
    for keys, values in zip(layers[::2], layers[1::2], strict=True):
        OpsBackend().copy_blocks([(3, 0, 7), (0, 2, 2)], keys, values)
    after = backends._slots.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 1)


def test_without_a_compiler_the_pytorch_kernels_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NoCompiler, match="no C compiler"):
        load_library(block_size=16, head_dim=64, value_dim=64)
    backend = choose_backend(
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        block_size=16,
        head_dims={(64, 64)},
        max_group=3,
    )
    assert backend.name == "ops"


def test_a_source_the_compiler_refuses_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with pytest.raises(NoCompiler, match="refused the kernels"):
        load_library(block_size=-1, head_dim=64, value_dim=64)


def test_int8_products_are_exact_in_the_integers_and_row_independent() -> None:
    torch.manual_seed(5)
    kernels = CpuKernels(block_size=16, head_dim=64)
    assert kernels.has_int8
    weight, x, bias = torch.randn(71, 102), torch.randn(31, 102), torch.randn(71)
    w_scale, x_scale = weight.abs().amax(1) / 127, x.abs().amax(1) / 127
    w_int = (weight * (127 / weight.abs().amax(1))[:, None]).round().double()
    x_int = (x * (127 / x.abs().amax(1))[:, None]).round().double()
    expected = (x_int @ w_int.T) * (x_scale[:, None] * w_scale).double() + bias
    linear = kernels.pack_int8(weight, bias)
    together = linear(x)
    torch.testing.assert_close(together, expected.float(), rtol=1e-4, atol=0.1)  # one unit at a tie
    assert (together - expected).abs().mean() < 2e-3
    assert torch.equal(linear(x[:5].contiguous()), together[:5])
    y = torch.randn(31, 71)
    torch.testing.assert_close(linear(x, out=y.clone(), accumulate=True), y + together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
def test_tokens_are_drawn_as_the_definition_draws_them(spread: float) -> None:
    from kvq.engine.request import SamplingParams
    from kvq.engine.sampler import _draw, stream_key
    from kvq.engine.step import SampleSpec

    kernels = CpuKernels(block_size=16, head_dim=64)
    generator = torch.Generator().manual_seed(7)
    logits = spread * torch.randn(40, 3001, generator=generator)
    choices: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 7},
        {"top_k": 50, "top_p": 0.5},
        {"min_p": 0.05},
        {"temperature": 0.3, "top_p": 0.99, "top_k": 2000},
        {"top_k": 1},
        {"top_p": 1e-6},
    ]
    for options in choices:
        params = SamplingParams(**options)
        specs = [
            SampleSpec(params=params, seed=row, index=row % 3, position=row, token_ids=[], num_prompt=0)
            for row in range(40)
        ]
        expected = [_draw(logits[row] / params.temperature, params, (specs[row],))[0] for row in range(40)]
        got = kernels.draw(
            logits,
            rows=range(40),
            temperature=[params.temperature] * 40,
            top_k=[params.top_k or 3001] * 40,
            top_p=[params.top_p] * 40,
            min_p=[params.min_p] * 40,
            keys=[stream_key(s.seed, s.index, s.position) for s in specs],
        )
        # A token at the rim of the nucleus may fall on either side.
        assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1, options
