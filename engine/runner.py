"""Runner: runs a StepPlan on the device.

Owns the forward pass and the KV tensors. Knows plans, nothing of requests. The host waits for the device once a step,
where the sampled tokens come back: in ``RunningStep.wait``, so that it may plan and start the next step before.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvq.engine.cuda_graphs import StepGraphs
from kvq.engine.drawn_tokens import DrawnTokens
from kvq.engine.grammar import MaskWorker
from kvq.engine.inputs import ForwardOutput, StepInputs, build_inputs
from kvq.engine.kv_store import KVStore
from kvq.engine.model import Model
from kvq.engine.sampler import Sampler
from kvq.engine.step import StepPlan, StepResult
from kvq.kernels import ops
from kvq.kernels.attention_config import DECODE_SPLIT_LEN
from kvq.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step that was started: its result, or the tokens that will be all of it."""

    outcome: StepResult | DrawnTokens

    def wait(self) -> StepResult:
        """The result, once the device has computed it."""
        if isinstance(self.outcome, StepResult):
            return self.outcome
        return StepResult(tokens_by_seq=self.outcome.wait())


class Runner:
    """Model, cache tensors and sampler of one engine."""

    def __init__(
        self,
        *,
        model: Model,
        store: KVStore,
        sampler: Sampler,
        device: torch.device,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._sampler = sampler
        self._device = device
        self._masks = MaskWorker()
        self._graphs = graphs
        self._group_prefixes = model.backend.name == "ops" and ops.runs_triton_on(device)
        self._drawn: DrawnTokens | None = None  # by the step started last
        self.num_steps_by_decode_path: Counter[str] = Counter()
        self.forward_s = 0.0  # in the network; on a GPU only until it was launched

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their KV, draw the next tokens."""
        return self.start(plan).wait()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> RunningStep:
        """Have the plan computed, behind the steps that run; tokens awaited are those of the step started last.

        Nothing waits for the device where the plan is foreseeable; else all is there on return.
        """
        self._store.swap(plan.swap_outs, plan.swap_ins)
        inputs = build_inputs(
            plan,
            block_size=self._store.block_size,
            device=self._device,
            group_prefixes=self._group_prefixes,
            drawn=self._drawn,
        )
        self._drawn = None
        if plan.num_decodes:
            self.num_steps_by_decode_path[decode_path(inputs.metadata)] += 1
        masks = self._masks.start(inputs.samples)
        started_s = time.perf_counter()
        try:
            output = self._forward(inputs)
        finally:
            self.forward_s += time.perf_counter() - started_s
            mask_by_seq = masks.result()
        logits, num_sampled = output.logits, len(inputs.samples)
        if plan.is_foreseeable and num_sampled:
            self._drawn = self._sampler.start(logits[:num_sampled], inputs.samples)
            return RunningStep(self._drawn)
        pooled = [] if output.hidden is None else _sums(output.hidden, [count for _, count in inputs.pooled])
        return RunningStep(
            StepResult(
                tokens_by_seq=self._sampler.sample(logits[:num_sampled], inputs.samples, mask_by_seq),
                scores_by_seq=self._sampler.score(logits[num_sampled:], inputs.scores),
                pooled_by_seq={seq_id: total for (seq_id, _), total in zip(inputs.pooled, pooled, strict=True)},
            )
        )

    @property
    def num_graph_steps(self) -> int:
        """Steps whose forward pass was a captured graph, replayed."""
        return 0 if self._graphs is None else self._graphs.num_replays

    def _forward(self, inputs: StepInputs) -> ForwardOutput:
        """By a captured graph where one fits the step."""
        logits = None if self._graphs is None else self._graphs.forward(inputs)
        return self._model.forward(inputs, self._store) if logits is None else ForwardOutput(logits=logits)


def decode_path(metadata: AttentionMetadata) -> str:
    """How a step's decodes are attended: ``grouped`` by shared prefix, each ``split`` into parts, or ``plain``."""
    if metadata.has_groups:
        return "grouped"
    return "split" if metadata.max_seq_len > DECODE_SPLIT_LEN else "plain"


def _sums(hidden: torch.Tensor, counts: list[int]) -> list[NDArray[np.float64]]:
    """Sums [D] of successive runs of ``counts`` rows of hidden [P, D], on the CPU."""
    sums = [rows.double().sum(dim=0) for rows in torch.split(hidden, counts)]
    values: NDArray[np.float64] = torch.stack(sums).cpu().numpy()
    return list(values)
