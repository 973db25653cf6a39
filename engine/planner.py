"""PrefixPlanner: the order in which waiting jobs are admitted.

Owns the choice, and the waiting jobs (in ``waiting_groups``). Knows token ids and priorities, nothing of blocks. Jobs
are taken in the order of their token ids, which is the depth-first order of the prefix tree over the whole window:
neighbours share the longest prefixes. Invariant: every job added is handed out exactly once unless removed.
Source: depth-first admission is optimal for prefix reuse (SGLang, arXiv 2312.07104, theorem 3.1; BlendServe, arXiv
2411.16102).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

from kvq.engine.waiting_groups import TOKEN_BYTES, WaitingGroups, WaitingJob, group_key

_FIRST_ADAPTER_WORD = 1 << 31  # above all token ids


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
        max_overtaken: the aging bound: a job that has seen so many admissions of its priority is next, behind only
            those that came before it and have as well. The rest of its group follows at once (what waits then, so that
            late arrivals hold nobody up): a queue longer than the bound is still admitted group by group.
    """

    def __init__(self, *, max_overtaken: int = 4096) -> None:
        self._max_overtaken = max_overtaken
        self._jobs: dict[str, WaitingJob] = {}
        self._waiting: dict[int, WaitingGroups] = {}  # by priority
        self._hot: bytes | None = None  # key of the last job handed out
        self._hot_group: bytes | None = None
        self._num_following = 0  # jobs of the hot group that go before any overdue one
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def add(self, job_id: str, token_ids: Sequence[int], *, priority: int = 0, max_tokens: int = 0) -> None:
        """Add a waiting job. ``priority``: smaller runs earlier. ``max_tokens``: expected output length."""
        assert job_id not in self._jobs, f"{job_id} is already waiting"
        waiting = self._waiting.get(priority)
        if waiting is None:
            waiting = self._waiting[priority] = WaitingGroups()
        self._num_added += 1
        key = _sort_key(token_ids)
        job = WaitingJob(job_id, key, group_key(key), priority, max_tokens, self._num_added, waiting.num_taken)
        self._jobs[job_id] = job
        waiting.add(job)

    def remove(self, job_id: str) -> None:
        """Forget a job: it was admitted or is no longer wanted."""
        job = self._jobs.pop(job_id)
        waiting = self._waiting[job.priority]
        waiting.discard(job)
        if not waiting:
            del self._waiting[job.priority]

    @property
    def urgency(self) -> int | None:
        """The smallest priority of which something waits; None when nothing does."""
        return min(self._waiting, default=None)

    @property
    def goes_on(self) -> bool:
        """True while a job of the most urgent priority belongs to the group of the last one admitted."""
        if self._hot_group is None or not self._jobs:
            return False
        return self._waiting[min(self._waiting)].group(self._hot_group) is not None

    def follow(self, other: PrefixPlanner) -> None:
        """The last job admitted was one of ``other``'s: its group is the hot one here as well."""
        self._hot = other._hot
        if self._hot_group != other._hot_group:
            self._hot_group = other._hot_group
            self._num_following = 0

    def reconsider(self) -> None:
        """Choose the next group anew, as if none had been begun: the last choice knew too little."""
        self._hot = self._hot_group = None
        self._num_following = 0

    def peek(self) -> str | None:
        """The job to admit next; None when nothing waits."""
        return self._next().job_id if self._jobs else None

    def admit(self, job_id: str) -> None:
        """The job was admitted: its group is the hot one now."""
        self._admit(self._jobs[job_id])

    def take(self, k: int) -> list[str]:
        """Admit the next ``k`` jobs, fewer when fewer wait."""
        taken: list[str] = []
        while self._jobs and len(taken) < k:
            job = self._next()
            self._admit(job)
            taken.append(job.job_id)
        return taken

    def _next(self) -> WaitingJob:
        waiting = self._waiting[min(self._waiting)]
        hot = None if self._hot_group is None else waiting.group(self._hot_group)
        if hot is None or not self._num_following:
            oldest = waiting.oldest()
            if self._is_overdue(oldest, waiting):
                return oldest
        if hot is None:
            return waiting.first()
        assert self._hot is not None
        return hot.nearest(self._hot)

    def _admit(self, job: WaitingJob) -> None:
        waiting = self._waiting[job.priority]
        if self._num_following and job.group_key == self._hot_group:
            self._num_following -= 1
        elif self._is_overdue(job, waiting):
            self._num_following = waiting.num_beside(job)
        else:
            self._num_following = 0
        self._hot, self._hot_group = job.key, job.group_key
        waiting.num_taken += 1
        self.remove(job.job_id)

    def _is_overdue(self, job: WaitingJob, waiting: WaitingGroups) -> bool:
        return waiting.num_taken - job.num_taken_before >= self._max_overtaken


def _sort_key(token_ids: Sequence[int]) -> bytes:
    """Big-endian 32-bit words: byte order is token order."""
    words = array("I", token_ids)
    assert words.itemsize == TOKEN_BYTES
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()
