"""FileCheck: every line of an input file judged, in pieces if need be.

Owns the verdicts and a digest of each custom_id, 24 bytes a line, so that memory stays flat. Knows no SQL.
Invariant: whatever the pieces, the report is the same.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvq.worker.errors import FileUnreadable, RowError
from kvq.worker.known_bodies import KnownBodies
from kvq.worker.lines import Line, read_line
from kvq.worker.model_names import requested_adapter

# How often the clock is looked at, in lines.
_LINES_PER_LOOK = 256
_DIGEST_BYTES = 16
# The beginning of a file that is kept, so that it can be enqueued before the rest is checked.
_HEAD_LINES = 1000
_HEAD_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A line that cannot become a job, and why."""

    line_no: int
    custom_id: str | None
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What a whole file holds. ``sha256`` is of its text, so that ``a.jsonl`` and ``a.jsonl.gz`` are one file."""

    path: str
    num_lines: int
    num_good: int
    bad: tuple[BadRow, ...]
    sha256: str

    @property
    def num_rows(self) -> int:
        """Lines that are not blank."""
        return self.num_good + len(self.bad)


Lines = Iterator[tuple[int, bytes]]


class FileCheck:
    """The check of one file.

    Args:
        path: for messages.
        lines: reads the file from its beginning, as numbered lines without white space around them; what it is given
            sees the text as it is.
        served: the model names rows may ask for; None: any.
        adapters: names of LoRA adapters that they may ask for as well.
        clock: monotonic.
    """

    def __init__(
        self,
        path: str,
        lines: Callable[[Callable[[bytes], None]], Lines],
        served: tuple[str, ...] | None,
        *,
        adapters: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._open = lines
        self._sha256 = hashlib.sha256()
        self._lines = lines(self._sha256.update)
        self._served = served
        self._adapters = adapters
        self._clock = clock
        self._bodies = KnownBodies()
        self._num_lines = 0
        self._line_nos = array("Q")  # of the rows: lines that are not blank
        self._digests = bytearray()  # of their custom_ids
        self._bad: dict[int, BadRow] = {}
        self._head = bytearray()
        self._head_grows = True

    def run(self, until_s: float | None = None) -> bool:
        """Go on until the clock shows ``until_s``, or to the end; True at the end.

        Raises:
            FileUnreadable: the file cannot be read as text lines at all.
        """
        digest = hashlib.blake2b
        for line_no, raw in self._lines:
            self._num_lines = line_no
            if self._head_grows:
                self._head += raw + b"\n"
                self._head_grows = line_no < _HEAD_LINES and len(self._head) < _HEAD_BYTES
            if raw:
                line = read_line(line_no, raw)
                error = line.error or self._fault(line)
                self._line_nos.append(line_no)
                self._digests += digest(
                    line.custom_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
                ).digest()
                if error is not None:
                    self._bad[line_no] = _bad_row(line_no, line, error)
            if until_s is not None and line_no % _LINES_PER_LOOK == 0 and self._clock() >= until_s:
                return False
        return True

    @property
    def flawless(self) -> bool:
        """True while no line read so far is bad."""
        return not self._bad and not self._repeated()

    @property
    def head(self) -> bytes:
        """The first lines of the file, blank ones too: up to a thousand, as far as they were read."""
        return bytes(self._head)

    def report(self) -> FileReport:
        """What the file holds, once ``run`` came to its end.

        Raises:
            FileUnreadable: the file holds no rows.
        """
        if not self._line_nos:
            raise FileUnreadable(f"{self._path}: holds no rows; write one JSON object a line")
        self._blame_repeated()
        return FileReport(
            path=self._path,
            num_lines=self._num_lines,
            num_good=len(self._line_nos) - len(self._bad),
            bad=tuple(self._bad[line_no] for line_no in sorted(self._bad)),
            sha256=self._sha256.hexdigest(),
        )

    def _fault(self, line: Line) -> RowError | None:
        try:
            parsed = self._bodies.read(line.endpoint, line.body)
            if self._served is not None:
                requested_adapter(parsed.model, self._served, self._adapters)
        except RowError as err:
            return err
        return None

    def _repeated(self) -> dict[int, int]:
        """Lines whose custom_id an earlier line has, and that line."""
        if len(self._line_nos) < 2:
            return {}
        import numpy as np

        halves = np.frombuffer(self._digests, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        ordered = halves[order]
        same = (ordered[1:] == ordered[:-1]).all(axis=1)
        first_by_line: dict[int, int] = {}
        first = 0
        for place in np.flatnonzero(same).tolist():  # place and the next one are equal, earlier lines first
            if not (place and same[place - 1]):
                first = self._line_nos[int(order[place])]
            first_by_line[self._line_nos[int(order[place + 1])]] = first
        return first_by_line

    def _blame_repeated(self) -> None:
        """Lines that are bad otherwise keep that verdict. The others are read again, for their words."""
        first_by_line = {no: first for no, first in self._repeated().items() if no not in self._bad}
        if not first_by_line:
            return
        for line_no, raw in self._open(_ignore):
            if line_no in first_by_line:
                line = read_line(line_no, raw)
                error = RowError(
                    "duplicate_custom_id",
                    f"custom_id {line.custom_id!r} is already used on line {first_by_line[line_no]}",
                    param="custom_id",
                )
                self._bad[line_no] = _bad_row(line_no, line, error)


def _bad_row(line_no: int, line: Line, error: RowError) -> BadRow:
    custom_id = line.custom_id if line.has_own_id else None
    return BadRow(line_no=line_no, custom_id=custom_id, code=error.code, message=error.message)


def _ignore(_: bytes) -> None:
    pass
