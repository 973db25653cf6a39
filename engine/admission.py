"""Admission: which waiting sequence enters the batch next, and whether it fits.

Owns the waiting requests and the forecast of the blocks that the batch will take. Preempts nobody. Invariant: one
that is admitted gets all the blocks that its tokens so far need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvq.engine.batch import Batch
from kvq.engine.growth import Growth, peak_growth
from kvq.engine.lengths import OutputLengths
from kvq.engine.planner import Planner, planning_ids
from kvq.engine.request import Request
from kvq.engine.sequence import Sequence


class Admission:
    """The way into a batch.

    Args:
        batch: what runs; sequences are moved into it.
        planner: the order of those that have not run yet.
        lengths: what is known of the lengths of answers.
        clock: monotonic seconds.
    """

    def __init__(self, batch: Batch, *, planner: Planner, lengths: OutputLengths, clock: Callable[[], float]) -> None:
        self._batch = batch
        self._cache = batch.cache
        self._preempted = batch.preempted
        self._planner = planner
        self._lengths = lengths
        self._clock = clock

    @property
    def num_waiting(self) -> int:
        """Requests and preempted sequences not in the batch."""
        return len(self._planner) + len(self._preempted)

    def add(self, request: Request, seed: int) -> None:
        """Put a request among the waiting ones."""
        beginnings = self._lengths.beginnings(request.prompt_token_ids)
        self._batch.open(request, seed, beginnings)
        self._planner.add(
            request.request_id,
            planning_ids(request.prompt_token_ids, request.lora),
            priority=request.priority,
            max_tokens=self._lengths.expect(beginnings, request.params) * request.params.n,
        )

    def remove(self, request_id: str) -> None:
        """Forget a request if it waits for its first step."""
        if request_id in self._planner:
            self._planner.remove(request_id)

    def next(self, score_room: int) -> Sequence | None:
        """Move the next waiting sequence into the batch if it fits; None if none does.

        ``score_room``: prompt tokens that may still be scored in the step.
        """
        if self._batch.is_full:
            return None
        seq = self._candidate()
        if seq is None:
            return None
        running = self._batch.running
        num_slots = 1 if seq.num_output else seq.state.request.params.n
        if running and len(running) + num_slots > self._batch.limits.max_num_seqs:
            return None
        if seq.state.wants_scores and score_room == 0:
            return None
        if not self._adapter_fits(seq.state.request.lora):
            return None
        # A prompt that is scored is computed, all of it: cached KV says nothing of its tokens' probabilities.
        match = self._cache.match([] if seq.state.needs_all_hidden_states else seq.token_ids, seq.state.request.lora)
        if self._preempted.holds_on_host(seq):
            match = replace(match, partial=None)  # the host holds the whole of that block
        room = self._cache.pool.num_free - self._cache.num_new_blocks(seq, match)
        if room < 0 and match.partial is not None:
            match = replace(match, partial=None)
            room = self._cache.pool.num_free - self._cache.num_new_blocks(seq, match)
        if room < 0 or (running and room < self._expected_growth(seq)):
            self._cache.touch(match)
            return None
        self._cache.admit(seq, match)
        self._book(seq)
        self._preempted.swap_in(seq)
        return seq

    def _candidate(self) -> Sequence | None:
        waiting_id = self._planner.peek()
        waiting = None if waiting_id is None else self._batch.states[waiting_id].sequences[0]
        preempted = self._preempted.first
        if preempted is None:
            return waiting
        if waiting is not None and waiting.state.request.priority < preempted.state.request.priority:
            return waiting
        return preempted

    def _adapter_fits(self, lora: str | None) -> bool:
        """False where a step would compute with more adapters than may be ready at a time."""
        if lora is None:
            return True
        adapters = {seq.state.request.lora for seq in self._batch.running.values()} - {None, lora}
        return len(adapters) < self._batch.limits.max_loras

    def _book(self, seq: Sequence) -> None:
        state = seq.state
        if seq is self._preempted.first:
            self._preempted.remove_first()
        else:
            self._planner.admit(state.request.request_id)
            state.first_scheduled_s = self._clock()
            state.cached_tokens = seq.num_computed
            self._batch.counters.prompt_tokens += seq.num_prompt
            self._batch.counters.cached_prompt_tokens += seq.num_computed
        self._batch.number(seq)
        self._batch.running[seq.seq_id] = seq

    def _expected_growth(self, candidate: Sequence) -> int:
        """Blocks that the batch with ``candidate`` is expected to take at its peak, beyond what it then holds."""
        growths = [self._growth(seq, seq.num_held_blocks, seq.num_remaining) for seq in self._batch.running.values()]
        num_samples = 1 if candidate.num_output else candidate.state.request.params.n
        num_given = self._cache.num_held_blocks(candidate.num_tokens, 1)
        growths += [self._growth(candidate, num_given, 1)] * num_samples
        return peak_growth(growths, block_size=self._cache.block_size)

    def _growth(self, seq: Sequence, num_held: int, num_remaining: int) -> Growth:
        """What ``seq`` is expected to take beyond ``num_held`` blocks."""
        expected_len = self._expected_len(seq)
        return Growth(
            num_tokens=expected_len - seq.num_tokens + num_remaining,
            most_blocks=max(0, self._cache.num_held_blocks(expected_len, num_remaining) - num_held),
            num_own=max(0, len(seq.block_table) - max(seq.num_dropped, self._cache.num_blocks_for(seq.num_prompt))),
        )

    def _expected_len(self, seq: Sequence) -> int:
        expected = seq.num_prompt + self._lengths.expect(seq.state.beginnings, seq.state.request.params)
        return min(max(expected, seq.num_tokens + 1), self._batch.limits.max_model_len)
