"""Row passes: a step computed token by token, so that a token's bits depend on its own sequence and nothing else.

Owns the taking apart of a step. PyTorch and the libraries below it sum in an order that depends on how many rows are
computed together; here it is always one, with the keys of its own sequence. Tokens go in the order of their positions:
whatever one of them reads, shared blocks and copies of them included, was written by tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvq.engine.inputs import ForwardOutput, StepInputs

Forward = Callable[[StepInputs], ForwardOutput]


def forward_by_row(forward: Forward, inputs: StepInputs) -> ForwardOutput:
    """What ``forward`` gives for the whole step, by one call for each of its T tokens."""
    starts = inputs.metadata.query_start_loc.tolist()
    positions = inputs.position_ids[0].tolist()
    seq_of_token = [s for s, start in enumerate(starts[:-1]) for _ in range(start, starts[s + 1])]
    wanted = inputs.logits_rows.tolist()
    pooled = [] if inputs.pooled_rows is None else inputs.pooled_rows.tolist()
    lora_by_token = {token: lora for lora, rows in inputs.adapter_rows for token in rows.tolist()}
    logits: dict[int, torch.Tensor] = {}
    hidden: dict[int, torch.Tensor] = {}
    for token in sorted(range(len(positions)), key=positions.__getitem__):
        seq = seq_of_token[token]
        row = _row(
            inputs,
            token,
            seq,
            position=positions[token],
            takes_copies=token == starts[seq],
            wants_logits=token in wanted,
            wants_hidden=token in pooled,
            lora=lora_by_token.get(token),
        )
        output = forward(row)
        empty = output.logits[:0].clone()
        if token in wanted:
            logits[token] = output.logits.clone()
        if output.hidden is not None:
            hidden[token] = output.hidden.clone()
    return ForwardOutput(
        logits=torch.cat([logits[token] for token in wanted]) if wanted else empty,
        hidden=torch.cat([hidden[token] for token in pooled]) if pooled else None,
    )


def _row(
    inputs: StepInputs,
    token: int,
    seq: int,
    *,
    position: int,
    takes_copies: bool,
    wants_logits: bool,
    wants_hidden: bool,
    lora: str | None,
) -> StepInputs:
    """The step of one token alone; a sequence's first one makes the copies of blocks that it will read."""
    metadata, device = inputs.metadata, inputs.input_ids.device
    num_blocks = position // metadata.block_size + 1
    here = torch.zeros(1, dtype=torch.int64, device=device)
    table = metadata.block_tables[seq : seq + 1, :num_blocks].contiguous()
    return StepInputs(
        input_ids=inputs.input_ids[:, token : token + 1],
        position_ids=inputs.position_ids[:, token : token + 1],
        metadata=replace(
            metadata,
            num_seqs=1,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([position + 1], dtype=torch.int32, device=device),
            block_tables=table,
            slot_mapping=metadata.slot_mapping[token : token + 1],
            max_query_len=1,
            max_seq_len=position + 1,
            num_decodes=1,
            group_start_loc=None,
            group_prefix_len=None,
            max_prefix_len=None,
        ),
        copies=_copies(inputs.copies, table[0].tolist()) if takes_copies else (),
        logits_rows=here if wants_logits else here[:0],
        samples=(),
        pooled_rows=here if wants_hidden else None,
        adapter_rows=() if lora is None else ((lora, here),),
    )


def _copies(copies: Sequence[tuple[int, int, int]], blocks: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """All of the step's where one fills a block of the sequence: it may be a copy of a copy."""
    return tuple(copies) if {dst for _, dst, _ in copies} & set(blocks) else ()
