"""Schedules: a scheduler driven without a model, with its books checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvq.engine.batch import SchedulerLimits
from kvq.engine.cache_manager import CacheManager, Window
from kvq.engine.lengths import OutputLengths
from kvq.engine.planner import ArrivalPlanner, Planner, PrefixPlanner
from kvq.engine.request import FinishReason, Request, SamplingParams
from kvq.engine.scheduler import Scheduler
from kvq.engine.sequence import Sequence
from kvq.engine.step import SampledToken, StepPlan, StepResult

TOKEN = 7


@dataclass(slots=True)
class Schedule:
    """A scheduler and what came of it: the step in which each request was first computed, and ended.

    ``lengths``: output tokens after which a request's answers end, unknown to the scheduler.
    """

    scheduler: Scheduler
    lengths: dict[str, int]
    num_steps: int = 0
    started: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 256,
        max_model_len: int = 8192,
        window: int | None = None,
        planner: Planner | None = None,
        lengths: OutputLengths | None = None,
    ) -> Schedule:
        """A schedule over a cache of ``num_blocks``."""
        seen = Window(num_tokens=window, max_step_tokens=max_num_batched_tokens) if window else None
        answer_lengths: dict[str, int] = {}

        def stop(seq: Sequence, _token: SampledToken) -> None:
            if seq.num_output >= answer_lengths[seq.state.request.request_id]:
                seq.finish_reason = FinishReason.STOP

        scheduler = Scheduler(
            limits=SchedulerLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
            ),
            cache=CacheManager(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=True, window=seen),
            stop_check=stop,
            clock=lambda: 0.0,
            planner=planner,
            lengths=lengths,
        )
        return cls(scheduler=scheduler, lengths=answer_lengths)

    def add(self, request_id: str, prompt: list[int], length: int, **params: int) -> None:
        """A request that is answered in ``length`` tokens."""
        self.lengths[request_id] = length
        request = Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))
        self.scheduler.add(request, seed=0)

    def step(self) -> StepPlan | None:
        """Plan and book one step."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.num_steps += 1
        for entry in plan.sequences:
            request_id = self.scheduler.batch.running[entry.seq_id].state.request.request_id
            if request_id not in self.started:
                self.started[request_id] = self.num_steps
                self.order.append(request_id)
        self.book(plan)
        self.scheduler.check_integrity()
        return plan

    def book(self, plan: StepPlan) -> None:
        """Book a step that was planned."""
        tokens = {
            entry.seq_id: tuple(SampledToken(token_id=TOKEN) for _ in entry.samples)
            for entry in plan.sequences
            if entry.samples
        }
        for state in self.scheduler.commit(plan, StepResult(tokens_by_seq=tokens)):
            self.ended[state.request.request_id] = self.num_steps

    def run(self, *, after_step: Callable[[StepPlan], None] = lambda plan: None) -> None:
        """Step until every request has ended and every block is free."""
        while (plan := self.step()) is not None:
            after_step(plan)
        assert set(self.ended) == set(self.lengths)
        assert not self.scheduler.has_unfinished
        assert self.scheduler.cache.pool.num_referenced == 0


PLANNERS: Mapping[str, Callable[[], Planner]] = {"prefix": PrefixPlanner, "fcfs": ArrivalPlanner}
