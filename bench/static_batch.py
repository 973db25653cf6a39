"""StaticBatch: the ways of generating that paging replaced, on the very kernels that the engine uses.

Owns the baselines ``recompute``, ``reserve`` and ``static``: batches are formed in order of arrival and stay together
until their longest answer is done, as ``generate()`` does it; rows that have ended are computed on until then. Only the
use of memory and the order of work differ from the engine, so that a comparison shows those and nothing else. Knows no
queue and no scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from kvq.engine.config import EngineConfig
from kvq.engine.kv_store import KVStore
from kvq.engine.model import Model
from kvq.engine.request import SamplingParams
from kvq.engine.runner import Runner
from kvq.engine.sampler import Sampler
from kvq.engine.step import SampleSpec, ScheduledSequence, StepPlan

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_BLOCK_SIZE = 16


class Memory(StrEnum):
    """How a static batch keeps K and V."""

    NONE = "recompute"  # not at all: every step computes every sequence from its beginning
    RESERVED = "reserve"  # one contiguous stretch of the longest possible length for each sequence
    GROWING = "static"  # one tensor, as long as the longest sequence of the batch


@dataclass(slots=True)
class Measured:
    """What a strategy did."""

    output_tokens: int = 0
    wall_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    utilisations: list[float] = field(default_factory=list)  # per step: KV tokens written / KV tokens held

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def utilisation(self) -> float | None:
        return sum(self.utilisations) / len(self.utilisations) if self.utilisations else None


@dataclass(slots=True)
class _Row:
    seq_id: int
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    block_table: list[int]

    @property
    def ended(self) -> bool:
        return len(self.token_ids) >= self.num_prompt + self.max_tokens

    def needs(self, *, from_start: bool) -> ScheduledSequence:
        start = 0 if from_start else len(self.token_ids) - 1
        spec = SampleSpec(
            params=_GREEDY,
            seed=0,
            index=0,
            position=len(self.token_ids),
            token_ids=self.token_ids,
            num_prompt=self.num_prompt,
        )
        return ScheduledSequence(
            seq_id=self.seq_id,
            token_ids=self.token_ids[start:],
            start=start,
            block_table=self.block_table,
            samples=(spec,),
        )


class StaticBatch:
    """A model that answers batch after batch.

    Args:
        config: the model, its type and device; cache settings are not used.
        batch_size: sequences of a batch.
        max_len: the longest possible sequence, prompt and answer.
        reserved_len: what ``reserve`` holds for each sequence, when its use is reckoned; by default ``max_len``.
    """

    def __init__(self, config: EngineConfig, *, batch_size: int, max_len: int, reserved_len: int | None = None) -> None:
        device = torch.device("cuda" if config.device == "cuda" else "cpu")
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        model = Model.load(config, device=device, dtype=dtype)
        self._batch_size = batch_size
        self._reserved_len = reserved_len or max_len
        self._blocks_per_row = -(-max_len // _BLOCK_SIZE)
        store = KVStore(
            model.layers,
            num_blocks=batch_size * self._blocks_per_row,
            block_size=_BLOCK_SIZE,
            dtype=dtype,
            device=device,
        )
        self._runner = Runner(model=model, store=store, sampler=Sampler(()), device=device)

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], memory: Memory, *, run_every: int = 1
    ) -> Measured:
        """Answer all prompts.

        ``run_every``: run one decode step in so many and let it stand for its neighbours, for a strategy too slow to be
        run in full; the tokens of the others are taken as the prompt's.
        """
        measured = Measured()
        for first in range(0, len(prompts), self._batch_size):
            rows = [
                _Row(
                    seq_id=place,
                    token_ids=list(prompts[first + place]),
                    num_prompt=len(prompts[first + place]),
                    max_tokens=max_tokens[first + place],
                    block_table=list(range(place * self._blocks_per_row, (place + 1) * self._blocks_per_row)),
                )
                for place in range(min(self._batch_size, len(prompts) - first))
            ]
            self._run_batch(rows, memory, run_every, measured)
            measured.output_tokens += sum(row.max_tokens for row in rows)
        return measured

    def _run_batch(self, rows: list[_Row], memory: Memory, run_every: int, measured: Measured) -> None:
        prefill = True
        step_no = 0
        while not all(row.ended for row in rows):
            from_start = prefill or memory is Memory.NONE
            if prefill or step_no % run_every == 0:
                step_s = self._step(rows, from_start=from_start)
            else:
                for row in rows:
                    row.token_ids.append(row.token_ids[step_no % row.num_prompt])
            measured.step_s.append(step_s)
            measured.wall_s += step_s
            if memory is not Memory.NONE:
                measured.utilisations.append(self._utilisation(rows, memory))
            prefill = False
            step_no += 1

    def _step(self, rows: list[_Row], *, from_start: bool) -> float:
        begin = time.perf_counter()
        entries = tuple(row.needs(from_start=from_start) for row in rows)
        num_decodes = 0 if from_start else len(rows)
        result = self._runner.run(StepPlan(sequences=entries, num_decodes=num_decodes, copies=()))
        for row in rows:
            row.token_ids.append(result.tokens_by_seq[row.seq_id][0].token_id)
        return time.perf_counter() - begin

    def _utilisation(self, rows: list[_Row], memory: Memory) -> float:
        # What a row was asked for; what is computed past its end is of no use to anybody.
        in_use = sum(min(len(row.token_ids), row.num_prompt + row.max_tokens) - 1 for row in rows)
        longest = max(len(row.token_ids) - 1 for row in rows)
        held = len(rows) * (self._reserved_len if memory is Memory.RESERVED else longest)
        return in_use / held
