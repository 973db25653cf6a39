"""Every operation in plain PyTorch, written to be read: the truth the fast paths are tested against.

Knows tensors and the paged cache layout (``[num_blocks, num_kv_heads, block_size, head_dim]`` per layer),
nothing of requests. Runs on any device and dtype and accumulates in float32 (float64 for float64 inputs).
It reads lengths on the host, so on a GPU every call synchronises. Invariant: a slot that holds no token of
the sequence is never part of a result, whatever bits it contains.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvq.kernels.kv_scales import KVScales, as_bytes, dequantise, quantise
from kvq.kernels.metadata import AttentionMetadata

_QUERY_CHUNK = 256  # query rows scored at once: bounds the score matrix of a long prefill


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Scatter ``key`` and ``value`` ``[T, num_kv_heads, head_dim]`` into their cache slots, in place.

    With ``scales`` they are quantised to the caches' eight bits.
    """
    block_size = key_cache.shape[2]
    block_ids = slot_mapping // block_size
    offsets = slot_mapping % block_size
    if scales is None:
        key_cache[block_ids, :, offsets] = key.to(key_cache.dtype)
        value_cache[block_ids, :, offsets] = value.to(value_cache.dtype)
        return
    for rows, cache, cache_scales in ((key, key_cache, scales.keys), (value, value_cache, scales.values)):
        codes, row_scales = quantise(rows, cache.dtype)
        as_bytes(cache)[block_ids, :, offsets] = as_bytes(codes)
        cache_scales[block_ids, :, offsets] = row_scales


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``cos.shape[-1]`` dimensions of ``x [T, heads, head_dim]``; the rest pass through.

    ``cos`` and ``sin`` are ``[T, rotary_dim]`` in the half-split layout of Hugging Face: ``(x1, x2)`` becomes
    ``(x1 cos - x2 sin, x2 cos + x1 sin)``, where ``x1`` and ``x2`` are the two halves.
    """
    rotary_dim = cos.shape[-1]
    acc = _acc_dtype(x)
    rotated, passed = x[..., :rotary_dim].to(acc), x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos[:, None].to(acc) + turned * sin[:, None].to(acc)
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


def rotary_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write the rotated keys and the values to the cache, return the rotated queries."""
    write_kv(apply_rotary(key, cos, sin), value, key_cache, value_cache, slot_mapping, scales)
    return apply_rotary(query, cos, sin)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Causal attention of ``query [T, num_heads, head_dim]`` over each sequence's cached keys and values.

    ``score = scale * q.k``; with ``softcap`` c the score becomes ``c * tanh(score / c)``; a key at position
    ``p`` is visible to a query at position ``i`` when ``i - sliding_window < p <= i``. ``sinks [num_heads]``
    are extra logits that take part in the softmax and carry no value. Returns a new ``[T, num_heads, value_dim]``,
    where ``value_dim`` (the last dimension of ``value_cache``) is nearly always ``head_dim``. ``scales`` belong to
    caches of eight bits.
    """
    shape = (*query.shape[:2], value_cache.shape[3])
    out = torch.zeros(shape, dtype=query.dtype, device=query.device)
    num_decodes = metadata.num_decodes

    def gather(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        tables, seq_lens = metadata.block_tables[first:end], metadata.seq_lens[first:end]
        keys = _gather(key_cache, tables, seq_lens, None if scales is None else scales.keys, _acc_dtype(query))
        values = _gather(value_cache, tables, seq_lens, None if scales is None else scales.values, _acc_dtype(query))
        # Values of empty slots meet a weight of zero, and 0 * NaN is NaN; keys are masked after the product.
        empty = torch.arange(values.shape[2], device=query.device) >= seq_lens[:, None]
        return keys, values.masked_fill_(empty[:, None, :, None], 0)

    if num_decodes:
        seq_lens = metadata.seq_lens[:num_decodes]
        keys, values = gather(0, num_decodes)
        out[:num_decodes] = _attend(
            query[:num_decodes, None], keys, values, seq_lens[:, None] - 1, 0, scale, sliding_window, softcap, sinks
        )[:, 0]

    starts = metadata.query_start_loc.tolist()
    for s in range(num_decodes, metadata.num_seqs):
        keys, values = gather(s, s + 1)
        end, seq_len = starts[s + 1], int(metadata.seq_lens[s])
        for lo in range(starts[s], end, _QUERY_CHUNK):
            hi = min(lo + _QUERY_CHUNK, end)
            positions = torch.arange(seq_len - end + lo, seq_len - end + hi, device=query.device)[None]
            # Only keys up to the chunk's last position and from its first window on are worth scoring.
            last = seq_len - end + hi
            first = 0 if sliding_window is None else max(0, seq_len - end + lo - sliding_window + 1)
            out[lo:hi] = _attend(
                query[None, lo:hi],
                keys[:, :, first:last],
                values[:, :, first:last],
                positions,
                first,
                scale,
                sliding_window,
                softcap,
                sinks,
            )[0]
    return out


def _acc_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: torch.Tensor | None,
    acc: torch.dtype,
) -> torch.Tensor:
    """Copy the cached rows of some sequences to padded ``[S, num_kv_heads, N, dim]``, in ``acc`` where scaled."""
    num_seqs, (num_kv_heads, block_size, dim), device = len(block_tables), cache.shape[1:], cache.device
    num_blocks = -(-int(seq_lens.max()) // block_size)
    tables = block_tables[:, :num_blocks].long()
    used = torch.arange(num_blocks, device=device) * block_size < seq_lens[:, None]
    tables = torch.where(used, tables, 0)  # entries past the end are not ours to follow
    # One row per (block, head): the copy lands head-major, without a transpose.
    rows = tables[:, None, :] * num_kv_heads + torch.arange(num_kv_heads, device=device)[None, :, None]
    rows = rows.flatten()
    copied = as_bytes(cache).reshape(-1, block_size * dim).index_select(0, rows)
    if scales is not None:
        row_scales = scales.reshape(-1, block_size).index_select(0, rows)
        copied = dequantise(copied.view(-1, block_size, dim), row_scales, acc)
    return copied.view(num_seqs, num_kv_heads, num_blocks * block_size, dim)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    first_key: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``query [B, M, H, D]`` at ``positions [B, M]`` over ``keys [B, Hkv, N, D]`` that start at ``first_key``."""
    num_seqs, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    acc = _acc_dtype(query)

    # [B, Hkv, M * group, D]: all query heads that read one KV head form one matrix.
    q = query.view(num_seqs, num_queries, num_kv_heads, group, head_dim).transpose(1, 2).to(acc) * scale
    q = q.reshape(num_seqs, num_kv_heads, num_queries * group, head_dim)
    scores = q @ keys.to(acc).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_seqs, num_kv_heads, num_queries, group, num_keys)

    key_positions = torch.arange(first_key, first_key + num_keys, device=query.device)
    hidden = key_positions > positions[..., None]
    if sliding_window is not None:
        hidden |= key_positions <= positions[..., None] - sliding_window
    scores = scores.masked_fill_(hidden[:, None, :, None, :], float("-inf"))

    # The lower bound keeps a row without any visible key finite; its weights are then all zero.
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(acc).min)
    if sinks is not None:
        sink = sinks.to(acc).view(num_kv_heads, 1, group, 1)
        top = torch.maximum(top, sink)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink - top).exp()
    weights = weights.view(num_seqs, num_kv_heads, num_queries * group, num_keys)
    mixed = (weights @ values.to(acc)).view(num_seqs, num_kv_heads, num_queries, group, values.shape[3])
    mixed = mixed / total.clamp(min=torch.finfo(acc).tiny)
    return mixed.transpose(1, 2).reshape(num_seqs, num_queries, num_heads, values.shape[3]).to(query.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    wide = x.to(_acc_dtype(x))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)``; the sum is rounded to ``x.dtype`` before the norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, where gate and up are the halves of the last dimension."""
    gate, up = gate_up.to(_acc_dtype(gate_up)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
