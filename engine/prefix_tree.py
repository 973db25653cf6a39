"""PrefixTree: token prefixes -> blocks that hold their KV.

Owns the trees of published blocks, one for the base model and one for each LoRA adapter, whose KV differs: a node is
one full block, its path from the root the tokens before it.
Knows nothing of reference counts or requests. Invariant: a block id appears in at most one node.
Source: block-granular prefix tree as in SGLang's RadixAttention (arXiv 2312.07104, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Children compared for a partial match; a bound, so that a popular branching point stays cheap.
MAX_PARTIAL_CANDIDATES = 64


class Node:
    """One published block: the KV of ``tokens`` after all the tokens on the path to it."""

    __slots__ = ("block_id", "children", "children_by_first", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block_id: int | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.children: dict[tuple[int, ...], Node] = {}
        self.children_by_first: dict[int, list[Node]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialMatch:
    """The first ``num_tokens`` slots of ``block_id`` hold the KV that is wanted; they are to be copied."""

    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest known prefix: full blocks to share, then perhaps a part of one to copy."""

    node: Node
    block_ids: tuple[int, ...]
    partial: PartialMatch | None


class PrefixTree:
    """Published blocks by the tokens they hold."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str | None, Node] = {}
        self._node_by_block: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._node_by_block)

    def root(self, lora: str | None = None) -> Node:
        """Where the prefixes computed with an adapter begin; None: those of the base model."""
        if lora not in self._roots:
            self._roots[lora] = Node(None, (), None)
        return self._roots[lora]

    def match(self, token_ids: Sequence[int], max_tokens: int, lora: str | None = None) -> Match:
        """The longest published prefix of ``token_ids``, at most ``max_tokens`` long."""
        size = self.block_size
        node, block_ids, start = self.root(lora), [], 0
        while start + size <= max_tokens:
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            assert child.block_id is not None
            block_ids.append(child.block_id)
            node, start = child, start + size
        rest = tuple(token_ids[start : min(start + size, max_tokens)])
        return Match(node=node, block_ids=tuple(block_ids), partial=self._partial(node, rest))

    def _partial(self, node: Node, rest: tuple[int, ...]) -> PartialMatch | None:
        if not rest:
            return None
        best: Node | None = None
        best_len = 0
        for child in node.children_by_first.get(rest[0], ())[-MAX_PARTIAL_CANDIDATES:]:
            length = _common_prefix(child.tokens, rest)
            if length > best_len:
                best, best_len = child, length
                if length == len(rest):
                    break
        if best is None or best.block_id is None:
            return None
        return PartialMatch(block_id=best.block_id, num_tokens=best_len)

    def insert(self, parent: Node, tokens: tuple[int, ...], block_id: int) -> Node | None:
        """Publish a block after ``parent``; None if the same tokens are already published there."""
        assert len(tokens) == self.block_size
        assert block_id not in self._node_by_block
        if tokens in parent.children:
            return None
        node = Node(parent, tokens, block_id)
        parent.children[tokens] = node
        parent.children_by_first.setdefault(tokens[0], []).append(node)
        self._node_by_block[block_id] = node
        return node

    def child(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        """The node of these tokens after ``parent``, if published."""
        return parent.children.get(tokens)

    def remove(self, block_id: int) -> list[int]:
        """Take the block and everything below it out of the tree; returns the block ids removed."""
        top = self._node_by_block[block_id]
        assert top.parent is not None
        del top.parent.children[top.tokens]
        siblings = top.parent.children_by_first[top.tokens[0]]
        siblings.remove(top)
        if not siblings:
            del top.parent.children_by_first[top.tokens[0]]
        removed, stack = [], [top]
        while stack:
            node = stack.pop()
            assert node.block_id is not None
            removed.append(node.block_id)
            del self._node_by_block[node.block_id]
            node.parent = None
            stack.extend(node.children.values())
        return removed

    def contains(self, block_id: int) -> bool:
        """True while the block is published."""
        return block_id in self._node_by_block

    def is_attached(self, node: Node) -> bool:
        """False once the node was removed: nothing may be published below it."""
        return node.block_id is None or node.parent is not None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree and its index agree."""
        seen: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            by_first = [n for nodes in node.children_by_first.values() for n in nodes]
            assert sorted(map(id, by_first)) == sorted(map(id, node.children.values()))
            for child in node.children.values():
                assert child.parent is node
                assert child.block_id is not None
                assert child.block_id not in seen, f"block {child.block_id} is published twice"
                seen.add(child.block_id)
                stack.append(child)
        assert seen == set(self._node_by_block)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
