"""Input files: JSON lines in OpenAI's batch form or the short form, checked whole before anything is enqueued.

Owns reading: plain, gzip or standard input; a byte order mark; LF or CRLF; blank lines. Knows no SQL, and leaves what a
line must hold to lines.py and bodies.py. Two passes over the file keep memory flat: the first (FileCheck) judges every
line, the second yields the jobs and need not look into bodies again. Invariant: line numbers are the file's own,
blank lines counted.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import IO, Any

from kvq.worker.errors import FileUnreadable
from kvq.worker.file_check import BadRow, FileCheck, FileReport
from kvq.worker.jobs import DEFAULT_TENANT, JobError, NewJob
from kvq.worker.lines import MAX_CUSTOM_ID_LENGTH, reread_line

__all__ = ["MAX_CUSTOM_ID_LENGTH", "BadRow", "FileCheck", "FileReport", "InputFile", "open_input", "open_requests"]

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class InputFile:
    """One input file, opened by :func:`open_input` and readable as often as needed while that block lasts."""

    def __init__(self, path: str, raw: IO[bytes]) -> None:
        self.path = path
        self._raw = raw
        self._gzipped = path.endswith(".gz") or raw.read(2) == _GZIP_MAGIC
        self._bad_by_line: dict[int, BadRow] = {}

    def check(self, served: Iterable[str] | None = None, adapters: Iterable[str] = ()) -> FileReport:
        """Read everything and judge every line; ``served`` are the model names rows may ask for, or ``adapters``.

        Raises:
            FileUnreadable: when the file cannot be read as text lines at all, or holds no rows.
        """
        check = self.begin_check(served, adapters)
        check.run()
        return self.end_check(check)

    def begin_check(self, served: Iterable[str] | None = None, adapters: Iterable[str] = ()) -> FileCheck:
        """A check to be run in pieces; the file must not be read otherwise meanwhile."""
        names = None if served is None else tuple(served)
        return FileCheck(self.path, self._lines, names, adapters=frozenset(adapters))

    def end_check(self, check: FileCheck) -> FileReport:
        """The report of a check that was run to its end. Raises FileUnreadable: the file holds no rows."""
        report = check.report()
        self._bad_by_line = {row.line_no: row for row in report.bad}
        return report

    @staticmethod
    def head(check: FileCheck) -> InputFile:
        """The first lines of a file whose check found no fault so far, as a file of their own."""
        return InputFile("", io.BytesIO(check.head))

    def jobs(
        self,
        *,
        batch_id: str,
        queue: str,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        deadline: datetime | None = None,
    ) -> Iterator[NewJob]:
        """One job a row in file order; the bad rows of :meth:`check`, which must come first, carry their error.

        The job id is derived from the batch id and the line number, so that giving the same file again
        inserts nothing twice.
        """
        of_batch = _namer(uuid.UUID(batch_id))
        for line_no, raw in self._lines(_ignore):
            if not raw:
                continue
            line = reread_line(line_no, raw)
            bad = self._bad_by_line.get(line_no)
            if line.error is not None and bad is None:
                raise FileUnreadable(f"{self.path}: line {line_no} changed while the file was read; start again")
            yield NewJob(
                job_id=of_batch(line_no),
                custom_id=line.custom_id,
                endpoint=line.endpoint,
                body=line.body,
                line_no=line_no,
                queue=queue,
                priority=priority,
                model=_model(line.body),
                error=None if bad is None else JobError(code=bad.code, message=bad.message),
                tenant=tenant,
                deadline=deadline,
                dedup_key=line.dedup_key,
            )

    def _lines(self, feed: Callable[[bytes], None]) -> Iterator[tuple[int, bytes]]:
        """Numbered lines without white space around them; ``feed`` sees the text as it is."""
        self._raw.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=self._raw) if self._gzipped else self._raw  # type: ignore[assignment]
        try:
            for line_no, raw in enumerate(stream, start=1):
                feed(raw)
                if line_no == 1:
                    if raw.startswith(_UTF16_BOMS):
                        raise FileUnreadable(f"{self.path}: is UTF-16; write it as UTF-8")
                    raw = raw.removeprefix(_UTF8_BOM)
                yield line_no, raw.strip()
        except (EOFError, gzip.BadGzipFile, zlib.error) as err:
            raise FileUnreadable(f"{self.path}: cannot be decompressed: {err}") from err


@contextmanager
def open_input(path: str) -> Iterator[InputFile]:
    """Open a file by name, or standard input as ``-`` (copied to a temporary file to be read twice).

    Raises:
        FileUnreadable: when the file cannot be opened; the message says why.
    """
    if path == "-":
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
            copy.seek(0)
            yield InputFile("-", copy)
        return
    try:
        raw = open(path, "rb")  # noqa: SIM115  closed below; only the opening may be blamed on the path
    except OSError as err:
        raise FileUnreadable(f"{path}: {err.strerror or err}") from err
    with raw:
        yield InputFile(path, raw)


def name_of(path: str) -> str | None:
    """What the batch of a file is called where nobody gave it a name; standard input has none."""
    return None if path == "-" else os.path.basename(path)


@contextmanager
def open_requests(requests: Iterable[Any]) -> Iterator[InputFile]:
    """The same for requests that are Python objects: they are written to a temporary file as JSON lines."""
    with tempfile.TemporaryFile() as copy:
        for request in requests:
            copy.write(json.dumps(request).encode() + b"\n")
        copy.seek(0)
        yield InputFile("requests", copy)


def _namer(batch_id: uuid.UUID) -> Callable[[int], str]:
    """Line number -> ``uuid5(batch_id, line number)`` as text."""
    begun = hashlib.sha1(batch_id.bytes, usedforsecurity=False)

    def name(line_no: int) -> str:
        digest = begun.copy()
        digest.update(b"%d" % line_no)
        octets = bytearray(digest.digest()[:16])
        octets[6] = octets[6] & 0x0F | 0x50  # version 5
        octets[8] = octets[8] & 0x3F | 0x80  # RFC 4122's variant
        text = octets.hex()
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    return name


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _ignore(_: bytes) -> None:
    pass
