"""Scheduler: what the next step computes.

Owns the rules between the running sequences, and joins the parts: batch.py (who is in flight), admission.py (who
enters), booking.py (what a step meant). Knows nothing of tensors.
Invariants: a step never exceeds the token budget or the sequence limit; the oldest running sequence is never
preempted for another, so some sequence always ends and every request does.
Source: iteration-level scheduling, Orca (OSDI 2022, section 3.1); chunked prefill with decodes first, Sarathi-Serve
(OSDI 2024, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable

from kvq.engine.admission import Admission
from kvq.engine.assembly import scheduled
from kvq.engine.batch import Batch, SchedulerCounters, SchedulerLimits
from kvq.engine.booking import Booking, StopCheck
from kvq.engine.cache_manager import CacheManager
from kvq.engine.lengths import OutputLengths
from kvq.engine.planner import Planner, PrefixPlanner
from kvq.engine.preemption import PreemptedSequences
from kvq.engine.preemption_watch import PreemptionCost
from kvq.engine.request import FinishReason, Request
from kvq.engine.sequence import RequestState, Sequence
from kvq.engine.speculation import Speculator
from kvq.engine.step import StepPlan, StepResult
from kvq.engine.swap_space import SwapSpace

# Prompt tokens scored in one step: rows of logits that are held at once, 128 MiB with a vocabulary of 128k.
MAX_SCORED_TOKENS = 256


class Scheduler:
    """Plans steps and books their results.

    Args:
        limits: bounds of a step.
        cache: the blocks.
        stop_check: called after each new token; sets ``finish_reason`` on the sequence when it ends there.
        clock: monotonic seconds.
        planner: order of admission; by default the one that shares prefixes.
        swap_space: host memory for preempted sequences; by default none.
        lengths: what is known of the lengths of answers; by default nothing yet.
        speculator: guesses tokens ahead; by default none are guessed.
    """

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        cache: CacheManager,
        stop_check: StopCheck,
        clock: Callable[[], float],
        planner: Planner | None = None,
        swap_space: SwapSpace | None = None,
        lengths: OutputLengths | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.preempted = PreemptedSequences(cache, SwapSpace(0, 0.0) if swap_space is None else swap_space)
        self.batch = Batch(limits=limits, cache=cache, preempted=self.preempted)
        self._clock = clock
        self._lengths = OutputLengths() if lengths is None else lengths
        self._speculator = speculator
        self._admission = Admission(
            self.batch,
            planner=PrefixPlanner() if planner is None else planner,
            lengths=self._lengths,
            clock=clock,
        )
        self._booking = Booking(self.batch, stop_check=stop_check, lengths=self._lengths, speculator=speculator)
        self._score_room = MAX_SCORED_TOKENS  # prompt tokens that may still be scored in the step being planned

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since the start."""
        return self.batch.counters

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self.batch.running)

    @property
    def num_waiting(self) -> int:
        """Requests and preempted sequences not in the batch."""
        return self._admission.num_waiting

    @property
    def has_unfinished(self) -> bool:
        """True while any request is in flight."""
        return bool(self.batch.states)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens guessed since the start."""
        return 0 if self._speculator is None else self._speculator.num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Guesses that were right."""
        return 0 if self._speculator is None else self._speculator.num_accepted_tokens

    def add(self, request: Request, seed: int) -> None:
        """Put a request among the waiting ones."""
        self._admission.add(request, seed)

    def abort(self, request_id: str) -> RequestState | None:
        """Take a request out wherever it is; None if it is not in flight."""
        state = self.batch.states.pop(request_id, None)
        if state is None:
            return None
        self._admission.remove(request_id)
        for seq in state.sequences:
            if seq.finish_reason is None:
                seq.finish_reason = FinishReason.ABORT
                self.cache.release(seq)
            self.batch.running.pop(seq.seq_id, None)
            if self._speculator is not None:
                self._speculator.forget(seq.seq_id)
        self.preempted.forget(state)
        state.num_open = 0
        return state

    # -- planning ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, once all those before it are booked; None when nothing is in flight."""
        plan = self._plan()
        assert plan is not None or not self.batch.running, "running sequences, but none could be scheduled"
        return plan

    def plan_ahead(self, running: StepPlan) -> StepPlan | None:
        """The step after ``running``, whose tokens are not known yet; None where it has to wait for them.

        The sequences that draw a token now take it from the device. What it is changes nothing of this plan but that:
        a sequence that turns out to have ended is computed in vain for one step, and booked no more. Waited for are
        steps with a row that needs its tokens on the host (see ``ScheduledSequence.is_foreseeable``), guesses, and
        memory too short for all, since a sequence that is preempted must know its tokens.
        """
        if not running.is_foreseeable or self._speculator is not None or not self._all_can_grow():
            return None
        return self._plan()

    def _all_can_grow(self) -> bool:
        """True where all running sequences get their blocks without preempting any."""
        most = self.limits.max_num_batched_tokens
        needed = sum(self.cache.num_blocks_to_extend(s, min(s.num_remaining, most)) for s in self._going_on())
        return needed <= self.cache.pool.num_free

    def _going_on(self) -> list[Sequence]:
        """The running sequences but for those whose last token is being drawn, whatever it is."""
        return [
            seq
            for seq in self.batch.running.values()
            if not seq.num_pending
            or (
                seq.num_output + seq.num_pending != seq.state.request.params.max_tokens
                and seq.num_tokens < self.limits.max_model_len
            )
        ]

    def _plan(self) -> StepPlan | None:
        budget = self.limits.max_num_batched_tokens
        self._score_room = MAX_SCORED_TOKENS
        taken: dict[int, int] = {}  # seq_id -> tokens scheduled
        running = self._going_on()
        # Decodes first: each gives an output token for one row of the batch.
        ordered = [s for s in running if s.num_remaining == 1] + [s for s in running if s.num_remaining > 1]
        for seq in ordered:
            if budget == 0:
                break
            if seq.seq_id not in self.batch.running:  # preempted for one before it
                continue
            num_tokens = self._chunk(seq, budget)
            if num_tokens == 0:
                continue
            if self._make_room(seq, num_tokens, taken):
                self._schedule(seq, num_tokens, taken)
                budget -= num_tokens
        while budget > 0 and (admitted := self._admission.next(self._score_room)) is not None:
            num_tokens = self._chunk(admitted, budget)
            extended = self.cache.extend(admitted, num_tokens)
            assert extended, "admission checked that the blocks are there"
            self._schedule(admitted, num_tokens, taken)
            budget -= num_tokens
        if not taken:
            return None
        self._note_usage(taken)
        return self._build_plan(taken, self._guess(taken, budget))

    def _note_usage(self, taken: dict[int, int]) -> None:
        """Remember how full the cache was, and of its blocks how much, in the steps in which it was fullest."""
        counters, usage = self.counters, self.cache.usage
        if usage < counters.kv_usage_peak:
            return
        if usage > counters.kv_usage_peak:
            counters.kv_usage_peak, counters.kv_slots_allocated, counters.kv_slots_used = usage, 0, 0
        running = self.batch.running.values()
        used = self.cache.num_used_slots((s, s.num_computed + taken.get(s.seq_id, 0)) for s in running)
        counters.kv_slots_allocated += self.cache.pool.num_referenced * self.cache.block_size
        counters.kv_slots_used += used

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens of ``seq`` to compute; prompts that are scored share a bound, since each row needs all its logits."""
        num_tokens = min(seq.num_remaining, budget)
        return min(num_tokens, self._score_room) if seq.state.wants_scores else num_tokens

    def _schedule(self, seq: Sequence, num_tokens: int, taken: dict[int, int]) -> None:
        if seq.state.wants_scores:
            self._score_room -= num_tokens
        self.cache.publish(seq, seq.num_computed + num_tokens)
        taken[seq.seq_id] = num_tokens

    def _make_room(self, seq: Sequence, num_tokens: int, taken: dict[int, int]) -> bool:
        """Blocks for ``seq``, preempting the least deserving that is not yet in this step; False if it is ``seq``."""
        running = self.batch.running
        while not self.cache.extend(seq, num_tokens):
            victims = [s for s in running.values() if s.seq_id not in taken]
            victim = max(victims, key=lambda s: (s.state.request.priority, s.admission))
            for other in running.values():
                self._lengths.outlive(other.state.beginnings, other.num_output)
            self.preempted.swap_out(victim, num_left=len(running) - 1)
            self.batch.preempt(victim)
            if victim is seq:
                return False
        return True

    def _guess(self, taken: dict[int, int], budget: int) -> dict[int, list[int]]:
        """Guesses by sequence id for a step that only decodes, as far as there are blocks that nobody holds."""
        if self._speculator is None or any(num_tokens != 1 for num_tokens in taken.values()):
            return {}
        guesses = self._speculator.draft([self.batch.running[seq_id] for seq_id in taken], num_tokens=budget)
        return {
            seq_id: tokens
            for seq_id, tokens in guesses.items()
            if self.cache.reserve(self.batch.running[seq_id], 1 + len(tokens))
        }

    def _build_plan(self, taken: dict[int, int], guesses: dict[int, list[int]]) -> StepPlan:
        decodes_first = sorted(taken, key=lambda seq_id: taken[seq_id] != 1 or seq_id in guesses)
        swap_outs, swap_ins = self.preempted.take_moves()
        sequences = tuple(
            scheduled(self.batch.running[seq_id], taken[seq_id], guesses.get(seq_id, [])) for seq_id in decodes_first
        )
        for entry in sequences:
            seq = self.batch.running[entry.seq_id]
            seq.num_computed += taken[entry.seq_id]
            seq.num_pending += bool(entry.samples)
        return StepPlan(
            sequences=sequences,
            num_decodes=sum(1 for seq_id, num_tokens in taken.items() if num_tokens == 1 and seq_id not in guesses),
            copies=self.cache.take_copies(),
            swap_outs=swap_outs,
            swap_ins=swap_ins,
        )

    # -- results ----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestState]:
        """Book a step's tokens; returns the requests that finished, which are in flight no more."""
        self.cache.end_step()
        self.preempted.end_step()
        self.counters.steps += 1
        return self._booking.book(plan, result, self._clock())

    def record_duration(self, plan: StepPlan, seconds: float) -> PreemptionCost:
        """How long the step took, from which the cost of computing tokens again is known; what preempting cost it."""
        self.preempted.record_duration(plan.num_tokens, seconds)
        if self._speculator is not None:
            self._speculator.record_step(plan, seconds)
        return self.preempted.cost(len(plan.swap_outs) + len(plan.swap_ins))

    def rollback(self, *plans: StepPlan) -> None:
        """All the steps that run failed: their sequences lose their blocks and are computed again later."""
        planned = {entry.seq_id for plan in plans for entry in plan.sequences}
        for seq in [s for s in self.batch.running.values() if s.seq_id in planned]:
            seq.num_pending = 0
            self.batch.preempt(seq)
        self.cache.undo_steps()
        self.preempted.undo_step()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree."""
        self.batch.check_integrity()
