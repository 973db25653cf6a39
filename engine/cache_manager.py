"""CacheManager: which blocks each sequence holds.

Owns admission by prefix match, growth, copy-on-write, publication and release of blocks, and the block copies
a step needs. Knows nothing of priorities or budgets. Invariants: a published (shared) block is never written;
a block that is written has one holder; blocks that a step copies from stay held until the step ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvq.engine.block_pool import BlockPool
from kvq.engine.prefix_tree import Match, PrefixTree
from kvq.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy the first ``num_tokens`` slots of block ``src`` to block ``dst``, in every layer.

    In each layer it is done after the step's new KV is written and before it is read, in list order, so that
    blocks filled in the same step can be copied from.
    """

    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How far back the layers look, where all of them have a sliding window.

    Args:
        num_tokens: the longest window: a token sees this many, itself among them.
        max_step_tokens: most tokens of a sequence that one step computes; they are held together.
    """

    num_tokens: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class _StepBlocks:
    """Blocks held for a step until it ends, and those published with the KV that it writes."""

    held: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)


class CacheManager:
    """The paged KV cache's bookkeeping: ``num_blocks`` blocks of ``block_size`` tokens.

    Args:
        window: None where some layer looks back to the first token, so that no block of a sequence can be dropped.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool, window: Window | None = None
    ) -> None:
        self.block_size = block_size
        self._window = window
        self._enable_prefix_caching = enable_prefix_caching
        self.tree = PrefixTree(block_size)
        self.pool = BlockPool(num_blocks, self._evict)
        self._copies: list[BlockCopy] = []
        self._planned = _StepBlocks()  # of the step being planned
        self._running: deque[_StepBlocks] = deque()  # of the steps that run, the oldest first

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_held_blocks(self, num_tokens: int, num_remaining: int) -> int:
        """Most blocks that a sequence holds while it grows to ``num_tokens``, if ``num_remaining`` are known by now."""
        if self._window is None:
            return self.num_blocks_for(num_tokens)
        step_tokens = max(1, min(num_remaining, self._window.max_step_tokens))
        # Besides the window and the step: the block that is kept in front, and one for where the window begins.
        return min(self.num_blocks_for(num_tokens), self.num_blocks_for(self._window.num_tokens + step_tokens) + 2)

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole cache can hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold."""
        return self.pool.num_referenced / self.pool.num_blocks

    def match(self, token_ids: list[int], lora: str | None = None) -> Match:
        """The longest cached prefix computed with the same adapter, leaving at least one token to compute."""
        if not self._enable_prefix_caching:
            return Match(node=self.tree.root(lora), block_ids=(), partial=None)
        return self.tree.match(token_ids, len(token_ids) - 1, lora)

    def num_new_blocks(self, seq: Sequence, match: Match) -> int:
        """Free blocks that admitting ``seq`` by ``match`` takes, revived evictable ones included."""
        revived = sum(1 for b in match.block_ids if self.pool.ref_count(b) == 0)
        if match.partial is not None and self.pool.ref_count(match.partial.block_id) == 0:
            revived += 1  # held while it is copied from
        num_tokens = len(seq.token_ids)
        missing = self.num_blocks_for(num_tokens) - len(match.block_ids)
        held = self.num_held_blocks(num_tokens, num_tokens - len(match.block_ids) * self.block_size)
        return min(missing, held) + revived

    def admit(self, seq: Sequence, match: Match) -> None:
        """Give ``seq`` the matched prefix. The caller has checked ``num_new_blocks``."""
        assert not seq.block_table
        for block_id in match.block_ids:
            self.pool.retain(block_id)
        seq.block_table = list(match.block_ids)
        seq.node, seq.num_published = match.node, len(match.block_ids)
        seq.num_computed = len(match.block_ids) * self.block_size
        if match.partial is not None:
            self._hold(match.partial.block_id)
            dst = self.pool.allocate()
            self._copies.append(BlockCopy(src=match.partial.block_id, dst=dst, num_tokens=match.partial.num_tokens))
            seq.block_table.append(dst)
            seq.num_computed += match.partial.num_tokens

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room to write ``num_tokens`` more tokens. False, without effect, if blocks are short."""
        if self.num_blocks_to_extend(seq, num_tokens) > self.pool.num_free:
            return False
        if self._writes_shared_block(seq):
            last, offset = divmod(seq.num_computed, self.block_size)
            src, dst = seq.block_table[last], self.pool.allocate()
            self._copies.append(BlockCopy(src=src, dst=dst, num_tokens=offset))
            self._planned.held.append(src)  # the sequence's own reference becomes the step's
            seq.block_table[last] = dst
        while len(seq.block_table) < self.num_blocks_for(seq.num_computed + num_tokens):
            seq.block_table.append(self.pool.allocate())
        return True

    def num_blocks_to_extend(self, seq: Sequence, num_tokens: int) -> int:
        """Free blocks that ``extend`` takes."""
        missing = self.num_blocks_for(seq.num_computed + num_tokens) - len(seq.block_table)
        return max(0, missing) + self._writes_shared_block(seq)

    def _writes_shared_block(self, seq: Sequence) -> bool:
        """True where the next token of ``seq`` falls into a block that others hold."""
        last, offset = divmod(seq.num_computed, self.block_size)
        return offset > 0 and self.pool.ref_count(seq.block_table[last]) > 1

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """After ``extend``: room for ``num_tokens`` tokens in all. False, without effect, if blocks are short."""
        needed = self.num_blocks_for(seq.num_computed + num_tokens) - len(seq.block_table)
        if needed > self.pool.num_free:
            return False
        for _ in range(needed):
            seq.block_table.append(self.pool.allocate())
        return True

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks that hold none of the computed tokens."""
        while len(seq.block_table) > self.num_blocks_for(seq.num_computed):
            self.pool.release(seq.block_table.pop())

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others share the full blocks among the first ``num_tokens`` tokens, computed or scheduled now.

        A block with a token that is still being drawn waits for a later call.
        """
        if not self._enable_prefix_caching or not self.tree.is_attached(seq.node):
            return
        size = self.block_size
        num_tokens = min(num_tokens, len(seq.token_ids))
        while (seq.num_published + 1) * size <= num_tokens:
            start = seq.num_published * size
            tokens = tuple(seq.token_ids[start : start + size])
            block_id = seq.block_table[seq.num_published]
            node = self.tree.insert(seq.node, tokens, block_id)
            if node is None:  # another sequence computed the same block; ours stays private
                node = self.tree.child(seq.node, tokens)
                assert node is not None
            else:
                self.pool.cache(block_id)
                self._planned.published.append(block_id)
            seq.node = node
            seq.num_published += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share all of ``parent``'s blocks; whoever writes a shared block first copies it."""
        assert not child.block_table
        for block_id in parent.held_blocks:
            self.pool.retain(block_id)
        child.block_table = list(parent.block_table)
        child.num_dropped, child.num_computed = parent.num_dropped, parent.num_computed
        child.node, child.num_published = parent.node, parent.num_published

    def release(self, seq: Sequence) -> None:
        """Take all blocks from ``seq``; published ones stay cached, the deepest to be evicted first."""
        for block_id in reversed(seq.held_blocks):
            self.pool.release(block_id)
        seq.block_table, seq.num_dropped = [], 0
        seq.node, seq.num_published, seq.num_computed = self.tree.root(seq.state.request.lora), 0, 0

    def drop_out_of_window(self, seq: Sequence) -> None:
        """Give up the blocks that no layer will look at again; published ones stay cached as long as there is room.

        The last of them is kept, and takes the place of the others in the block table: kernels may load what they then
        mask, and its slots are all written.
        """
        if self._window is None:
            return
        first_seen = seq.num_computed - self._window.num_tokens + 1
        kept = first_seen // self.block_size - 1
        if kept <= seq.num_dropped:
            return
        for block_id in seq.block_table[seq.num_dropped : kept]:
            self.pool.release(block_id)
        seq.block_table[:kept] = [seq.block_table[kept]] * kept
        seq.num_dropped = kept

    def num_used_slots(self, lengths: Iterable[tuple[Sequence, int]]) -> int:
        """Slots of the referenced blocks that hold tokens, given the tokens of each sequence whose KV is there.

        The blocks of a sequence are full but for its last; other referenced blocks are being copied from.
        """
        empty_by_block: dict[int, int] = {}
        for seq, num_tokens in lengths:
            if seq.block_table:
                last, empty = seq.block_table[-1], len(seq.block_table) * self.block_size - num_tokens
                empty_by_block[last] = min(empty, empty_by_block.get(last, empty))
        return self.pool.num_referenced * self.block_size - sum(empty_by_block.values())

    def touch(self, match: Match) -> None:
        """Keep what the next waiting sequence will share from being evicted before the rest."""
        for block_id in reversed(match.block_ids):
            self.pool.touch(block_id)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The step is planned: the copies that belong to it."""
        copies, self._copies = tuple(self._copies), []
        self._running.append(self._planned)
        self._planned = _StepBlocks()
        return copies

    def end_step(self) -> None:
        """The oldest step has run and its copies are done: blocks held for them are let go."""
        for block_id in self._running.popleft().held:
            self.pool.release(block_id)

    def undo_steps(self) -> None:
        """All steps that run failed: what was published for them holds no KV."""
        while self._running:
            for block_id in self._running[0].published:
                if self.tree.contains(block_id):
                    self._evict(block_id)
            self.end_step()

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless reference counts are the sequences' holdings and the tree is sound."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        counts = dict.fromkeys(range(self.pool.num_blocks), 0)
        for seq in sequences:
            assert all(b == seq.block_table[seq.num_dropped] for b in seq.block_table[: seq.num_dropped])
        held = [b for step in (self._planned, *self._running) for b in step.held]
        for block_id in [b for seq in sequences for b in seq.held_blocks] + held:
            counts[block_id] += 1
        for block_id, count in counts.items():
            assert self.pool.ref_count(block_id) == count, f"block {block_id}: {count} holders"

    def _hold(self, block_id: int) -> None:
        self.pool.retain(block_id)
        self._planned.held.append(block_id)

    def _evict(self, block_id: int) -> None:
        for removed in self.tree.remove(block_id):
            self.pool.uncache(removed)
