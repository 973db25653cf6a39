"""StepInputs: a StepPlan as tensors.

Owns the conversion and nothing else. Shapes: T tokens, S sequences, R rows whose logits are
wanted: the sampled ones, then the scored ones; P rows whose hidden states are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvq.engine.drawn_tokens import DrawnTokens
from kvq.engine.prefix_groups import PrefixGroups, group_decodes
from kvq.engine.staging import to_device
from kvq.engine.step import SampleSpec, ScheduledSequence, ScoreSpec, StepPlan
from kvq.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What one forward pass reads."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    metadata: AttentionMetadata
    copies: tuple[tuple[int, int, int], ...]  # (src block, dst block, tokens), in order
    logits_rows: torch.Tensor  # int64 [R], flat token index of each row
    samples: tuple[
        tuple[int, tuple[SampleSpec, ...]], ...
    ]  # (seq_id, draws) for each sampled row, a sequence's in order
    scores: tuple[tuple[int, ScoreSpec], ...] = ()  # (seq_id, targets): one row per target, in order
    pooled: tuple[tuple[int, int], ...] = ()  # (seq_id, rows): runs of hidden states to sum
    pooled_rows: torch.Tensor | None = None  # int64 [P]; None where P is 0
    adapter_rows: tuple[tuple[str, torch.Tensor], ...] = ()  # LoRA adapters, int64 flat token indices of each


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What one forward pass gives: logits [R, V], and the hidden states [P, D] behind the final norm."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


def build_inputs(
    plan: StepPlan,
    *,
    block_size: int,
    device: torch.device,
    group_prefixes: bool = False,
    drawn: DrawnTokens | None = None,
) -> StepInputs:
    """Lay the plan's tokens flat, sequence after sequence.

    ``group_prefixes``: decodes that share blocks together. ``drawn``: tokens of the step before, for those awaited.
    """
    groups: PrefixGroups | None = None
    if group_prefixes:
        plan, groups = group_decodes(plan, block_size)
    lens = np.array([len(s.token_ids) for s in plan.sequences], dtype=np.int32)
    starts = np.array([s.start for s in plan.sequences], dtype=np.int32)
    query_start_loc = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=query_start_loc[1:])
    seq_of_token = np.repeat(np.arange(len(lens)), lens)
    positions = np.arange(query_start_loc[-1]) - query_start_loc[seq_of_token] + starts[seq_of_token]
    max_blocks = max(len(s.block_table) for s in plan.sequences)
    block_tables = np.zeros((len(lens), max_blocks), dtype=np.int32)
    for row, seq in enumerate(plan.sequences):
        block_tables[row, : len(seq.block_table)] = seq.block_table
    blocks = block_tables[seq_of_token, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    seq_lens = starts + lens
    metadata = AttentionMetadata(
        num_seqs=len(lens),
        query_start_loc=to_device(query_start_loc, device),
        seq_lens=to_device(seq_lens, device),
        block_tables=to_device(block_tables, device),
        slot_mapping=to_device(slots, device),
        max_query_len=int(lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_size=block_size,
        num_decodes=plan.num_decodes,
        group_start_loc=None if groups is None else to_device(np.array(groups.starts, dtype=np.int32), device),
        group_prefix_len=None if groups is None else to_device(np.array(groups.prefix_lens, dtype=np.int32), device),
        max_prefix_len=None if groups is None else max(groups.prefix_lens),
        max_suffix_len=None if groups is None else _longest_suffix(groups, seq_lens),
    )
    flat = [token for seq in plan.sequences for token in seq.token_ids]
    ends = query_start_loc[1:].tolist()
    sampled = [draw for seq, end in zip(plan.sequences, ends, strict=True) for draw in _draws(seq, end - 1)]
    scored = [(row, seq.score) for row, seq in enumerate(plan.sequences) if seq.score is not None]
    wanted = [np.array([row for row, _ in sampled], dtype=np.int64)]
    for row, score in scored:
        first = int(query_start_loc[row]) + score.offset
        wanted.append(np.arange(first, first + len(score.target_ids), dtype=np.int64))
    input_ids = to_device(np.array(flat, dtype=np.int64), device)
    if drawn is not None:
        _fill_in(input_ids, plan, query_start_loc, drawn)
    return StepInputs(
        input_ids=input_ids[None],
        position_ids=to_device(positions.astype(np.int64), device)[None],
        metadata=metadata,
        copies=tuple((c.src, c.dst, c.num_tokens) for c in plan.copies),
        logits_rows=to_device(np.concatenate(wanted), device),
        samples=tuple(draws for _, draws in sampled),
        scores=tuple((plan.sequences[row].seq_id, score) for row, score in scored),
        pooled=tuple((seq.seq_id, seq.num_pooled) for seq in plan.sequences if seq.num_pooled),
        pooled_rows=_pooled_rows(plan, query_start_loc, device),
        adapter_rows=_adapter_rows(plan, seq_of_token, device),
    )


def _longest_suffix(groups: PrefixGroups, seq_lens: np.ndarray) -> int:
    """The most tokens of a decode behind its group's prefix."""
    prefix_lens = np.repeat(groups.prefix_lens, np.diff(groups.starts))
    return int((seq_lens[: len(prefix_lens)] - prefix_lens).max())


def _fill_in(input_ids: torch.Tensor, plan: StepPlan, query_start_loc: np.ndarray, drawn: DrawnTokens) -> None:
    """Write the awaited tokens into ``input_ids`` [T], on the device."""
    awaited = [row for row, seq in enumerate(plan.sequences) if seq.awaits_token]
    if awaited:
        places = query_start_loc[awaited].astype(np.int64)
        sources = np.array([drawn.row_by_seq[plan.sequences[row].seq_id] for row in awaited], dtype=np.int64)
        token_ids = drawn.token_ids.index_select(0, to_device(sources, input_ids.device))
        input_ids.index_copy_(0, to_device(places, input_ids.device), token_ids)


def _pooled_rows(plan: StepPlan, query_start_loc: np.ndarray, device: torch.device) -> torch.Tensor | None:
    rows = [
        np.arange(end - seq.num_pooled, end, dtype=np.int64)
        for seq, end in zip(plan.sequences, query_start_loc[1:], strict=True)
        if seq.num_pooled
    ]
    return to_device(np.concatenate(rows), device) if rows else None


def _adapter_rows(
    plan: StepPlan, seq_of_token: np.ndarray, device: torch.device
) -> tuple[tuple[str, torch.Tensor], ...]:
    seqs_by_lora: dict[str, list[int]] = {}
    for row, seq in enumerate(plan.sequences):
        if seq.lora is not None:
            seqs_by_lora.setdefault(seq.lora, []).append(row)
    return tuple(
        (lora, to_device(np.flatnonzero(np.isin(seq_of_token, seqs)), device)) for lora, seqs in seqs_by_lora.items()
    )


def _draws(seq: ScheduledSequence, last: int) -> list[tuple[int, tuple[int, tuple[SampleSpec, ...]]]]:
    """(flat token index, (seq_id, draws)) of each row that ``seq``, whose last token is at ``last``, draws from."""
    if not seq.samples:
        return []
    if not seq.num_drafts:
        return [(last, (seq.seq_id, seq.samples))]
    return [(last - seq.num_drafts + i, (seq.seq_id, (spec,))) for i, spec in enumerate(seq.samples)]
