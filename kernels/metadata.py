"""Where the tokens of one step lie: which sequence each belongs to and which cache slots they use.

Owns the description that every attention call of a step shares. Knows tensors, not requests: the engine
builds one ``AttentionMetadata`` per step and hands it to all layers. Invariant: the first ``num_decodes``
sequences have exactly one query token each, so query row ``s`` belongs to sequence ``s`` there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step's flat token batch. All tensors lie on the device of the KV cache.

    Query token ``j`` of sequence ``s`` stands at absolute position ``seq_lens[s] - query_len[s] + j`` and
    sees the keys at positions up to its own (and within the sliding window, where a layer has one).

    A sequence with ``seq_lens[s] == 0`` is padding (a CUDA graph's empty row): it sees no key and its
    output is zero. Entries of ``block_tables`` past a sequence's last block are never followed.

    The decode sequences may be arranged in prefix groups: group ``g`` is the decode sequences
    ``group_start_loc[g] .. group_start_loc[g + 1]``, whose block tables agree in the first
    ``group_prefix_len[g]`` tokens. Grouping changes the cost of an attention call, never its result.
    """

    num_seqs: int
    query_start_loc: torch.Tensor  # int32 [S + 1], cumulative query tokens
    seq_lens: torch.Tensor  # int32 [S], context including this step's tokens
    block_tables: torch.Tensor  # int32 [S, max_blocks]
    slot_mapping: torch.Tensor  # int64 [T], block_id * block_size + offset of each token written
    max_query_len: int
    max_seq_len: int
    block_size: int
    num_decodes: int

    group_start_loc: torch.Tensor | None = None  # int32 [G + 1], covers 0 .. num_decodes
    group_prefix_len: torch.Tensor | None = None  # int32 [G], tokens; a multiple of block_size; 0: nothing shared
    # Sizes of the launches, if the host knows them: the largest group_prefix_len; the most tokens of a decode sequence
    # behind its group's prefix.
    max_prefix_len: int | None = None
    max_suffix_len: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def has_groups(self) -> bool:
        return self.group_start_loc is not None and self.group_prefix_len is not None
