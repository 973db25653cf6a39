"""Preemption: sequences that gave up their blocks, in the order they come back, and what the host keeps of them.

Owns the preempted sequences and the block moves to and from the host that a step needs. Knows nothing of who is
preempted for whom (scheduler.py decides). Invariants: a preempted sequence holds no blocks and is in the queue once;
the host keeps KV only of sequences whose step did not fail.
"""

from __future__ import annotations

from kvq.engine.cache_manager import CacheManager
from kvq.engine.preemption_watch import PreemptionCost
from kvq.engine.sequence import RequestState, Sequence
from kvq.engine.swap_space import SwapSpace

BlockMoves = tuple[tuple[int, int], ...]


class PreemptedSequences:
    """The sequences that wait to go on where they were: most urgent first, then in the order they were admitted."""

    def __init__(self, cache: CacheManager, swap_space: SwapSpace) -> None:
        self.num_swapped_in = 0  # blocks, since the start
        self.num_swapped_out = 0
        self._cache = cache
        self._swap_space = swap_space
        self._queue: list[Sequence] = []
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []
        self._swapped_now: list[int] = []  # sequences moved to the host by the step being planned
        self._lost_now = 0  # tokens that are to be computed again, of those preempted for the step being planned
        self._num_fitting: int | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> Sequence | None:
        """The sequence to come back next."""
        return self._queue[0] if self._queue else None

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that holds no blocks."""
        assert not seq.block_table
        self._queue.append(seq)
        self._queue.sort(key=lambda s: (s.state.request.priority, s.admission, s.seq_id))

    def remove_first(self) -> None:
        """The first sequence was admitted again."""
        self._queue.pop(0)

    def forget(self, state: RequestState) -> None:
        """A request ended elsewhere: drop its sequences and what the host keeps of them."""
        for seq in state.sequences:
            self._swap_space.forget(seq.seq_id)
        self._queue = [seq for seq in self._queue if seq.state is not state]

    def holds_on_host(self, seq: Sequence) -> bool:
        """True where the host keeps KV of ``seq``."""
        return self._swap_space.get(seq.seq_id) is not None

    def swap_out(self, seq: Sequence, num_left: int) -> None:
        """Keep the KV of a sequence that is about to be preempted in host memory, where that pays.

        ``num_left``: sequences that go on running. One that dropped blocks is computed again, for want of all its KV.
        """
        self._num_fitting = num_left
        num_blocks = self._cache.num_blocks_for(seq.num_computed)
        if seq.num_dropped or not self._swap_space.pays(num_tokens=seq.num_computed, num_blocks=num_blocks):
            self._lost_now += seq.num_computed
            return
        host_blocks = self._swap_space.store(seq.seq_id, num_tokens=seq.num_computed, num_blocks=num_blocks)
        self._swap_outs += zip(seq.block_table, host_blocks, strict=False)
        self._swapped_now.append(seq.seq_id)
        self.num_swapped_out += num_blocks

    def swap_in(self, seq: Sequence) -> None:
        """Bring back what the host holds of a sequence just admitted, beyond what it shares already."""
        swapped = self._swap_space.get(seq.seq_id)
        if swapped is None:
            return
        first = len(seq.block_table)
        if swapped.num_tokens > seq.num_computed:
            extended = self._cache.extend(seq, swapped.num_tokens - seq.num_computed)
            assert extended, "admission checked that the blocks are there"
            moves = list(zip(swapped.host_blocks, seq.block_table, strict=False))[first:]
            self._swap_ins += moves
            self.num_swapped_in += len(moves)
            seq.num_computed = swapped.num_tokens
            self._cache.publish(seq, seq.num_computed)
        self._swap_space.forget(seq.seq_id)

    def take_moves(self) -> tuple[BlockMoves, BlockMoves]:
        """The step's moves: (block, host block) pairs outwards, then (host block, block) pairs back."""
        outs, ins = tuple(self._swap_outs), tuple(self._swap_ins)
        self._swap_outs.clear()
        self._swap_ins.clear()
        return outs, ins

    def cost(self, num_moved: int) -> PreemptionCost:
        """What preempting for the step that was planned last costs; it moves ``num_moved`` blocks."""
        space = self._swap_space
        return PreemptionCost(
            seconds=num_moved * space.seconds_per_block + self._lost_now * space.seconds_per_token,
            num_blocks_moved=num_moved,
            num_tokens_lost=self._lost_now,
            num_fitting=self._num_fitting,
        )

    def end_step(self) -> None:
        """The step's moves are done."""
        self._swapped_now.clear()
        self._lost_now, self._num_fitting = 0, None

    def undo_step(self) -> None:
        """The step failed: what it was to move may not have reached the host."""
        for seq_id in self._swapped_now:
            self._swap_space.forget(seq_id)
        self.end_step()

    def record_duration(self, num_tokens: int, seconds: float) -> None:
        """A step computed ``num_tokens`` tokens in ``seconds``: what computing again costs."""
        self._swap_space.record_step(num_tokens, seconds)

    def check_integrity(self) -> None:
        """Raise AssertionError if a preempted sequence holds blocks or is queued twice."""
        assert all(not seq.block_table for seq in self._queue)
        assert len({seq.seq_id for seq in self._queue}) == len(self._queue)
