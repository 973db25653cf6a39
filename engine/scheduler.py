"""Scheduler: what the next step computes.

Owns the waiting, preempted and running sequences and the rules between them. Knows nothing of tensors.
Invariants: a step never exceeds the token budget or the sequence limit; the oldest running sequence is never
preempted for another, so some sequence always ends and every request does.
Source: iteration-level scheduling, Orca (OSDI 2022, section 3.1); chunked prefill with decodes first, Sarathi-Serve
(OSDI 2024, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvq.engine.assembly import scheduled
from kvq.engine.cache_manager import CacheManager
from kvq.engine.growth import Growth, peak_growth
from kvq.engine.lengths import OutputLengths
from kvq.engine.planner import Planner, PrefixPlanner, planning_ids
from kvq.engine.preemption import PreemptedSequences
from kvq.engine.preemption_watch import PreemptionCost
from kvq.engine.request import FinishReason, Request
from kvq.engine.sequence import RequestState, Sequence
from kvq.engine.speculation import Speculator
from kvq.engine.step import SampledToken, ScheduledSequence, StepPlan, StepResult
from kvq.engine.swap_space import SwapSpace

# Prompt tokens scored in one step: rows of logits that are held at once, 128 MiB with a vocabulary of 128k.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one step and of one sequence (prompt plus output)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int = 1


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    kv_usage_peak: float = 0.0
    kv_slots_allocated: int = 0  # of the blocks held by sequences, added up over the steps at the peak
    kv_slots_used: int = 0  # those of them with a token's KV


StopCheck = Callable[[Sequence, SampledToken], None]


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
        self.counters = SchedulerCounters()
        self._stop_check = stop_check
        self._clock = clock
        self._lengths = OutputLengths() if lengths is None else lengths
        self._planner = PrefixPlanner() if planner is None else planner
        self.preempted = PreemptedSequences(cache, SwapSpace(0, 0.0) if swap_space is None else swap_space)
        self._speculator = speculator
        self._states: dict[str, RequestState] = {}
        self._running: dict[int, Sequence] = {}  # by id, in order of admission
        self._next_seq_id = 0
        self._num_admissions = 0
        self._score_room = MAX_SCORED_TOKENS  # prompt tokens that may still be scored in the step being planned

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests and preempted sequences not in the batch."""
        return len(self._planner) + len(self.preempted)

    @property
    def has_unfinished(self) -> bool:
        """True while any request is in flight."""
        return bool(self._states)

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
        assert request.request_id not in self._states
        beginnings = self._lengths.beginnings(request.prompt_token_ids)
        state = RequestState(request=request, seed=seed, num_open=request.params.n, beginnings=beginnings)
        self._states[request.request_id] = state
        state.sequences.append(self._new_sequence(state, 0, list(request.prompt_token_ids)))
        self._planner.add(
            request.request_id,
            planning_ids(request.prompt_token_ids, request.lora),
            priority=request.priority,
            max_tokens=self._lengths.expect(beginnings, request.params) * request.params.n,
        )

    def abort(self, request_id: str) -> RequestState | None:
        """Take a request out wherever it is; None if it is not in flight."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        if request_id in self._planner:
            self._planner.remove(request_id)
        for seq in state.sequences:
            if seq.finish_reason is None:
                seq.finish_reason = FinishReason.ABORT
                self.cache.release(seq)
        for seq in state.sequences:
            self._running.pop(seq.seq_id, None)
            self._forget_guesses(seq)
        self.preempted.forget(state)
        state.num_open = 0
        return state

    # -- planning ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing is in flight."""
        budget = self.limits.max_num_batched_tokens
        self._score_room = MAX_SCORED_TOKENS
        taken: dict[int, int] = {}  # seq_id -> tokens scheduled
        running = list(self._running.values())
        # Decodes first: each gives an output token for one row of the batch.
        ordered = [s for s in running if s.num_remaining == 1] + [s for s in running if s.num_remaining > 1]
        for seq in ordered:
            if budget == 0:
                break
            if seq.seq_id not in self._running:  # preempted for one before it
                continue
            num_tokens = self._chunk(seq, budget)
            if num_tokens == 0:
                continue
            if self._make_room(seq, num_tokens, taken):
                self._schedule(seq, num_tokens, taken)
                budget -= num_tokens
        while budget > 0 and (admitted := self._admit_next()) is not None:
            num_tokens = self._chunk(admitted, budget)
            extended = self.cache.extend(admitted, num_tokens)
            assert extended, "admission checked that the blocks are there"
            self._schedule(admitted, num_tokens, taken)
            budget -= num_tokens
        if not taken:
            assert not self._running, "running sequences, but none could be scheduled"
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
        used = self.cache.num_used_slots((s, s.num_computed + taken.get(s.seq_id, 0)) for s in self._running.values())
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
        while not self.cache.extend(seq, num_tokens):
            victims = [s for s in self._running.values() if s.seq_id not in taken]
            victim = max(victims, key=lambda s: (s.state.request.priority, s.admission))
            for running in self._running.values():
                self._lengths.outlive(running.state.beginnings, running.num_output)
            self.preempted.swap_out(victim, num_left=len(self._running) - 1)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Give up the sequence's blocks; its tokens are kept and it goes on later where it was."""
        self.cache.release(seq)
        del self._running[seq.seq_id]
        self.preempted.add(seq)
        seq.state.preemptions += 1
        self.counters.preemptions += 1

    def _admit_next(self) -> Sequence | None:
        """Move the next waiting sequence into the batch if it fits; None if none does."""
        if len(self._running) >= self.limits.max_num_seqs:
            return None
        seq = self._next_candidate()
        if seq is None:
            return None
        num_slots = 1 if seq.num_output else seq.state.request.params.n
        if self._running and len(self._running) + num_slots > self.limits.max_num_seqs:
            return None
        if seq.state.wants_scores and self._score_room == 0:
            return None
        if not self._adapter_fits(seq.state.request.lora):
            return None
        # A prompt that is scored is computed, all of it: cached KV says nothing of its tokens' probabilities.
        match = self.cache.match([] if seq.state.needs_all_hidden_states else seq.token_ids, seq.state.request.lora)
        if self.preempted.holds_on_host(seq):
            match = replace(match, partial=None)  # the host holds the whole of that block
        room = self.cache.pool.num_free - self.cache.num_new_blocks(seq, match)
        if room < 0 and match.partial is not None:
            match = replace(match, partial=None)
            room = self.cache.pool.num_free - self.cache.num_new_blocks(seq, match)
        if room < 0 or (self._running and room < self._expected_growth(seq)):
            self.cache.touch(match)
            return None
        self.cache.admit(seq, match)
        self._book_admission(seq)
        self.preempted.swap_in(seq)
        return seq

    def _adapter_fits(self, lora: str | None) -> bool:
        """False where a step would compute with more adapters than may be ready at a time."""
        if lora is None:
            return True
        adapters = {seq.state.request.lora for seq in self._running.values()} - {None, lora}
        return len(adapters) < self.limits.max_loras

    def _next_candidate(self) -> Sequence | None:
        waiting_id = self._planner.peek()
        waiting = None if waiting_id is None else self._states[waiting_id].sequences[0]
        preempted = self.preempted.first
        if preempted is None:
            return waiting
        if waiting is not None and waiting.state.request.priority < preempted.state.request.priority:
            return waiting
        return preempted

    def _book_admission(self, seq: Sequence) -> None:
        state = seq.state
        if seq is self.preempted.first:
            self.preempted.remove_first()
        else:
            self._planner.admit(state.request.request_id)
            state.first_scheduled_s = self._clock()
            state.cached_tokens = seq.num_computed
            self.counters.prompt_tokens += seq.num_prompt
            self.counters.cached_prompt_tokens += seq.num_computed
        self._num_admissions += 1
        seq.admission = self._num_admissions
        self._running[seq.seq_id] = seq

    def _expected_growth(self, candidate: Sequence) -> int:
        """Blocks that the batch with ``candidate`` is expected to take at its peak, beyond what it then holds."""
        growths = [self._growth(seq, seq.num_held_blocks, seq.num_remaining) for seq in self._running.values()]
        num_samples = 1 if candidate.num_output else candidate.state.request.params.n
        num_given = self.cache.num_held_blocks(len(candidate.token_ids), 1)
        growths += [self._growth(candidate, num_given, 1)] * num_samples
        return peak_growth(growths, block_size=self.cache.block_size)

    def _growth(self, seq: Sequence, num_held: int, num_remaining: int) -> Growth:
        """What ``seq`` is expected to take beyond ``num_held`` blocks."""
        expected_len = self._expected_len(seq)
        return Growth(
            num_tokens=expected_len - len(seq.token_ids) + num_remaining,
            most_blocks=max(0, self.cache.num_held_blocks(expected_len, num_remaining) - num_held),
            num_own=max(0, len(seq.block_table) - max(seq.num_dropped, self.cache.num_blocks_for(seq.num_prompt))),
        )

    def _expected_len(self, seq: Sequence) -> int:
        expected = max(self._lengths.expect(seq.state.beginnings, seq.state.request.params), seq.num_output + 1)
        return min(seq.num_prompt + expected, self.limits.max_model_len)

    def _guess(self, taken: dict[int, int], budget: int) -> dict[int, list[int]]:
        """Guesses by sequence id for a step that only decodes, as far as there are blocks that nobody holds."""
        if self._speculator is None or any(num_tokens != 1 for num_tokens in taken.values()):
            return {}
        guesses = self._speculator.draft([self._running[seq_id] for seq_id in taken], num_tokens=budget)
        return {
            seq_id: tokens
            for seq_id, tokens in guesses.items()
            if self.cache.reserve(self._running[seq_id], 1 + len(tokens))
        }

    def _build_plan(self, taken: dict[int, int], guesses: dict[int, list[int]]) -> StepPlan:
        decodes_first = sorted(taken, key=lambda seq_id: taken[seq_id] != 1 or seq_id in guesses)
        swap_outs, swap_ins = self.preempted.take_moves()
        return StepPlan(
            sequences=tuple(
                scheduled(self._running[seq_id], taken[seq_id], guesses.get(seq_id, [])) for seq_id in decodes_first
            ),
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
        now = self._clock()
        for entry in plan.sequences:
            seq = self._running.get(entry.seq_id)
            if seq is None:  # aborted while the step ran
                continue
            num_prompt_computed = max(0, min(seq.num_prompt, entry.start + len(entry.token_ids)) - entry.start)
            self.counters.computed_prompt_tokens += num_prompt_computed
            seq.state.computed_tokens += num_prompt_computed
            seq.num_computed += len(entry.token_ids) - entry.num_drafts
            self.cache.drop_out_of_window(seq)
            seq.state.prompt_scores.extend(result.scores_by_seq.get(entry.seq_id, ()))
            if entry.num_pooled:
                seq.state.add_pooled(result.pooled_by_seq[entry.seq_id], entry.num_pooled)
                self._end_if_pooled(seq, now)
            if entry.num_drafts:
                self._book_verified(seq, entry, result.tokens_by_seq[entry.seq_id])
            elif entry.samples:
                self._book_tokens(seq, result.tokens_by_seq[entry.seq_id], now)
        return self._collect_finished()

    def record_duration(self, plan: StepPlan, seconds: float) -> PreemptionCost:
        """How long the step took, from which the cost of computing tokens again is known; what preempting cost it."""
        self.preempted.record_duration(plan.num_tokens, seconds)
        if self._speculator is not None:
            self._speculator.record_step(plan, seconds)
        return self.preempted.cost(len(plan.swap_outs) + len(plan.swap_ins))

    def _end_if_pooled(self, seq: Sequence, now: float) -> None:
        """A prompt that is embedded ends with its last token."""
        if seq.num_remaining == 0:
            seq.state.first_token_s = now
            seq.finish_reason = FinishReason.STOP
            seq.state.num_open -= 1

    def _book_tokens(self, seq: Sequence, tokens: tuple[SampledToken, ...], now: float) -> None:
        state = seq.state
        if state.first_token_s is None:
            state.first_token_s = now
        siblings = [seq]
        for index in range(1, len(tokens)):
            sibling = self._new_sequence(state, index, list(seq.token_ids))
            state.sequences.append(sibling)
            siblings.append(sibling)
        for sibling, token in zip(siblings, tokens, strict=True):
            self._append(sibling, token)
            if sibling is not seq and sibling.finish_reason is None:
                self._start_sibling(seq, sibling)

    def _book_verified(self, seq: Sequence, entry: ScheduledSequence, tokens: tuple[SampledToken, ...]) -> None:
        """Keep the guesses that are the tokens drawn, the token drawn after them, and the KV of no other."""
        assert self._speculator is not None
        num_right = 0
        for token, guess in zip(tokens, [*entry.token_ids[-entry.num_drafts :], None], strict=True):
            self._append(seq, token)
            if token.failure is not None or token.token_id != guess:
                break
            num_right += 1
            if seq.finish_reason is not None:
                break
        seq.num_computed += num_right
        self.cache.trim(seq)
        self.cache.publish(seq, seq.num_computed)
        self._speculator.record_guess(seq, num_guesses=entry.num_drafts, num_right=num_right)

    def _start_sibling(self, parent: Sequence, sibling: Sequence) -> None:
        self._num_admissions += 1
        sibling.admission = self._num_admissions
        if len(self._running) < self.limits.max_num_seqs:
            self.cache.fork(parent, sibling)
            self._running[sibling.seq_id] = sibling
        else:
            self.preempted.add(sibling)

    def _append(self, seq: Sequence, token: SampledToken) -> None:
        if token.failure is not None:
            seq.finish_reason, seq.error = FinishReason.ERROR, token.failure
        else:
            seq.token_ids.append(token.token_id)
            self.counters.generated_tokens += 1
            self._stop_check(seq, token)
        if seq.finish_reason is not None:
            seq.state.num_open -= 1
            self._lengths.record(seq.state.beginnings, seq.num_output)

    def _collect_finished(self) -> list[RequestState]:
        ended = [seq for seq in self._running.values() if seq.finish_reason is not None]
        for seq in ended:
            self.cache.release(seq)
            del self._running[seq.seq_id]
            self._forget_guesses(seq)
        finished = list(dict.fromkeys(seq.state for seq in ended if seq.state.finished))
        for state in finished:
            del self._states[state.request.request_id]
        return finished

    def _forget_guesses(self, seq: Sequence) -> None:
        if self._speculator is not None:
            self._speculator.forget(seq.seq_id)

    def rollback(self, plan: StepPlan) -> None:
        """The step failed: its sequences lose their blocks and are computed again later."""
        self.cache.undo_publications()
        self.preempted.undo_step()
        planned = {entry.seq_id for entry in plan.sequences}
        for seq in [s for s in self._running.values() if s.seq_id in planned]:
            self._preempt(seq)
        self.cache.end_step()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree."""
        self.cache.check_integrity(list(self._running.values()))
        self.preempted.check_integrity()

    def _new_sequence(self, state: RequestState, index: int, token_ids: list[int]) -> Sequence:
        self._next_seq_id += 1
        return Sequence(
            seq_id=self._next_seq_id,
            state=state,
            index=index,
            token_ids=token_ids,
            num_prompt=len(state.request.prompt_token_ids),
            node=self.cache.tree.root(state.request.lora),
            matcher=None if state.request.grammar is None else state.request.grammar.matcher(),
        )
