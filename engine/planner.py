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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import Protocol
from zlib import crc32

# Jobs whose first GROUP_TOKENS tokens agree form a group: the unit that is finished before the next is begun.
GROUP_TOKENS = 32
_TOKEN_BYTES = 4
_FIRST_ADAPTER_WORD = 1 << 31  # above all token ids


@dataclass(slots=True)
class _Group:
    """Jobs of one priority with equal first tokens, sorted by all their tokens."""

    number: int  # order of creation
    entries: list[tuple[bytes, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    max_tokens: int = 0
    ranked_weight: float = -1.0  # the highest weight under which the ranking knows it

    @property
    def decode_weight(self) -> float:
        """Output tokens per prompt token: decode-heavy groups go first and keep the batch full."""
        return self.max_tokens / max(1, self.prompt_tokens)


@dataclass(slots=True)  # never changed; not frozen, which would make it twice as dear to create
class _Job:
    priority: int
    key: bytes
    max_tokens: int
    number: int  # order of arrival
    num_taken_before: int  # admissions before it came


class _Waiting:
    """The waiting jobs of one priority: in groups, which are ranked by decode weight, and in order of arrival.

    Both orders are kept lazily: what has gone is dropped when it comes to the front, so that a step costs the same
    however many wait.
    """

    def __init__(self) -> None:
        self.groups: dict[bytes, _Group] = {}
        self._ranking: list[tuple[float, int, int, _Group]] = []  # heap of (-weight, group number, entry number, group)
        self._arrivals: deque[tuple[str, int]] = deque()  # (job id, number)
        self._num_groups = 0
        self._num_ranked = 0

    def add(self, job_id: str, job: _Job) -> None:
        key = _group_key(job.key)
        group = self.groups.get(key)
        if group is None:
            self._num_groups += 1
            group = self.groups[key] = _Group(self._num_groups)
        insort(group.entries, (job.key, job_id))
        group.prompt_tokens += len(job.key) // _TOKEN_BYTES
        group.max_tokens += job.max_tokens
        self._arrivals.append((job_id, job.number))
        self._rank(group)

    def remove(self, job_id: str, job: _Job) -> None:
        key = _group_key(job.key)
        group = self.groups[key]
        del group.entries[bisect_left(group.entries, (job.key, job_id))]
        group.prompt_tokens -= len(job.key) // _TOKEN_BYTES
        group.max_tokens -= job.max_tokens
        if group.entries:
            self._rank(group)
        else:
            del self.groups[key]

    def heaviest(self) -> _Group:
        """The group of the greatest decode weight; of equals, the oldest."""
        while True:
            group = self._ranking[0][3]
            if not group.entries or self._ranking[0][0] != -group.ranked_weight:
                heappop(self._ranking)
            elif group.decode_weight != group.ranked_weight:  # it has become lighter
                heapreplace(self._ranking, self._entry(group))
            else:
                return group

    def oldest(self, jobs: dict[str, _Job]) -> str:
        """The job that has waited longest; ``jobs`` are those still waiting."""
        while True:
            job_id, number = self._arrivals[0]
            job = jobs.get(job_id)
            if job is not None and job.number == number:
                return job_id
            self._arrivals.popleft()

    def _rank(self, group: _Group) -> None:
        """Make the ranking know a weight at least the group's own; too high a one is put right in ``heaviest``."""
        if group.decode_weight > group.ranked_weight:
            heappush(self._ranking, self._entry(group))

    def _entry(self, group: _Group) -> tuple[float, int, int, _Group]:
        self._num_ranked += 1
        group.ranked_weight = group.decode_weight
        return -group.ranked_weight, group.number, self._num_ranked, group


def planning_ids(token_ids: Sequence[int], lora: str | None) -> Sequence[int]:
    """What a planner is given for a prompt: with an adapter a word that is no token stands before its tokens.

    Jobs of one adapter are neighbours then, and share nothing with those of another, as their KV does not.
    """
    return (
        token_ids if lora is None else (_FIRST_ADAPTER_WORD | crc32(lora.encode("utf-8", "surrogatepass")), *token_ids)
    )


class Planner(Protocol):
    """What decides the order of admission."""

    def __len__(self) -> int: ...

    def __contains__(self, job_id: str) -> bool: ...

    def add(self, job_id: str, token_ids: Sequence[int], *, priority: int = 0, max_tokens: int = 0) -> None:
        """Add a waiting job."""

    def remove(self, job_id: str) -> None:
        """Forget a job."""

    def peek(self) -> str | None:
        """The job to admit next; None when nothing waits."""

    def admit(self, job_id: str) -> None:
        """The job was admitted."""


class ArrivalPlanner:
    """Priority, then arrival: the order of most engines, kept to compare with (``scheduling_policy="fcfs"``)."""

    def __init__(self) -> None:
        self._jobs: dict[int, dict[str, None]] = {}
        self._priorities: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._priorities

    def add(self, job_id: str, token_ids: Sequence[int], *, priority: int = 0, max_tokens: int = 0) -> None:
        """Add a waiting job; its tokens do not matter."""
        self._priorities[job_id] = priority
        self._jobs.setdefault(priority, {})[job_id] = None

    def remove(self, job_id: str) -> None:
        """Forget a job."""
        priority = self._priorities.pop(job_id)
        del self._jobs[priority][job_id]
        if not self._jobs[priority]:
            del self._jobs[priority]

    def peek(self) -> str | None:
        """The oldest job of the smallest priority."""
        return next(iter(self._jobs[min(self._jobs)])) if self._jobs else None

    admit = remove


class PrefixPlanner:
    """Hands out jobs: priority first, then group by group, depth first inside a group.

    Args:
        max_overtaken: the aging bound: a job overtaken by this many later admissions of its priority is next.
    """

    def __init__(self, *, max_overtaken: int = 4096) -> None:
        self._max_overtaken = max_overtaken
        self._jobs: dict[str, _Job] = {}
        self._waiting: dict[int, _Waiting] = {}  # by priority
        self._hot: bytes | None = None  # key of the last job handed out
        self._num_added = 0
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def add(self, job_id: str, token_ids: Sequence[int], *, priority: int = 0, max_tokens: int = 0) -> None:
        """Add a waiting job. ``priority``: smaller runs earlier. ``max_tokens``: expected output length."""
        assert job_id not in self._jobs, f"{job_id} is already waiting"
        self._num_added += 1
        job = _Job(priority, _sort_key(token_ids), max_tokens, self._num_added, self._num_taken)
        self._jobs[job_id] = job
        if priority not in self._waiting:
            self._waiting[priority] = _Waiting()
        self._waiting[priority].add(job_id, job)

    def remove(self, job_id: str) -> None:
        """Forget a job: it was admitted or is no longer wanted."""
        job = self._jobs.pop(job_id)
        waiting = self._waiting[job.priority]
        waiting.remove(job_id, job)
        if not waiting.groups:
            del self._waiting[job.priority]

    @property
    def urgency(self) -> int | None:
        """The smallest priority of which something waits; None when nothing does."""
        return min(self._waiting, default=None)

    @property
    def goes_on(self) -> bool:
        """True while a job of the most urgent priority belongs to the group of the last one admitted."""
        if self._hot is None or not self._jobs:
            return False
        return _group_key(self._hot) in self._waiting[min(self._waiting)].groups

    def follow(self, other: PrefixPlanner) -> None:
        """The last job admitted was one of ``other``'s: its group is the hot one here as well."""
        self._hot = other._hot

    def peek(self) -> str | None:
        """The job to admit next; None when nothing waits."""
        if not self._jobs:
            return None
        waiting = self._waiting[min(self._waiting)]
        oldest = waiting.oldest(self._jobs)
        if self._num_taken - self._jobs[oldest].num_taken_before >= self._max_overtaken:
            return oldest
        if self._hot is not None and (hot := waiting.groups.get(_group_key(self._hot))) is not None:
            return _nearest(hot.entries, self._hot)
        return waiting.heaviest().entries[0][1]

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
