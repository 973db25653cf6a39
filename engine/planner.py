"""PrefixPlanner: the order in which waiting jobs are admitted.

Owns the waiting set. Knows token ids and priorities, nothing of blocks. Jobs are kept sorted by their token
ids, which is the depth-first order of the prefix tree over the whole window: neighbours share the longest
prefixes. Invariant: every job added is handed out exactly once unless removed.
Source: depth-first admission is optimal for prefix reuse (SGLang, arXiv 2312.07104, theorem 3.1; BlendServe, arXiv
2411.16102).
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

# Jobs whose first GROUP_TOKENS tokens agree form a group: the unit that is finished before the next is begun.
GROUP_TOKENS = 32
_TOKEN_BYTES = 4


@dataclass(slots=True)
class _Group:
    """Jobs of one priority with equal first tokens, sorted by all their tokens."""

    entries: list[tuple[bytes, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    max_tokens: int = 0

    @property
    def decode_weight(self) -> float:
        """Output tokens per prompt token: decode-heavy groups go first and keep the batch full."""
        return self.max_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Job:
    priority: int
    key: bytes
    max_tokens: int
    arrival: int  # number of admissions before it came


class PrefixPlanner:
    """Hands out jobs: priority first, then group by group, depth first inside a group.

    Args:
        max_overtaken: the aging bound: a job overtaken by this many later admissions of its priority is next.
    """

    def __init__(self, *, max_overtaken: int = 4096) -> None:
        self._max_overtaken = max_overtaken
        self._jobs: dict[str, _Job] = {}  # insertion order is arrival order
        self._groups: dict[int, dict[bytes, _Group]] = {}
        self._hot: bytes | None = None  # key of the last job handed out
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def add(self, job_id: str, token_ids: Sequence[int], *, priority: int = 0, max_tokens: int = 0) -> None:
        """Add a waiting job. ``priority``: smaller runs earlier. ``max_tokens``: expected output length."""
        assert job_id not in self._jobs, f"{job_id} is already waiting"
        key = _sort_key(token_ids)
        self._jobs[job_id] = _Job(priority, key, max_tokens, self._num_taken)
        group = self._groups.setdefault(priority, {}).setdefault(_group_key(key), _Group())
        insort(group.entries, (key, job_id))
        group.prompt_tokens += len(token_ids)
        group.max_tokens += max_tokens

    def remove(self, job_id: str) -> None:
        """Forget a job: it was admitted or is no longer wanted."""
        job = self._jobs.pop(job_id)
        groups = self._groups[job.priority]
        group = groups[_group_key(job.key)]
        del group.entries[bisect_left(group.entries, (job.key, job_id))]
        group.prompt_tokens -= len(job.key) // _TOKEN_BYTES
        group.max_tokens -= job.max_tokens
        if not group.entries:
            del groups[_group_key(job.key)]
            if not groups:
                del self._groups[job.priority]

    def peek(self) -> str | None:
        """The job to admit next; None when nothing waits."""
        if not self._jobs:
            return None
        priority = min(self._groups)
        groups = self._groups[priority]
        overdue = self._overdue(priority)
        if overdue is not None:
            return overdue
        if self._hot is not None and (hot := groups.get(_group_key(self._hot))) is not None:
            return _nearest(hot.entries, self._hot)
        # max() keeps the first of equals, and dicts keep arrival order.
        return max(groups.values(), key=lambda group: group.decode_weight).entries[0][1]

    def admit(self, job_id: str) -> None:
        """The job was admitted: its group is the hot one now."""
        self._hot = self._jobs[job_id].key
        self._num_taken += 1
        self.remove(job_id)

    def take(self, k: int) -> list[str]:
        """Admit the next ``k`` jobs, fewer when fewer wait."""
        taken: list[str] = []
        while len(taken) < k and (job_id := self.peek()) is not None:
            self.admit(job_id)
            taken.append(job_id)
        return taken

    def _overdue(self, priority: int) -> str | None:
        if len(self._groups) == 1:
            job_id = next(iter(self._jobs))
            job = self._jobs[job_id]
        else:
            job_id, job = next((i, j) for i, j in self._jobs.items() if j.priority == priority)
        return job_id if self._num_taken - job.arrival >= self._max_overtaken else None


def _nearest(entries: list[tuple[bytes, str]], hot: bytes) -> str:
    """The entry that shares the longest prefix with ``hot``: a neighbour in sorted order."""
    right = bisect_left(entries, (hot, ""))
    if right == len(entries):
        return entries[-1][1]
    if right == 0:
        return entries[0][1]
    before, after = entries[right - 1], entries[right]
    if _common_tokens(before[0], hot) > _common_tokens(after[0], hot):
        return before[1]
    return after[1]


def _common_tokens(a: bytes, b: bytes) -> int:
    """Number of equal leading tokens, by bisection over slices (compared at memory speed)."""
    low, high = 0, min(len(a), len(b)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * _TOKEN_BYTES : middle * _TOKEN_BYTES] == b[low * _TOKEN_BYTES : middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def _group_key(key: bytes) -> bytes:
    return key[: GROUP_TOKENS * _TOKEN_BYTES]


def _sort_key(token_ids: Sequence[int]) -> bytes:
    """Big-endian 32-bit words: byte order is token order."""
    words = array("I", token_ids)
    assert words.itemsize == _TOKEN_BYTES
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()
