# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton draws from rows of logits: Gumbel-max over what top-k, top-p and min-p leave, without sorting.

``token = argmax over the kept of logit / temperature + gumbel(key, token)``, in float64 after the division; the noise
is that of ``kvq.engine.sampler`` and of the CPU kernel, up to the last bit of a logarithm. Kept are: of the tokens
ordered by logit (the lower id first in a tie) the first ``top_k``; of those, each whose predecessors weigh less than
``top_p`` of them all; of those, each of at least ``min_p`` times the largest probability.

What is kept is a beginning of that order. So the best of all tokens is also the best of the kept where it is one of
them, which takes a pass that counts and weighs its predecessors; where it is not, neither is anything behind it, and
the best of those before it is tried next. Nearly always the first or second try ends it; with all logits equal the
tokens left halve with each try. Only ``top_k`` with ``top_p`` needs the k-th largest logit itself (the weight of the k
is the whole that ``top_p`` is a share of): it is found by halving the range of its 32 bits.
Sources: the rejection by a moving pivot is FlashInfer's (Ye et al. 2025, arXiv 2501.01005, section 3 of its sampling
note); that Gumbel-max makes it one draw, and the answer the same however it is found, is ours.

Invariant: a draw depends on its own row, options and key alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvq.kernels.launch import Launch

_TILE = 2048  # logits looked at together


class TritonDraws:
    """Draws many tokens in one launch; the counterpart of ``CpuKernels.draw``."""

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
    ) -> torch.Tensor:
        """A token from ``logits[row]`` for each given row: int64, on the logits' device, not waited for."""
        device = logits.device
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        launch = draw_launch(
            logits,
            rows=_on(device, rows, np.int32),
            temperature=_on(device, temperature, np.float32),
            top_k=_on(device, top_k, np.int32),
            top_p=_on(device, top_p, np.float32),
            min_p=_on(device, min_p, np.float32),
            keys=_on(device, np.array(keys, dtype=np.uint64).view(np.int64), np.int64),
            tokens=tokens,
        )
        launch.run()
        return tokens


def draw_launch(
    logits: torch.Tensor,
    *,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    tokens: torch.Tensor,
) -> Launch:
    """``logits [R, V]``; the rest ``[N]``: int32, float32, int32 (V keeps all), float32, float32, int64, int64."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} must be rows, contiguous in their last dimension")
    return Launch(
        kernel=_draw_kernel,
        grid=(len(rows),),
        arguments={
            "logits_ptr": logits,
            "rows_ptr": rows,
            "temperature_ptr": temperature,
            "top_k_ptr": top_k,
            "top_p_ptr": top_p,
            "min_p_ptr": min_p,
            "keys_ptr": keys,
            "tokens_ptr": tokens,
            "stride_row": logits.stride(0),
            "VOCAB": logits.shape[1],
            "TILE": min(_TILE, triton.next_power_of_2(logits.shape[1])),
        },
        num_warps=8,
    )


def _on(device: torch.device, values: Sequence[float] | np.ndarray, dtype: type) -> torch.Tensor:
    """On the device; through pinned memory on the way to a GPU, so that the host does not wait for the work before."""
    tensor = torch.from_numpy(np.asarray(values, dtype=dtype))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, tokens):
    """Standard Gumbel noise of tokens, float64: see ``kvq.engine.sampler.gumbel_noise``."""
    uniform = ((_mix(tokens.to(tl.uint64) ^ key) >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scaled(row_ptr, start, temperature, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Token ids ``[TILE]`` from ``start`` on and their logits over the temperature; -inf past the end and for NaN."""
    tokens = start + tl.arange(0, TILE)
    x = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.broadcast_to(temperature, x.shape))
    return tokens, tl.where(x == x, x, float("-inf"))


