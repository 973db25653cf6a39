"""RowReader: rows of the window become candidates for the engine, or have an end already.

Owns the rows that were looked at and not yet checked and tokenised. Knows no order and claims nothing. Invariant: a row
that is given leaves once, as a candidate or with an end: one that cannot be run as failed, one whose answer is stored
(that of the job it refers to, or of an equal request) with that answer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvq.worker.answers import failed_outcome, served_outcome
from kvq.worker.errors import RowError, StoreError
from kvq.worker.inference import Inference, Prepared
from kvq.worker.jobs import ClaimedJob, JobError, JobOutcome, StoredAnswer, WaitingJob

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

# Rows are tokenised for at most this long before the engine is fed again.
_TOKENISE_S = 0.4

End = Callable[[ClaimedJob], JobOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A row that can be run."""

    row: WaitingJob
    prepared: Prepared


class RowReader:
    """For the feeder's thread.

    Args:
        serve_answers: look for stored answers of equal requests.
        stopping: True once nothing more is to be read.
    """

    def __init__(
        self,
        store: Store,
        inference: Inference,
        *,
        serve_answers: bool,
        stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._inference = inference
        self._serve_answers = serve_answers
        self._stopping = stopping
        self._clock = clock
        self._unread: deque[WaitingJob] = deque()

    def __len__(self) -> int:
        return len(self._unread)

    @property
    def has_fresh(self) -> bool:
        """True when a row that never crashed is still to be read."""
        return any(row.crashes == 0 for row in self._unread)

    def give(self, rows: Iterable[WaitingJob]) -> None:
        """Take over rows to be read."""
        self._unread.extend(rows)

    def read(self) -> tuple[list[Candidate], dict[int, End]]:
        """Read for a while: what can be run, and by seq the ends of the rest.

        Raises:
            StoreError: answers cannot be looked for; the rows are read again.
        """
        until = self._clock() + _TOKENISE_S
        candidates: list[Candidate] = []
        ends: dict[int, End] = {}
        begun = []
        while self._unread and self._clock() < until and not self._stopping():
            row = self._unread.popleft()
            begun.append(row)
            try:
                prepared = self._inference.prepare(row.endpoint, row.body)
            except RowError as err:
                ends[row.seq] = _failing(err)
            except Exception as err:  # a tokenizer or template may raise anything on one row's text
                logger.exception("job %s could not be prepared", row.job_id)
                ends[row.seq] = _failing(RowError("invalid_value", f"the request could not be prepared: {err}"))
            else:
                candidates.append(Candidate(row=row, prepared=prepared))
        try:
            answers = self._answers(candidates)
        except StoreError:
            self._unread.extendleft(reversed(begun))
            raise
        for candidate in candidates:
            answer = answers.get(candidate.row.seq)
            if answer is not None:
                ends[candidate.row.seq] = partial(served_outcome, answer=answer, prepared=candidate.prepared)
        return [candidate for candidate in candidates if candidate.row.seq not in ends], ends

    def _answers(self, candidates: Sequence[Candidate]) -> dict[int, StoredAnswer]:
        """Stored answers by the seq of the candidate that may have them: a look-up each for all that were read."""
        found: dict[int, StoredAnswer] = {}
        keys = {c.row.seq: c.prepared.request_key for c in candidates if c.prepared.request_key is not None}
        if keys and self._serve_answers:
            by_key = self._store.answers_by_key(set(keys.values()))
            found.update((seq, by_key[key]) for seq, key in keys.items() if key in by_key)
        originals = {c.row.seq: c.row.same_as for c in candidates if c.row.same_as is not None}
        if originals:
            by_seq = self._store.answers_by_seq(set(originals.values()))
            found.update((seq, by_seq[original]) for seq, original in originals.items() if original in by_seq)
        return found


def _failing(err: RowError) -> End:
    return partial(failed_outcome, error=JobError(code=err.code, message=err.message))
