"""StepGraphs: forward passes of a few fixed shapes, captured once and replayed for the steps that fit them.

Owns the shapes (buckets), the padding of a step to one of them, and the static tensors a captured pass reads. Knows
nothing of scheduling or sampling. Invariant: a padded pass gives each real row what the step itself would; padding rows
belong to no sequence, and write their KV to a block that no sequence holds.

A launch costs the host microseconds, and a pass has hundreds: below some hundred rows the host cannot keep up with the
GPU. A CUDA graph launches them all at once. It fixes every shape and every number the host passes to a kernel, so grids
are sized for the bucket: more sequences, a longer context, more shared prefixes than the step has. Steps with what
cannot be padded (copied blocks, adapters, scored prompts, embeddings, long prompts) run as they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from kvq.engine.inputs import StepInputs
from kvq.engine.prefix_groups import MOST_GROUPS
from kvq.kernels.attention_config import DECODE_SPLIT_LEN
from kvq.kernels.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

Forward = Callable[[StepInputs], torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]

_DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MIXED_DECODES = (8, 32, 128)
_PREFILL_TOKENS = (64, 256)
_PREFILLS = 8
# Shared prefixes there is room for, by the decodes from which on it is worth it (a group has four): one less is for
# padding, one for the decodes that share nothing.
_FROM_DECODES_BY_GROUPS = {8: 4, MOST_GROUPS + 2: 32}
_SHORTEST_CONTEXT = 2048
# Parts of all decodes' contexts that a pass has room for: with 32 heads of 128 a quarter of a GiB of partial results.
# Beyond, a step is long, and launching it kernel by kernel does not hold it up.
_MOST_PARTS = 1 << 14
_CONTEXT_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The shape of one captured pass: the most it takes of everything."""

    num_decodes: int
    num_prefills: int
    num_prefill_tokens: int
    num_groups: int  # of shared prefixes; 0: every sequence is attended alone
    context: int  # tokens of the longest sequence

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_prefills

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    def fits(self, inputs: StepInputs) -> bool:
        """True where the step can be padded to this shape."""
        metadata = inputs.metadata
        num_groups = 0 if metadata.group_prefix_len is None else len(metadata.group_prefix_len)
        num_prefills = metadata.num_seqs - metadata.num_decodes
        # Without groups a grouped step is right as well, but slower; padding rows are a group of their own.
        return (
            metadata.num_decodes <= self.num_decodes
            and num_prefills <= self.num_prefills
            and metadata.num_tokens - metadata.num_decodes <= self.num_prefill_tokens
            and (num_groups > 0) == (self.num_groups > 0)
            and num_groups < max(1, self.num_groups)
            and metadata.max_seq_len <= self.context
        )


