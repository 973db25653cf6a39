"""Window: which waiting rows are looked at, so that planning sees something of everybody.

Owns the seqs of the rows in the look-ahead window and where each came from. Knows of tokens only how many a row has on
average, and no order of admission.
Invariants: nothing is read twice while it is known; every lane of the most urgent priority (a batch, or a tenant's jobs
without a batch) has rows in the window, whatever the others hold, from the look after it came; crash suspects are read
apart from the rest, so that no number of fresh jobs hides them; at most twice the window is known, or the window and a
row of each of 256 lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvq.worker.jobs import Lane, WaitingJob

if TYPE_CHECKING:
    from kvq.worker.store import Store

# Few: they run one to four at a time.
MAX_SUSPECTS = 16
# A lane that finds the window full gets up to so many rows beyond it.
_ROWS_BEYOND = 64
# Lanes looked at in one look; where there are more they take turns.
_MAX_LANES = 256
# A lane that holds this share of its part is not topped up.
_FULL_SHARE = 0.75
# Until the first rows were tokenised.
_FIRST_ROWS = 256
# The average follows about so many rows.
_AVERAGED_ROWS = 1024
# What is left of the window is worth a look at every lane when it is at least this part (1 / 8) of theirs.
_FEWEST_SHARE = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row was found: a lane, or among the suspects (None)."""

    lane: tuple[int, int] | None


_SUSPECTS = _Place(None)


