"""The compiled CPU path: torch tensors in, C kernels called through ctypes.

Owns the call signatures and the layout of the CPU's key cache. Knows tensors, not requests. fp32 only.

Layout: of a block and kv head, V lies as ``[block_size, value_dim]`` and K transposed, ``[head_dim, block_size]``, so
that one vector register holds one dimension of many keys. The tensors' shapes are the same as everywhere; only these
kernels read and write them.

Every output row depends on its own inputs alone, to the last bit: see cpu_c/common.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from kvq.kernels.cpu_build import load_library
from kvq.kernels.huge_pages import HugePages
from kvq.kernels.kv_scales import KVScales
from kvq.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuStep:
    """One step's metadata as the attention kernel reads it (int32, contiguous)."""

    order: torch.Tensor  # [T] token indices; tokens that share blocks are neighbours
    seq_of_token: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    block_tables: torch.Tensor  # [S, max_blocks]
    slot_mapping: torch.Tensor  # int64 [T]


class Gate(IntEnum):
    """Activations that are the input times a sigmoid, and the sigmoid (the kernel's numbers)."""

    SILU = 0
    GELU_TANH = 1
    GELU_QUICK = 2
    SIGMOID = 3


class PackedLinear:
    """A linear layer's weight in panels, as the kernel streams it. ``y = x W^T + bias``.

    ``gated``: the first half of the outputs are gates and ``y = silu(first half) * second half``.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        pages: HugePages,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> None:
        self.num_columns, self.in_features = weight.shape
        self.out_features = self.num_columns // 2 if gated else self.num_columns
        self.gated = gated
        self._library = library
        columns = library.kvq_panel_cols()
        self._padded_columns = -(-self.num_columns // columns) * columns
        weight = weight.detach().float().contiguous()
        self._bias: torch.Tensor | None = None
        if gated:
            weight = _gates_beside(weight, columns // 2)
        if bias is not None:
            bias = bias.detach().float().contiguous()
            self._bias = _gates_beside(bias, columns // 2) if gated else bias
        self._pack(pages, weight)

    def _pack(self, pages: HugePages, weight: torch.Tensor) -> None:
        self._packed = pages.floats(self._padded_columns * self.in_features)
        self._library.kvq_pack_linear(_ptr(weight), self.num_columns, self.in_features, _ptr(self._packed))

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None, *, accumulate: bool = False) -> torch.Tensor:
        """``x`` [M, in_features], rows contiguous -> [M, out_features]; with ``accumulate`` added to ``out``."""
        assert x.dtype == torch.float32
        assert x.stride(1) == 1
        assert not (accumulate and self.gated)
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features)
        self._multiply(
            x, self.num_columns, _ptr(self._bias), _ptr(out), out.stride(0), int(accumulate), int(self.gated)
        )
        return out

    def _multiply(self, x: torch.Tensor, *results: Any) -> None:
        self._library.kvq_linear(_ptr(x), x.shape[0], self.in_features, x.stride(0), _ptr(self._packed), *results)


class Int8Linear(PackedLinear):
    """A linear layer with int8 weights (a scale per output) and activations quantised per row as they come."""

    def _pack(self, pages: HugePages, weight: torch.Tensor) -> None:
        self._padded_in = -(-self.in_features // 4) * 4
        self._packed = pages.take(self._padded_columns * self._padded_in)
        self._scales = torch.empty(self._padded_columns)
        self._library.kvq_pack_int8(
            _ptr(weight), self.num_columns, self.in_features, _ptr(self._packed), _ptr(self._scales)
        )

    def _multiply(self, x: torch.Tensor, *results: Any) -> None:
        num_rows = x.shape[0]
        quantised = torch.empty(num_rows, self._padded_in, dtype=torch.int8)
        scales, sums = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
        self._library.kvq_quantize_rows(
            _ptr(x), num_rows, self.in_features, x.stride(0), _ptr(quantised), _ptr(scales), _ptr(sums)
        )
        self._library.kvq_linear_int8(
            *(_ptr(quantised), _ptr(scales), _ptr(sums), num_rows, self.in_features),
            *(_ptr(self._packed), _ptr(self._scales)),
            *results,
        )


class GroupedLinear:
    """Linear layers of one shape, each for rows of its own."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[PackedLinear]) -> None:
        self.in_features = layers[0].in_features
        self._library = library
        self._layers = tuple(layers)
        self._weights, self._biases = (
            torch.tensor([_ptr(part) or 0 for part in parts])
            for parts in zip(*((layer._packed, layer._bias) for layer in layers), strict=True)
        )

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """``x`` [M, in_features] -> [M, out_features]: rows ``starts[g]`` to ``starts[g + 1]`` (int64) by layer g."""
        assert x.dtype == torch.float32
        assert x.stride(1) == 1
        layer = self._layers[0]
        out = x.new_empty(x.shape[0], layer.out_features)
        self._library.kvq_grouped_linear(
            *(_ptr(x), self.in_features, x.stride(0), _ptr(starts), len(self._layers)),
            *(_ptr(self._weights), layer.num_columns, _ptr(self._biases)),
            *(_ptr(out), out.stride(0), int(layer.gated)),
        )
        return out


