"""WaitingGroups: the waiting jobs of one priority, in groups that begin alike.

Owns their orders: groups by decode weight, jobs by arrival, and the jobs of a group by all their tokens, around the
place where the last one was taken. Knows sort keys, not how they are made, and not which job is next. All orders are
lazy: what arrives is sorted in when its group is asked, many at a time; what leaves is marked, and dropped when it
comes to the front. So a job costs the same few comparisons however many wait.
A job that nothing waits beside is a group by itself, without a record of one: a queue of unlike prompts has as many
groups as jobs, and what Python's collector must look at is what it costs.
Invariant: a job is in one group from ``add`` to ``discard``, and a group without jobs is forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

TOKEN_BYTES = 4
# Jobs whose first GROUP_TOKENS tokens agree form a group: the unit that is finished before the next is begun.
GROUP_TOKENS = 32

# Fewer arrivals than this part of a group are inserted one by one, more are sorted in together.
_SORT_FROM = 1 / 8
# Jobs that left are swept out when there are more than so many, and more than are waiting.
_SWEEP_FROM = 64


@dataclass(slots=True, eq=False)  # not frozen, which would make it twice as dear to create
class WaitingJob:
    """A job: ``key`` are its tokens as bytes, ``number`` its place in the order of arrival of all jobs."""

    job_id: str
    key: bytes
    group_key: bytes  # of this object there is one for each group
    priority: int
    max_tokens: int
    number: int
    num_taken_before: int  # admissions of its priority before it came
    is_waiting: bool = True
    is_alone: bool = False  # it waits, and nothing else of its group

    @property
    def decode_weight(self) -> float:
        """Of the group that it is, where nothing else is in it."""
        return self.max_tokens / max(1, len(self.key) // TOKEN_BYTES)


# Sorted by key, then by id. The number decides between a job and one of the same name that left.
_Entry = tuple[bytes, str, int, WaitingJob]


class Group:
    """Jobs with equal first tokens, sorted around a place: a gap buffer, in which taking neighbours moves nothing."""

    __slots__ = (
        "_after",
        "_before",
        "_fresh",
        "is_ranked",
        "key",
        "max_tokens",
        "num_prompt_tokens",
        "num_waiting",
        "number",
        "ranked_weight",
    )

    def __init__(self, key: bytes, number: int) -> None:
        self.key = key
        self.number = number  # of its first job
        self.num_waiting = 0
        self.num_prompt_tokens = 0
        self.max_tokens = 0
        self.ranked_weight = -1.0  # the highest weight under which the ranking knows it
        self.is_ranked = True  # the ranking knows of a weight at least the group's own
        self._before: list[_Entry] = []  # keys below the place, ascending
        self._after: list[_Entry] = []  # the others, descending
        self._fresh: list[WaitingJob] = []  # not sorted in yet

    @property
    def decode_weight(self) -> float:
        """Output tokens per prompt token: decode-heavy groups go first and keep the batch full."""
        return self.max_tokens / max(1, self.num_prompt_tokens)

    def add(self, job: WaitingJob) -> None:
        self._fresh.append(job)
        self.num_waiting += 1
        self.num_prompt_tokens += len(job.key) // TOKEN_BYTES
        self.max_tokens += job.max_tokens

    def discard(self, job: WaitingJob) -> None:
        """The job, marked already, is not waiting any more."""
        self.num_waiting -= 1
        self.num_prompt_tokens -= len(job.key) // TOKEN_BYTES
        self.max_tokens -= job.max_tokens
        num_gone = len(self._before) + len(self._after) + len(self._fresh) - self.num_waiting
        if num_gone > _SWEEP_FROM and num_gone > self.num_waiting:
            self._before = [entry for entry in self._before if entry[3].is_waiting]
            self._after = [entry for entry in self._after if entry[3].is_waiting]
            self._fresh = [job for job in self._fresh if job.is_waiting]

    def first(self) -> WaitingJob:
        """The first job in sorted order."""
        return self.nearest(b"")

    def nearest(self, place: bytes) -> WaitingJob:
        """The job that shares the longest prefix with ``place``: a neighbour in sorted order; of two, the later."""
        if self._fresh:
            self._sort_in()
        before, after = self._before, self._after
        if before and before[-1][0] >= place:
            split = bisect_left(before, (place,))
            after.extend(reversed(before[split:]))
            del before[split:]
        elif after and after[-1][0] < place:
            split = _num_from(after, place)
            before.extend(reversed(after[split:]))
            del after[split:]
        while before and not before[-1][3].is_waiting:
            before.pop()
        while after and not after[-1][3].is_waiting:
            after.pop()
        if not after or (before and common_tokens(before[-1][0], place) > common_tokens(after[-1][0], place)):
            return before[-1][3]
        return after[-1][3]

    def _sort_in(self) -> None:
        fresh = [(job.key, job.job_id, job.number, job) for job in self._fresh if job.is_waiting]
        self._fresh = []
        after = self._after
        after.extend(reversed(self._before))
        self._before = []
        if len(fresh) < _SORT_FROM * len(after):
            after.reverse()
            for entry in fresh:
                insort(after, entry)
            after.reverse()
        else:
            after.extend(fresh)
            after.sort(reverse=True)


class WaitingGroups:
    """The groups of one priority, which are ranked, and the order of arrival."""

    def __init__(self) -> None:
        self.num_taken = 0  # jobs admitted; the planner's to count
        self._groups: dict[bytes, Group | WaitingJob] = {}
        # Heap of (-weight, number, entry number, group or lone job); an entry may have become untrue.
        self._ranking: list[tuple[float, int, int, Group | WaitingJob]] = []
        self._unranked: list[Group | WaitingJob] = []
        self._arrivals: deque[WaitingJob] = deque()
        self._num_ranked = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def group(self, key: bytes) -> Group | None:
        """The group of this key; None where nothing of it waits."""
        found = self._groups.get(key)
        return self._begin(found) if isinstance(found, WaitingJob) else found

    def num_beside(self, job: WaitingJob) -> int:
        """Others that wait in its group."""
        found = self._groups[job.group_key]
        return 0 if isinstance(found, WaitingJob) else found.num_waiting - 1

    def add(self, job: WaitingJob) -> None:
        found = self._groups.get(job.group_key)
        if found is None:
            self._groups[job.group_key] = job
            job.is_alone = True
            self._unranked.append(job)
        else:
            group = self._begin(found) if isinstance(found, WaitingJob) else found
            job.group_key = group.key
            group.add(job)
            self._rank_again(group)
        self._arrivals.append(job)

    def discard(self, job: WaitingJob) -> None:
        """The job is not waiting any more."""
        job.is_waiting = job.is_alone = False
        group = self._groups[job.group_key]
        if isinstance(group, WaitingJob):
            del self._groups[job.group_key]
        else:
            group.discard(job)
            if group.num_waiting:
                self._rank_again(group)
            else:
                del self._groups[job.group_key]
        job.key = b""  # the order of arrival may hold the job for long

    def first(self) -> WaitingJob:
        """The first job of the group of the greatest decode weight; of equals, of the oldest."""
        for new in self._unranked:
            if isinstance(new, WaitingJob):
                if new.is_alone:
                    self._num_ranked += 1
                    heappush(self._ranking, (-new.decode_weight, new.number, self._num_ranked, new))
                continue
            new.is_ranked = True
            if new.num_waiting and new.decode_weight > new.ranked_weight:
                heappush(self._ranking, self._entry(new))
        self._unranked.clear()
        while True:
            weight, _, _, found = self._ranking[0]
            if isinstance(found, WaitingJob):
                if found.is_alone:
                    return found
                heappop(self._ranking)
            elif not found.num_waiting or weight != -found.ranked_weight:
                heappop(self._ranking)
            elif found.decode_weight != found.ranked_weight:  # it has become lighter
                heapreplace(self._ranking, self._entry(found))
            else:
                return found.first()

    def oldest(self) -> WaitingJob:
        """The job that has waited longest."""
        while not self._arrivals[0].is_waiting:
            self._arrivals.popleft()
        return self._arrivals[0]

    def _begin(self, job: WaitingJob) -> Group:
        """A record of the group that a lone job is."""
        job.is_alone = False
        group = self._groups[job.group_key] = Group(job.group_key, job.number)
        group.add(job)
        self._rank_again(group)
        return group

    def _rank_again(self, group: Group) -> None:
        if group.is_ranked:
            group.is_ranked = False
            self._unranked.append(group)

    def _entry(self, group: Group) -> tuple[float, int, int, Group]:
        self._num_ranked += 1
        group.ranked_weight = group.decode_weight
        return -group.ranked_weight, group.number, self._num_ranked, group


def group_key(key: bytes) -> bytes:
    """What the keys of a group have in common."""
    return key[: GROUP_TOKENS * TOKEN_BYTES]


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of equal leading tokens, by bisection over slices (compared at memory speed)."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * TOKEN_BYTES : middle * TOKEN_BYTES] == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def _num_from(descending: list[_Entry], place: bytes) -> int:
    """How many of the entries have keys not below ``place``."""
    low, high = 0, len(descending)
    while low < high:
        middle = (low + high) // 2
        if descending[middle][0] >= place:
            low = middle + 1
        else:
            high = middle
    return low
