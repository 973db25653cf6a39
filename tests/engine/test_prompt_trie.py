"""PromptTrie: its figures are those of the trie one would build."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvq.engine.prompt_trie import PromptTrie, TrieFigures, TrieNode

prompts_of_few_tokens = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=12)


def figures(prompts: list[list[int]], vocab_size: int = 4) -> TrieFigures:
    trie = PromptTrie(vocab_size=vocab_size)
    for prompt in prompts:
        trie.add(prompt)
    return trie.analysed()


def num_trie_nodes(prompts: list[list[int]]) -> int:
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


@given(prompts_of_few_tokens)
def test_distinct_tokens_are_the_nodes_of_the_trie(prompts: list[list[int]]) -> None:
    found = figures(prompts)
    assert found.total_tokens == sum(map(len, prompts))
    assert found.distinct_tokens == num_trie_nodes(prompts)
    assert found.num_repeats == len(prompts) - len({tuple(prompt) for prompt in prompts})


@given(prompts_of_few_tokens)
def test_what_the_nodes_save_is_what_is_not_distinct(prompts: list[list[int]]) -> None:
    found = figures(prompts)
    assert sum(node.saved_tokens for node in found.nodes()) == found.total_tokens - found.distinct_tokens


@given(prompts_of_few_tokens)
def test_each_node_is_a_longest_common_prefix_with_all_its_prompts(prompts: list[list[int]]) -> None:
    found = figures(prompts)
    for node in found.nodes():
        members = [prompts[i] for i in found.order[node.start : node.end]]
        prefix = members[0][: node.num_tokens]
        assert all(member[: node.num_tokens] == prefix for member in members)
        assert sum(prompt[: node.num_tokens] == prefix for prompt in prompts) == node.num_prompts
        # Prompts that end here are a branch each.
        after = [tuple(m[node.num_tokens : node.num_tokens + 1]) for m in members]
        assert node.num_branches == len(set(after) - {()}) + after.count(())
        first, second = (prompts[found.order[i]] for i in node.branches)
        assert second[node.num_tokens :] == [] or first[: node.num_tokens + 1] != second[: node.num_tokens + 1]


def test_tokens_of_every_size_are_sorted_by_their_numbers() -> None:
    for vocab_size in (300, 70_000, 20_000_000):
        tokens = [0, 1, 255, 256, vocab_size - 1]
        found = figures([[token, 7] for token in reversed(tokens)], vocab_size)
        assert found.order.tolist() == [4, 3, 2, 1, 0]
        assert found.distinct_tokens == 10


def test_a_node_says_how_many_copies_there_are_of_what_follows_it() -> None:
    found = figures([[1, 2, 9, 9], [1, 2, 8, 9], [1, 3, 9, 9], [1, 3, 9, 8]], vocab_size=10)
    root: TrieNode = next(node for node in found.nodes() if node.num_tokens == 1)
    assert (root.num_prompts, root.num_branches) == (4, 2)
    assert [found.num_copies(root, length) for length in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_many_prompts_take_two_bytes_a_token() -> None:
    rng = random.Random(0)
    head = [rng.randrange(49_000) for _ in range(900)]
    trie: Any = PromptTrie(vocab_size=49_152)
    for _ in range(2_000):
        trie.add([*head, *(rng.randrange(49_000) for _ in range(100))])
    assert sum(map(len, trie._keys)) == 2 * 2_000 * 1_000
    found = trie.analysed()
    assert found.total_tokens == 2_000_000
    assert 900 + 2_000 * 98 < found.distinct_tokens <= 900 + 2_000 * 100


def test_no_prompts_have_no_figures() -> None:
    found = figures([])
    assert (found.total_tokens, found.distinct_tokens, found.num_repeats, list(found.nodes())) == (0, 0, 0, [])