def _gates_beside(rows: torch.Tensor, lanes: int) -> torch.Tensor:
    """[2 I, ...], gates first -> ``lanes`` rows of gates, the ``lanes`` that they gate, and so on."""
    return rows.view(2, -1, lanes, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


class CpuKernels:
    """The kernels compiled for one block size and head size (of queries and keys; ``value_dim`` where values differ).

    Raises:
        NoCompiler: when they cannot be built here.
    """

    name = "cpu"
    max_group = 64  # query heads per KV head that the attention kernel takes

    def __init__(self, *, block_size: int, head_dim: int, value_dim: int | None = None) -> None:
        self.block_size = block_size
        self.head_dim = head_dim
        self.value_dim = value_dim or head_dim
        self._library = _declare(load_library(block_size=block_size, head_dim=head_dim, value_dim=self.value_dim))
        self._pages = HugePages()

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> PackedLinear:
        """Copy ``weight`` [N, K] into panels."""
        return PackedLinear(self._library, self._pages, weight, bias, gated=gated)

    def group_linear(self, layers: Sequence[PackedLinear]) -> GroupedLinear:
        """Of layers of one shape, each for rows of its own."""
        return GroupedLinear(self._library, layers)

    def can_gate(self, num_gates: int) -> bool:
        """Whether so many gates and what they gate can be one ``gated`` layer."""
        lanes: int = self._library.kvq_panel_cols() // 2
        return num_gates % lanes == 0

    @property
    def has_int8(self) -> bool:
        """True where this processor has fast int8 products."""
        return bool(self._library.kvq_int8_kind())

    def pack_int8(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False) -> Int8Linear:
        """Quantise ``weight`` [N, K] to int8 per output."""
        return Int8Linear(self._library, self._pages, weight, bias, gated=gated)

    def prepare(self, metadata: AttentionMetadata) -> CpuStep:
        """Once a step: put tokens that share key blocks next to each other."""
        query_start_loc = metadata.query_start_loc.numpy()
        lens = np.diff(query_start_loc)
        tables = metadata.block_tables.contiguous()
        # Sorted block tables are in depth-first order of the sharing between them.
        keys = tables.numpy().astype(">i4")
        seq_order = sorted(range(len(lens)), key=lambda seq: keys[seq].tobytes())
        order = np.concatenate([np.arange(query_start_loc[s], query_start_loc[s + 1]) for s in seq_order])
        seq_of_token = np.repeat(np.arange(len(lens)), lens)
        starts = metadata.seq_lens.numpy() - lens
        positions = np.arange(len(seq_of_token)) - query_start_loc[seq_of_token] + starts[seq_of_token]
        return CpuStep(
            order=torch.from_numpy(order.astype(np.int32)),
            seq_of_token=torch.from_numpy(seq_of_token.astype(np.int32)),
            positions=torch.from_numpy(positions.astype(np.int32)),
            block_tables=tables,
            slot_mapping=metadata.slot_mapping,
        )

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: CpuStep,
        *,
        scales: KVScales | None = None,
    ) -> None:
        """Scatter key [T, H_kv, D] and value [T, H_kv, D_v] (head dimensions contiguous) to their slots."""
        assert scales is None
        key, value = _rows_contiguous(key), _rows_contiguous(value)
        self._library.kvq_write_kv(
            _ptr(key),
            key.stride(0),
            _ptr(value),
            value.stride(0),
            key.shape[0],
            key.shape[1],
            _ptr(step.slot_mapping),
            _ptr(key_cache),
            _ptr(value_cache),
        )

    def copy_blocks(
        self,
        copies: Sequence[tuple[int, int, int]],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        """Copy the first n slots of block src to dst, for each (src, dst, n) in order."""
        assert scales is None
        flat = torch.tensor(copies, dtype=torch.int32)
        self._library.kvq_copy_blocks(_ptr(flat), len(copies), key_cache.shape[1], _ptr(key_cache), _ptr(value_cache))

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: CpuStep,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        scales: KVScales | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, H, D] over the cache -> [T, H, D_v]; rows not in ``step.order`` stay as they are."""
        assert scales is None
        query = _rows_contiguous(query)
        num_tokens, num_heads, _ = query.shape
        kv_heads = key_cache.shape[1]
        assert num_heads // kv_heads <= self.max_group
        out = query.new_empty(num_tokens, num_heads, self.value_dim) if out is None else out[:num_tokens]
        self._library.kvq_attention(
            _ptr(query),
            query.stride(0),
            len(step.order),
            _ptr(step.order),
            _ptr(step.seq_of_token),
            _ptr(step.positions),
            _ptr(step.block_tables),
            step.block_tables.shape[1],
            kv_heads,
            num_heads // kv_heads,
            _ptr(key_cache),
            _ptr(value_cache),
            scale,
            sliding_window or 0,
            softcap or 0.0,
            _ptr(None if sinks is None else sinks.float().contiguous()),
            _ptr(out),
        )
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows of x [M, D] over their root mean square, times ``weight``."""
        out = torch.empty_like(x) if out is None else out[: len(x)]
        self._library.kvq_rms_norm(_ptr(x), x.shape[0], x.shape[1], _ptr(weight), eps, _ptr(out))
        return out

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[M, 2 D] -> silu(first half) * second half, [M, D]."""
        half = gate_up.shape[1] // 2
        out = gate_up.new_empty(gate_up.shape[0], half) if out is None else out[: len(gate_up)]
        self._library.kvq_silu_mul(_ptr(gate_up), gate_up.shape[0], half, _ptr(out))
        return out

    def gate(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """An activation of each element of ``x`` (contiguous)."""
        out = torch.empty_like(x)
        self._library.kvq_gate(_ptr(x), x.numel(), int(gate), _ptr(out))
        return out

    def weighted_rows(self, x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[M, D]: sums, in order, of K rows of x [N, D] times their ``weights``; ``rows`` (int64) and they [M, K]."""
        out = x.new_empty(len(rows), x.shape[1])
        self._library.kvq_weighted_rows(_ptr(x), x.shape[1], _ptr(rows), _ptr(weights), *rows.shape, _ptr(out))
        return out

    def draw(
        self,
        logits: torch.Tensor,
        *,
        rows: Sequence[int],
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        keys: Sequence[int],
    ) -> list[int]:
        """Draw a token from ``logits[row]`` for each of the given rows (Gumbel-max with the noise of its key)."""
        assert logits.is_contiguous()
        columns = [
            torch.tensor(rows),
            torch.tensor(temperature, dtype=torch.float32),
            torch.tensor(top_k),
            torch.tensor(top_p, dtype=torch.float32),
            torch.tensor(min_p, dtype=torch.float32),
            torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64)),
        ]
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._library.kvq_draw(_ptr(logits), logits.shape[1], len(rows), *map(_ptr, columns), _ptr(tokens))
        drawn: list[int] = tokens.tolist()
        return drawn

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate x [T, heads, D] in place by cos and sin [T, D] (GPT-NeoX halves)."""
        self._library.kvq_rotary(_ptr(x), x.stride(0), x.shape[0], x.shape[1], _ptr(cos), _ptr(sin))


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with heads and D dense; rows may be strided."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _ptr(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    results = (number, pointer, pointer, number, ctypes.c_int, ctypes.c_int)
    signatures: dict[str, list[Any]] = {
        "kvq_panel_cols": [],
        "kvq_int8_kind": [],
        "kvq_pack_linear": [pointer, number, number, pointer],
        "kvq_linear": [*(pointer, number, number, number), pointer, *results],
        "kvq_grouped_linear": [
            *(pointer, number, number, pointer, number),
            *(pointer, number, pointer, pointer, number, ctypes.c_int),
        ],
        "kvq_weighted_rows": [pointer, number, pointer, pointer, number, number, pointer],
        "kvq_rms_norm": [pointer, number, number, pointer, real, pointer],
        "kvq_silu_mul": [pointer, number, number, pointer],
        "kvq_gate": [pointer, number, ctypes.c_int, pointer],
        "kvq_write_kv": [pointer, number, pointer, number, number, number, pointer, pointer, pointer],
        "kvq_draw": [pointer, number, number, *(pointer,) * 7],
        "kvq_rotary": [pointer, number, number, number, pointer, pointer],
        "kvq_copy_blocks": [pointer, number, number, pointer, pointer],
        "kvq_attention": [
            *(pointer, number, number),
            *(pointer, pointer, pointer, pointer, number, number, number),
            *(pointer, pointer, real, number, real, pointer, pointer),
        ],
    }
    if hasattr(library, "kvq_linear_int8"):
        signatures |= {
            "kvq_pack_int8": [pointer, number, number, pointer, pointer],
            "kvq_quantize_rows": [pointer, number, number, number, pointer, pointer, pointer],
            "kvq_linear_int8": [
                *(pointer, pointer, pointer, number, number),
                *(pointer, pointer, *results),
            ],
        }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.kvq_panel_cols.restype = number
    library.kvq_int8_kind.restype = number
    return library
