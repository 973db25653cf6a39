"""BlockPool: which KV blocks are free, referenced or evictable.

Owns reference counts and the order of eviction. Knows nothing of tokens or tensors: a block is a number.
Invariant: every block is in exactly one of three places: free (no content), referenced (ref > 0), or
evictable (ref == 0, content kept for reuse); ``check_integrity`` verifies it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class BlockPool:
    """A fixed number of blocks with reference counts and least-recently-used eviction.

    ``on_evict(block_id)`` is called before the content of a cached block is given up.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._cached = [False] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        """Blocks some sequence holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many holders the block has."""
        return self._ref_counts[block_id]

    def allocate(self) -> int:
        """Take a block with one reference; evicts the least recently used cached block if none is free."""
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id = next(iter(self._evictable))
            self._on_evict(block_id)  # may free further blocks, this one among them
            assert not self._cached[block_id], "on_evict must uncache the block"
            self._free.remove(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def retain(self, block_id: int) -> None:
        """Add a reference; a cached block without one becomes referenced again."""
        if self._ref_counts[block_id] == 0:
            assert self._cached[block_id], f"block {block_id} is free"
            del self._evictable[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference; the last one leaves the block evictable if it is cached, else free."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} released once too often"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if self._cached[block_id]:
                self._evictable[block_id] = None
            else:
                self._set_free(block_id)

    def touch(self, block_id: int) -> None:
        """Make an evictable block the last to be evicted; no effect on others."""
        if block_id in self._evictable:
            self._evictable.move_to_end(block_id)

    def cache(self, block_id: int) -> None:
        """Keep the block's content when its last reference goes."""
        assert self._ref_counts[block_id] > 0
        self._cached[block_id] = True

    def uncache(self, block_id: int) -> None:
        """Its content is no longer worth keeping."""
        assert self._cached[block_id]
        self._cached[block_id] = False
        if self._ref_counts[block_id] == 0:
            del self._evictable[block_id]
            self._set_free(block_id)

    def _set_free(self, block_id: int) -> None:
        self._free.appendleft(block_id)  # the next to be used: its memory is warm

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + referenced + evictable is every block, each once."""
        free, evictable = set(self._free), set(self._evictable)
        referenced = {b for b, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable
        assert not free & referenced
        assert not evictable & referenced
        assert len(free) + len(evictable) + len(referenced) == self.num_blocks
        assert all(self._cached[b] for b in evictable)
        assert not any(self._cached[b] for b in free)
