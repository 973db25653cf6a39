"""Batch: the requests in flight, and which of their sequences run.

Owns the running sequences in order of admission, the numbers given out and the totals. Decides nothing: admission.py
says who enters, scheduler.py what a step computes and who gives way, booking.py who has ended. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.engine.cache_manager import CacheManager
from kvq.engine.preemption import PreemptedSequences
from kvq.engine.request import Request
from kvq.engine.sequence import RequestState, Sequence


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


class Batch:
    """What the parts of the scheduler share.

    ``states``: requests in flight by id. ``running``: sequences that hold blocks by id, in order of admission.
    """

    def __init__(self, *, limits: SchedulerLimits, cache: CacheManager, preempted: PreemptedSequences) -> None:
        self.limits = limits
        self.cache = cache
        self.preempted = preempted
        self.counters = SchedulerCounters()
        self.states: dict[str, RequestState] = {}
        self.running: dict[int, Sequence] = {}
        self._next_seq_id = 0
        self._num_admissions = 0

    @property
    def is_full(self) -> bool:
        """True when no more sequences may run."""
        return len(self.running) >= self.limits.max_num_seqs

    def open(self, request: Request, seed: int, beginnings: tuple[int, ...]) -> None:
        """A request came in; its first sequence waits."""
        assert request.request_id not in self.states
        state = RequestState(request=request, seed=seed, num_open=request.params.n, beginnings=beginnings)
        self.states[request.request_id] = state
        state.sequences.append(self.new_sequence(state, 0, list(request.prompt_token_ids)))

    def new_sequence(self, state: RequestState, index: int, token_ids: list[int]) -> Sequence:
        """Sample ``index`` of a request, not running yet."""
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

    def number(self, seq: Sequence) -> None:
        """Its place in the order of admission, by which it comes back if preempted."""
        self._num_admissions += 1
        seq.admission = self._num_admissions

    def preempt(self, seq: Sequence) -> None:
        """Give up the sequence's blocks; its tokens are kept and it goes on later where it was."""
        assert seq.num_pending == 0, "what a step draws for it is not known yet"
        self.cache.release(seq)
        del self.running[seq.seq_id]
        self.preempted.add(seq)
        seq.state.preemptions += 1
        self.counters.preemptions += 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree."""
        self.cache.check_integrity(list(self.running.values()))
        self.preempted.check_integrity()
