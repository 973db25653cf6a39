"""BlockPool, PrefixTree and CacheManager under random use: no block lost, doubled or written while shared."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvq.engine.block_pool import BlockPool
from kvq.engine.cache_manager import CacheManager
from kvq.engine.prefix_tree import PrefixTree
from kvq.engine.request import Request, SamplingParams
from kvq.engine.sequence import RequestState, Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 12


def _sequence(cache: CacheManager, token_ids: list[int], seq_id: int = 0) -> Sequence:
    request = Request(request_id=str(seq_id), prompt_token_ids=tuple(token_ids), params=SamplingParams())
    return Sequence(
        seq_id=seq_id,
        state=RequestState(request=request, seed=0),
        index=0,
        token_ids=list(token_ids),
        num_prompt=len(token_ids),
        node=cache.tree.root(),
    )


def _cache(num_blocks: int = NUM_BLOCKS) -> CacheManager:
    return CacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True)


def _compute(cache: CacheManager, seq: Sequence) -> None:
    num_tokens = seq.num_remaining
    assert cache.extend(seq, num_tokens)
    cache.publish(seq, len(seq.token_ids))
    seq.num_computed += num_tokens
    cache.take_copies()
    cache.end_step()


def test_release_returns_every_block() -> None:
    cache = _cache()
    seq = _sequence(cache, list(range(10)))
    cache.admit(seq, cache.match(seq.token_ids))
    _compute(cache, seq)
    assert cache.pool.num_referenced == 3
    cache.release(seq)
    assert cache.pool.num_free == NUM_BLOCKS


def test_the_least_recently_used_block_is_evicted_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(2, on_evict=lambda block: (evicted.append(block), pool.uncache(block)))
    for block in (pool.allocate(), pool.allocate()):
        pool.cache(block)
    pool.release(1)
    pool.release(0)
    pool.touch(1)
    pool.allocate()
    assert evicted == [0]


def test_a_prompt_keeps_one_token_to_compute_and_the_rest_is_copied() -> None:
    cache = _cache()
    first = _sequence(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.admit(first, cache.match(first.token_ids))
    _compute(cache, first)
    again = _sequence(cache, [1, 2, 3, 4, 5, 6, 7, 8], seq_id=1)
    cache.admit(again, cache.match(again.token_ids))
    assert again.num_computed == 7
    (copy,) = cache.take_copies()
    assert (copy.src, copy.dst, copy.num_tokens) == (first.block_table[1], again.block_table[1], 3)
    assert again.block_table[0] == first.block_table[0]


def test_a_forked_sequence_copies_the_shared_block_before_it_writes() -> None:
    cache = _cache()
    parent = _sequence(cache, [1, 2, 3, 4, 5, 6])
    cache.admit(parent, cache.match(parent.token_ids))
    _compute(cache, parent)
    child = _sequence(cache, parent.token_ids, seq_id=1)
    cache.fork(parent, child)
    child.token_ids.append(9)
    assert cache.extend(child, 1)
    (copy,) = cache.take_copies()
    assert copy.src == parent.block_table[1] != child.block_table[1]
    cache.check_integrity([parent, child])


def test_removing_a_block_detaches_all_that_hangs_below_it() -> None:
    tree = PrefixTree(2)
    top = tree.insert(tree.root(), (1, 2), 0)
    assert top is not None
    below = tree.insert(top, (3, 4), 1)
    assert below is not None
    assert sorted(tree.remove(0)) == [0, 1]
    assert not tree.is_attached(below)
    assert tree.match([1, 2, 3, 4, 5], 4).block_ids == ()
    tree.check_integrity()


def test_publications_of_a_failed_step_are_taken_back() -> None:
    cache = _cache()
    seq = _sequence(cache, list(range(8)))
    cache.admit(seq, cache.match(seq.token_ids))
    assert cache.extend(seq, 8)
    cache.publish(seq, 8)
    cache.take_copies()
    cache.undo_steps()
    assert cache.match(list(range(8))).block_ids == ()
    cache.release(seq)
    cache.check_integrity([])


@pytest.mark.parametrize("caching", [True, False])
def test_without_prefix_caching_nothing_is_shared(*, caching: bool) -> None:
    cache = CacheManager(num_blocks=8, block_size=4, enable_prefix_caching=caching)
    first = _sequence(cache, list(range(9)))
    cache.admit(first, cache.match(first.token_ids))
    _compute(cache, first)
    assert bool(cache.match(list(range(9))).block_ids) is caching


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a two-letter alphabet, so that prefixes collide all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = _cache()
        self.live: list[Sequence] = []
        self.next_id = 0
        self.owner_by_block: dict[int, tuple[int, ...]] = {}

    def _new(self, token_ids: list[int]) -> Sequence:
        self.next_id += 1
        return _sequence(self.cache, token_ids, self.next_id)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def admit(self, token_ids: list[int]) -> None:
        seq = self._new(token_ids)
        match = self.cache.match(token_ids)
        if self.cache.num_new_blocks(seq, match) > self.cache.pool.num_free:
            return
        self.cache.admit(seq, match)
        _compute(self.cache, seq)
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        seq.token_ids.append(token)
        if not self.cache.extend(seq, 1):
            self.cache.release(seq)
            self.live.remove(seq)
            return
        self.cache.publish(seq, len(seq.token_ids))
        written = seq.block_table[seq.num_computed // BLOCK_SIZE]
        assert sum(written in other.block_table for other in self.live) == 1, "a shared block is written"
        seq.num_computed += 1
        self.cache.take_copies()
        self.cache.end_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = self._new(list(parent.token_ids))
        self.cache.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.cache.release(seq)

    @invariant()
    def counts_agree(self) -> None:
        self.cache.check_integrity(self.live)

    def teardown(self) -> None:
        for seq in self.live:
            self.cache.release(seq)
        self.cache.check_integrity([])
        assert self.cache.pool.num_free == NUM_BLOCKS


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
