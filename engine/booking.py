"""Booking: what a step that was computed means for its sequences.

Owns the tokens that sequences get, the samples that fork from a prompt, and who has ended. Plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from kvq.engine.batch import Batch
from kvq.engine.lengths import OutputLengths
from kvq.engine.request import FinishReason
from kvq.engine.sequence import RequestState, Sequence
from kvq.engine.speculation import Speculator
from kvq.engine.step import SampledToken, ScheduledSequence, StepPlan, StepResult

StopCheck = Callable[[Sequence, SampledToken], None]


class Booking:
    """Books the results of steps.

    Args:
        batch: the sequences.
        stop_check: called after each new token; sets ``finish_reason`` on the sequence when it ends there.
        lengths: learns how long answers turn out to be.
        speculator: told what became of its guesses; None where none are made.
    """

    def __init__(
        self, batch: Batch, *, stop_check: StopCheck, lengths: OutputLengths, speculator: Speculator | None
    ) -> None:
        self._batch = batch
        self._cache = batch.cache
        self._stop_check = stop_check
        self._lengths = lengths
        self._speculator = speculator

    def book(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestState]:
        """Book a step's tokens; returns the requests that finished, which are in flight no more.

        ``now``: monotonic seconds.
        """
        for entry in plan.sequences:
            seq = self._batch.running.get(entry.seq_id)
            if seq is None:  # aborted while the step ran, or ended in the step before
                continue
            num_prompt_computed = max(0, min(seq.num_prompt, entry.start + len(entry.token_ids)) - entry.start)
            self._batch.counters.computed_prompt_tokens += num_prompt_computed
            seq.state.computed_tokens += num_prompt_computed
            self._cache.drop_out_of_window(seq)
            seq.state.prompt_scores.extend(result.scores_by_seq.get(entry.seq_id, ()))
            if entry.num_pooled:
                seq.state.add_pooled(result.pooled_by_seq[entry.seq_id], entry.num_pooled)
                self._end_if_pooled(seq, now)
            seq.num_pending -= bool(entry.samples)
            if entry.num_drafts:
                self._book_verified(seq, entry, result.tokens_by_seq[entry.seq_id])
            elif entry.samples:
                self._book_tokens(seq, result.tokens_by_seq[entry.seq_id], now)
        return self._collect_finished()

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
            sibling = self._batch.new_sequence(state, index, list(seq.token_ids))
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
        self._cache.trim(seq)
        self._cache.publish(seq, seq.num_computed)
        self._speculator.record_guess(seq, num_guesses=entry.num_drafts, num_right=num_right)

    def _start_sibling(self, parent: Sequence, sibling: Sequence) -> None:
        self._batch.number(sibling)
        if self._batch.is_full:
            self._batch.preempted.add(sibling)
        else:
            self._cache.fork(parent, sibling)
            self._batch.running[sibling.seq_id] = sibling

    def _append(self, seq: Sequence, token: SampledToken) -> None:
        if token.failure is not None:
            seq.finish_reason, seq.error = FinishReason.ERROR, token.failure
        else:
            seq.token_ids.append(token.token_id)
            self._batch.counters.generated_tokens += 1
            self._stop_check(seq, token)
        if seq.finish_reason is not None:
            seq.state.num_open -= 1
            self._lengths.record(seq.state.beginnings, seq.num_output)

    def _collect_finished(self) -> list[RequestState]:
        ended = [seq for seq in self._batch.running.values() if seq.finish_reason is not None]
        for seq in ended:
            self._cache.release(seq)
            del self._batch.running[seq.seq_id]
            if self._speculator is not None:
                self._speculator.forget(seq.seq_id)
        finished = list(dict.fromkeys(seq.state for seq in ended if seq.state.finished))
        for state in finished:
            del self._batch.states[state.request.request_id]
        return finished