@triton.jit
def _ordered(x):
    """int32 in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weigh_top_k(row_ptr, temperature, largest, top_k, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The weight of the ``top_k`` largest, the largest weighing 1."""
    low = tl.full([], -2147483648, tl.int64)  # at least top_k tokens are at or above low, fewer at or above high
    high = tl.full([], 2147483648, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        count = 0
        for start in range(0, VOCAB, TILE):
            tokens, x = _scaled(row_ptr, start, temperature, VOCAB, TILE)
            count += tl.sum(((_ordered(x) >= middle) & (tokens < VOCAB)).to(tl.int32), 0)
        if count >= top_k:
            low = middle
        else:
            high = middle
    weight = 0.0
    count = 0
    at_low = 0.0
    for start in range(0, VOCAB, TILE):
        tokens, x = _scaled(row_ptr, start, temperature, VOCAB, TILE)
        weights = tl.exp(x - largest)
        above = _ordered(x) > low
        weight += tl.sum(tl.where(above, weights, 0.0), 0)
        count += tl.sum(above.to(tl.int32), 0)
        at_low = tl.maximum(at_low, tl.max(tl.where(_ordered(x) == low, weights, 0.0), 0))
    return weight + (top_k - count) * at_low


@triton.jit(do_not_specialize=["stride_row"], do_not_specialize_on_alignment=["logits_ptr"])
def _draw_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    tokens_ptr,
    stride_row,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program: one draw. Two passes over V logits without options, two more for each try with them."""
    draw = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + draw).to(tl.int64) * stride_row
    temperature = tl.load(temperature_ptr + draw)
    top_k = tl.load(top_k_ptr + draw)
    top_p = tl.load(top_p_ptr + draw)
    min_p = tl.load(min_p_ptr + draw)
    key = tl.load(keys_ptr + draw).to(tl.uint64, bitcast=True)

    largest = float("-inf")
    for start in range(0, VOCAB, TILE):
        _tokens, x = _scaled(row_ptr, start, temperature, VOCAB, TILE)
        largest = tl.maximum(largest, tl.max(x, 0))
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # of a row without any token
    limit = float("inf")  # of the weight before a token that is kept
    if top_p < 1.0:
        weight = 0.0
        if top_k < VOCAB:
            weight = _weigh_top_k(row_ptr, temperature, largest, top_k, VOCAB, TILE)
        else:
            for start in range(0, VOCAB, TILE):
                _tokens, x = _scaled(row_ptr, start, temperature, VOCAB, TILE)
                weight += tl.sum(tl.exp(x - largest), 0)
        limit = top_p * weight

    # Tokens before (pivot, pivot_token) in the order may still be drawn.
    pivot = float("-inf")
    pivot_token = VOCAB
    found = 0
    searching = True
    while searching:
        best = tl.full([], float("-inf"), tl.float64)
        candidate = VOCAB
        value = float("-inf")
        for start in range(0, VOCAB, TILE):
            tokens, x = _scaled(row_ptr, start, temperature, VOCAB, TILE)
            is_open = (x > pivot) | ((x == pivot) & (tokens < pivot_token))
            is_open = is_open & (x > float("-inf")) & (tl.exp(x - largest) >= min_p)
            scores = tl.where(is_open, x.to(tl.float64) + _gumbel(key, tokens), float("-inf"))
            tile_best = tl.max(scores, 0)
            if tile_best > best:
                best = tile_best
                candidate = tl.min(tl.where(scores == tile_best, tokens, VOCAB), 0)
                value = tl.max(tl.where(tokens == candidate, x, float("-inf")), 0)
        if candidate == VOCAB:
            searching = False  # nothing can be drawn from such a row
        else:
            found = candidate
            searching = False
            if (top_k < VOCAB) | (top_p < 1.0):
                count = 0
                weight_before = 0.0
                for start in range(0, VOCAB, TILE):
                    tokens, x = _scaled(row_ptr, start, temperature, VOCAB, TILE)
                    before = (x > value) | ((x == value) & (tokens < candidate))
                    count += tl.sum(before.to(tl.int32), 0)
                    weight_before += tl.sum(tl.where(before, tl.exp(x - largest), 0.0), 0)
                # The first token is kept whatever the options say.
                if (count > 0) & ((count >= top_k) | (weight_before >= limit)):
                    searching = True
                    pivot = value
                    pivot_token = candidate
    tl.store(tokens_ptr + draw, found)