class Window:
    """The rows that one worker knows of, for its feeder's thread.

    Args:
        size: most rows to be planned over.
        tokens: about how many prompt tokens these may have: where rows are long, fewer are read.
        by_lane: share the window between lanes; else it holds the first rows by priority and age.
    """

    def __init__(self, store: Store, *, queue: str, size: int, tokens: int, by_lane: bool) -> None:
        self._store = store
        self._queue = queue
        self._most_rows = size
        self._most_tokens = tokens
        self._size = min(size, _FIRST_ROWS)  # for the tokens that rows have; grows and shrinks
        self._size_looked_at = self._size
        self._num_averaged = 0
        self._mean_tokens = 0.0
        self._by_lane = by_lane
        self._seqs: dict[_Place, set[int]] = {}
        self._place_by_seq: dict[int, _Place] = {}
        self._refill_at: dict[_Place, int] = {}  # places with more rows -> number of rows at which to look again
        self._refill_all_at: int | None = None  # the same of the whole window, where lanes do not matter
        self._last_lane: tuple[int, int] | None = None  # where the next look at too many lanes begins

    def __len__(self) -> int:
        return len(self._place_by_seq)

    @property
    def runs_low(self) -> bool:
        """True when a look now would probably find rows that are soon needed."""
        if self._refill_all_at is not None and len(self) <= self._refill_all_at:
            return True
        if self._size >= 2 * self._size_looked_at and (self._refill_at or self._refill_all_at is not None):
            return True
        return any(self._num_known(place) <= number for place, number in self._refill_at.items())

    def learn(self, num_tokens: int) -> None:
        """A row was tokenised."""
        self._num_averaged = min(self._num_averaged + 1, _AVERAGED_ROWS)
        self._mean_tokens += (num_tokens - self._mean_tokens) / self._num_averaged
        self._size = max(1, min(self._most_rows, int(self._most_tokens / max(1.0, self._mean_tokens))))

    def forget(self, seqs: Iterable[int]) -> None:
        """Rows were claimed, or are gone: should they be queued again, they are read again."""
        for seq in seqs:
            place = self._place_by_seq.pop(seq, None)
            if place is not None:
                self._seqs[place].discard(seq)

    def look(self, *, without_tenants: Collection[str] = ()) -> list[WaitingJob]:
        """Read rows that are not known yet; ``without_tenants`` may start nothing now.

        Raises:
            StoreError: the database cannot be read.
        """
        self._refill_all_at = None
        self._size_looked_at = self._size
        self._seqs = {place: seqs for place, seqs in self._seqs.items() if seqs}
        suspects = self._look_for_suspects()
        if not self._by_lane:
            return suspects + self._look_anywhere(without_tenants)
        rows: list[WaitingJob] = []
        lanes = [lane for lane in self._lanes() if lane.tenant not in without_tenants]
        places = {_place(lane) for lane in lanes}
        self._refill_at = {place: number for place, number in self._refill_at.items() if place in places}
        most_urgent = True
        for _, group in groupby(lanes, key=lambda lane: lane.priority):
            of_one_priority = list(group)
            rows += self._look_at(of_one_priority, beyond=most_urgent)
            if self._room <= 0:
                break
            if any(self._num_known(_place(lane)) for lane in of_one_priority):
                most_urgent = False
        return suspects + rows

    # -- what is read --------------------------------------------------------------------------------------

    def _look_for_suspects(self) -> list[WaitingJob]:
        room = MAX_SUSPECTS - self._num_known(_SUSPECTS)
        if room <= 0:
            return []
        known = self._seqs.get(_SUSPECTS, ())
        return self._note(_SUSPECTS, self._store.peek_suspects(self._queue, limit=room, exclude_seqs=known), room)

    def _look_anywhere(self, without_tenants: Collection[str]) -> list[WaitingJob]:
        """The first rows by priority and age; with a full window, only those more urgent than its last."""
        room = self._room
        limit = room if room > 0 else _ROWS_BEYOND
        worst = max((place.lane[0] for place in self._seqs if place.lane is not None), default=0)
        rows = self._store.peek_fresh(
            self._queue, limit=limit, exclude_seqs=self._place_by_seq, exclude_tenants=without_tenants
        )
        if room <= 0:
            rows = [row for row in rows if row.priority < worst]
        self._refill_all_at = self._size * 3 // 4 if room > 0 and len(rows) == limit else None
        found = []
        for row in rows:
            found += self._note(_Place((row.priority, 0)), [row], 0)
        return found

    def _look_at(self, lanes: Sequence[Lane], *, beyond: bool) -> list[WaitingJob]:
        """Rows of lanes of one priority: a part of the window for each, then what is left to those that have more."""
        part = max(1, self._size // len(lanes))
        least = min(part, _ROWS_BEYOND) if beyond else 0
        rows: list[WaitingJob] = []
        for lane in lanes:
            num_known = self._num_known(_place(lane))
            if num_known < _FULL_SHARE * part:
                rows += self._read(lane, max(min(part - num_known, self._room), least - num_known))
        while hungry := [lane for lane in lanes if _place(lane) in self._refill_at]:
            limit = self._room // len(hungry)
            if limit < max(1, part // _FEWEST_SHARE):
                break
            found = [row for lane in hungry for row in self._read(lane, limit)]
            if not found:
                break
            rows += found
        return rows

    def _read(self, lane: Lane, limit: int) -> list[WaitingJob]:
        if limit <= 0:
            return []
        place = _place(lane)
        rows = self._store.peek_lane(lane, limit=limit, exclude_seqs=self._seqs.get(place, ()))
        return self._note(place, rows, limit)

    def _note(self, place: _Place, rows: list[WaitingJob], limit: int) -> list[WaitingJob]:
        seqs = self._seqs.setdefault(place, set())
        fresh = [row for row in rows if row.seq not in self._place_by_seq]
        for row in fresh:
            seqs.add(row.seq)
            self._place_by_seq[row.seq] = place
        self._refill_at.pop(place, None)
        if len(rows) == limit and place is not _SUSPECTS:
            self._refill_at[place] = len(seqs) // 2
        return fresh

    # -- lanes -----------------------------------------------------------------------------------------------

    def _lanes(self) -> Iterator[Lane]:
        """Lanes in order of urgency; where one priority has more than fit, those behind the last ones seen."""
        lanes = self._store.lanes(self._queue, limit=_MAX_LANES)
        if len(lanes) < _MAX_LANES or lanes[0].priority != lanes[-1].priority:
            self._last_lane = None
            yield from lanes
            return
        if self._last_lane is not None and self._last_lane[0] == lanes[0].priority:
            turn = self._store.lanes(self._queue, limit=_MAX_LANES, after=self._last_lane)
            lanes = [lane for lane in turn if lane.priority == lanes[0].priority] or lanes
        self._last_lane = (lanes[-1].priority, lanes[-1].flow)
        yield from lanes

    @property
    def _room(self) -> int:
        return self._size - len(self._place_by_seq) + self._num_known(_SUSPECTS)

    def _num_known(self, place: _Place) -> int:
        return len(self._seqs.get(place, ()))


def _place(lane: Lane) -> _Place:
    return _Place((lane.priority, lane.flow))