def buckets(*, max_num_seqs: int, max_model_len: int, grouped: bool) -> list[Bucket]:
    """All shapes worth capturing, the smallest that fits a step first; ``grouped``: also with shared prefixes."""
    contexts = []
    context = _SHORTEST_CONTEXT
    while context < max_model_len:
        contexts.append(context)
        context *= _CONTEXT_STEP
    contexts.append(max_model_len)
    sizes = [n for n in _DECODES if n < max_num_seqs]
    sizes.append(min(max_num_seqs, _DECODES[-1]))
    found = [
        Bucket(num_decodes=n, num_prefills=0, num_prefill_tokens=0, num_groups=groups, context=context)
        for n in sizes
        for context in contexts
        if n * -(-context // DECODE_SPLIT_LEN) <= _MOST_PARTS
        for groups in _group_rooms(n, grouped=grouped)
    ]
    return found + [
        Bucket(num_decodes=n, num_prefills=_PREFILLS, num_prefill_tokens=tokens, num_groups=groups, context=contexts[0])
        for n in _MIXED_DECODES
        if n <= max_num_seqs
        for tokens in _PREFILL_TOKENS
        for groups in _group_rooms(n, grouped=grouped)
    ]


def _group_rooms(num_decodes: int, *, grouped: bool) -> list[int]:
    rooms = [groups for groups, least in _FROM_DECODES_BY_GROUPS.items() if grouped and num_decodes >= least]
    return [0, *rooms]


@torch.inference_mode()
def capture_steps(
    forward: Forward,
    *,
    max_num_seqs: int,
    max_model_len: int,
    grouped: bool,
    block_size: int,
    padding_block: int,
    device: torch.device,
) -> StepGraphs | None:
    """All graphs of an engine on a GPU; None, and the reason in the log, where the network cannot be captured."""
    shapes = buckets(max_num_seqs=max_num_seqs, max_model_len=max_model_len, grouped=grouped)
    begin = time.perf_counter()
    try:
        graphs = StepGraphs(
            forward,
            shapes=shapes,
            block_size=block_size,
            padding_block=padding_block,
            capture=capture_on_gpu(),
            device=device,
        )
    except RuntimeError as err:
        logger.warning("no CUDA graphs, steps run eagerly: this network cannot be captured: %s", err)
        return None
    logger.info("captured %d CUDA graphs in %.1f s", len(shapes), time.perf_counter() - begin)
    return graphs


class StepGraphs:
    """Captured passes by bucket.

    Args:
        forward: a forward pass, inputs to logits [R, V]; run only on inputs of this object's own making.
        shapes: the buckets, in the order in which they are tried.
        block_size: tokens per KV block.
        padding_block: the block that padding rows write to.
        capture: makes what a call does repeatable on changed static inputs; ``capture_on_gpu``, or the call itself.
        device: where the static inputs lie.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        shapes: list[Bucket],
        block_size: int,
        padding_block: int,
        capture: Capture,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._block_size = block_size
        self._padding_slot = padding_block * block_size
        # One for all passes: what each held of its own would be a gigabyte of logits with a large vocabulary.
        self._logits: torch.Tensor | None = None
        self._most_rows = max(bucket.num_seqs for bucket in shapes)
        self.num_replays = 0
        self._passes: list[tuple[Bucket, StepInputs, Replay]] = []
        # The largest first: the others reuse its memory.
        for bucket in sorted(shapes, key=lambda b: b.num_tokens, reverse=True):
            inputs = self._static_inputs(bucket, device)
            self._passes.append((bucket, inputs, capture(partial(self._run, inputs))))
        self._passes.sort(key=lambda p: shapes.index(p[0]))

    def forward(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits [R, V] of the step, valid until the next call; None where no captured shape fits it."""
        if inputs.copies or inputs.adapter_rows or inputs.scores or inputs.pooled_rows is not None:
            return None
        if len(inputs.logits_rows) > inputs.metadata.num_seqs:  # guesses are verified
            return None
        for bucket, static, replay in self._passes:
            if bucket.fits(inputs):
                self._fill(bucket, static, inputs)
                self.num_replays += 1
                replay()
                assert self._logits is not None
                return self._logits[: len(inputs.logits_rows)]
        return None

    def _run(self, inputs: StepInputs) -> None:
        """A pass over static inputs; its logits are the first rows of the buffer that all passes share."""
        logits = self._forward(inputs)
        if self._logits is None:
            self._logits = logits.new_empty(self._most_rows, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def _static_inputs(self, bucket: Bucket, device: torch.device) -> StepInputs:
        """A step of padding alone."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        starts = torch.arange(bucket.num_seqs + 1, device=device).clamp(max=bucket.num_decodes)
        groups = torch.full((bucket.num_groups + 1,), bucket.num_decodes, dtype=torch.int32, device=device)
        groups[0] = 0
        metadata = AttentionMetadata(
            num_seqs=bucket.num_seqs,
            query_start_loc=starts.int(),
            seq_lens=zeros(bucket.num_seqs),
            block_tables=zeros(bucket.num_seqs, -(-bucket.context // self._block_size)),
            slot_mapping=zeros(bucket.num_tokens, dtype=torch.int64) + self._padding_slot,
            max_query_len=max(1, bucket.num_prefill_tokens),
            max_seq_len=bucket.context,
            block_size=self._block_size,
            num_decodes=bucket.num_decodes,
            group_start_loc=groups if bucket.num_groups else None,
            group_prefix_len=zeros(bucket.num_groups) if bucket.num_groups else None,
            max_prefix_len=bucket.context if bucket.num_groups else None,
        )
        return StepInputs(
            input_ids=zeros(1, bucket.num_tokens, dtype=torch.int64),
            position_ids=zeros(1, bucket.num_tokens, dtype=torch.int64),
            metadata=metadata,
            copies=(),
            logits_rows=zeros(bucket.num_seqs, dtype=torch.int64),
            samples=(),
        )

    def _fill(self, bucket: Bucket, static: StepInputs, inputs: StepInputs) -> None:
        """Write a step into the static tensors: decodes, padding, prompts, padding. Nothing here waits for the GPU."""
        source, target = inputs.metadata, static.metadata
        decodes, tokens = source.num_decodes, source.num_tokens - source.num_decodes
        prefills, shift = source.num_seqs - decodes, bucket.num_decodes - decodes
        first = bucket.num_decodes

        def place(rows: torch.Tensor, into: torch.Tensor, filler: int, second: int) -> None:
            """``rows``: of the decodes, then ``second`` of the prompts."""
            into.fill_(filler)
            into[:decodes].copy_(rows[:decodes])
            into[first : first + second].copy_(rows[decodes:])

        place(inputs.input_ids[0], static.input_ids[0], 0, tokens)
        place(inputs.position_ids[0], static.position_ids[0], 0, tokens)
        place(source.slot_mapping, target.slot_mapping, self._padding_slot, tokens)
        place(source.seq_lens, target.seq_lens, 0, prefills)
        width = min(source.block_tables.shape[1], target.block_tables.shape[1])
        target.block_tables[:decodes, :width].copy_(source.block_tables[:decodes, :width])
        target.block_tables[first : first + prefills, :width].copy_(source.block_tables[decodes:, :width])
        if bucket.num_prefills:
            prefill_starts = source.query_start_loc[decodes:] + shift
            target.query_start_loc[first:].copy_(prefill_starts[-1:].expand(bucket.num_prefills + 1))
            target.query_start_loc[first : first + prefills + 1].copy_(prefill_starts)
        wanted = len(inputs.logits_rows)
        moved = torch.where(inputs.logits_rows < decodes, inputs.logits_rows, inputs.logits_rows + shift)
        static.logits_rows[:wanted].copy_(moved)
        if target.group_start_loc is not None and target.group_prefix_len is not None:
            assert source.group_start_loc is not None
            assert source.group_prefix_len is not None
            num_groups = len(source.group_prefix_len)
            target.group_start_loc.fill_(bucket.num_decodes)
            target.group_start_loc[: num_groups + 1].copy_(source.group_start_loc)
            target.group_prefix_len.zero_()
            target.group_prefix_len[:num_groups].copy_(source.group_prefix_len)


def capture_on_gpu() -> Capture:
    """Captures CUDA graphs that share one memory pool, after a run that compiles the kernels and fills the caches."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(call: Callable[[], None]) -> Replay:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            with _refusing_to_wait():
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do with the GPU meanwhile is their own affair.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            call()
        replay: Replay = graph.replay
        return replay

    return capture


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """RuntimeError where the host waits for the GPU: said here, before a capture is broken by it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
