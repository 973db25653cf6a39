"""Input files: JSON lines in OpenAI's batch form or the short form, checked whole before anything is enqueued.

Owns reading (plain, gzip or standard input; a byte order mark; LF or CRLF; blank lines) and what a line
must hold. Knows no SQL. Two passes over the file keep memory flat: the first keeps a digest of each
custom_id, the second yields the jobs. Invariant: line numbers are the file's own, blank lines counted, and
both passes give each line the same verdict.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from kvq.worker.bodies import parse_body
from kvq.worker.errors import FileUnreadable, RowError
from kvq.worker.jobs import Endpoint, JobError, NewJob
from kvq.worker.json_values import as_text, json_kind, wrong_type
from kvq.worker.model_names import require_model

MAX_CUSTOM_ID_LENGTH = 512
_LINE_FIELDS = ("custom_id", "method", "url", "body")
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


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


class InputFile:
    """One input file, opened by :func:`open_input` and readable as often as needed while that block lasts."""

    def __init__(self, path: str, raw: IO[bytes]) -> None:
        self.path = path
        self._raw = raw
        self._gzipped = path.endswith(".gz") or raw.read(2) == _GZIP_MAGIC
        self._bad_by_line: dict[int, BadRow] = {}

    def check(self, served: Iterable[str] | None = None) -> FileReport:
        """Read everything and judge every line; ``served`` are the model names rows may ask for.

        Raises:
            FileUnreadable: when the file cannot be read as text lines at all, or holds no rows.
        """
        names = None if served is None else tuple(served)
        sha256 = hashlib.sha256()
        line_by_id: dict[bytes, int] = {}
        bad: list[BadRow] = []
        num_lines = num_good = 0
        for line_no, raw in self._lines(sha256.update):
            num_lines = line_no
            if not raw:
                continue
            line = _read_line(line_no, raw, names)
            first = line_by_id.setdefault(_digest(line.custom_id), line_no)
            error = line.error
            if error is None and first != line_no:
                error = RowError(
                    "duplicate_custom_id",
                    f"custom_id {line.custom_id!r} is already used on line {first}",
                    param="custom_id",
                )
            if error is None:
                num_good += 1
            else:
                custom_id = line.custom_id if line.has_own_id else None
                bad.append(BadRow(line_no=line_no, custom_id=custom_id, code=error.code, message=error.message))
        if not num_good and not bad:
            raise FileUnreadable(f"{self.path}: holds no rows; write one JSON object a line")
        self._bad_by_line = {row.line_no: row for row in bad}
        return FileReport(
            path=self.path, num_lines=num_lines, num_good=num_good, bad=tuple(bad), sha256=sha256.hexdigest()
        )

    def jobs(self, *, batch_id: str, queue: str, priority: int = 0) -> Iterator[NewJob]:
        """One job a row in file order; the bad rows of :meth:`check`, which must come first, carry their error.

        The job id is derived from the batch id and the line number, so that giving the same file again
        inserts nothing twice.
        """
        for line_no, raw in self._lines(_ignore):
            if not raw:
                continue
            line = _read_line(line_no, raw, None)
            bad = self._bad_by_line.get(line_no)
            if line.error is not None and bad is None:
                raise FileUnreadable(f"{self.path}: line {line_no} changed while the file was read; start again")
            yield NewJob(
                job_id=str(uuid.uuid5(uuid.UUID(batch_id), str(line_no))),
                custom_id=line.custom_id,
                endpoint=line.endpoint,
                body=line.body,
                line_no=line_no,
                queue=queue,
                priority=priority,
                model=_model(line.body),
                error=None if bad is None else JobError(code=bad.code, message=bad.message),
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


@contextmanager
def open_requests(requests: Iterable[Any]) -> Iterator[InputFile]:
    """The same for requests that are Python objects: they are written to a temporary file as JSON lines."""
    with tempfile.TemporaryFile() as copy:
        for request in requests:
            copy.write(json.dumps(request).encode() + b"\n")
        copy.seek(0)
        yield InputFile("requests", copy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line as read. Where ``error`` is set, the other fields are what could still be told."""

    custom_id: str
    has_own_id: bool = False
    endpoint: Endpoint = Endpoint.CHAT
    body: dict[str, Any]
    error: RowError | None = None


def _read_line(line_no: int, raw: bytes, served: tuple[str, ...] | None) -> _Line:
    custom_id: str | None = None
    endpoint = Endpoint.CHAT
    body: dict[str, Any] = {}
    error: RowError | None = None
    try:
        row = _parse_object(raw)
        custom_id = _custom_id(row)
        endpoint, body = _request(row)
        parsed = parse_body(endpoint, body)
        if served is not None:
            require_model(parsed.model, served)
    except RowError as err:
        error = err
    return _Line(
        custom_id=f"line-{line_no}" if custom_id is None else custom_id,
        has_own_id=custom_id is not None,
        endpoint=endpoint,
        body=body,
        error=error,
    )


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        row = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as err:
        raise RowError("invalid_json", f"is not UTF-8 (byte {err.start + 1} of the line)") from err
    except json.JSONDecodeError as err:
        raise RowError("invalid_json", f"is not valid JSON: {err.msg} at column {err.colno}") from err
    except (ValueError, RecursionError) as err:  # NaN; an integer of thousands of digits; nested without end
        raise RowError("invalid_json", f"is not valid JSON: {err}") from err
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"is {json_kind(row)}, not an object")
    return row


def _custom_id(row: dict[str, Any]) -> str | None:
    """``custom_id``, or ``id`` in the short form, where a number will do."""
    if "custom_id" in row and "id" in row:
        raise RowError("unknown_field", "id: is given beside custom_id; keep one of them", param="id")
    name = "custom_id" if "custom_id" in row else "id"
    value = row.get(name)
    if value is None:
        return None
    if name == "id" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    custom_id = as_text(name, value)
    if not custom_id:
        raise RowError("invalid_value", f"{name}: is empty", param=name)
    if "\0" in custom_id:
        raise RowError("invalid_value", f"{name}: holds a NUL character, which SQL cannot store", param=name)
    if len(custom_id) > MAX_CUSTOM_ID_LENGTH:
        raise RowError(
            "invalid_value",
            f"{name}: has {len(custom_id)} characters; at most {MAX_CUSTOM_ID_LENGTH} are allowed",
            param=name,
        )
    return custom_id


def _request(row: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint and body of a line in either form. A prompt at the top makes it the short form."""
    if "messages" in row or "prompt" in row:
        return _short_form(row)
    for name in row:
        if name not in _LINE_FIELDS:
            raise RowError(
                "unknown_field",
                f"{name}: is not a field of a line; a line has {', '.join(_LINE_FIELDS)} "
                "or, in the short form, messages or prompt",
                param=name,
            )
    missing = [name for name in _LINE_FIELDS if row.get(name) is None]
    if missing:
        raise RowError(
            "missing_field",
            f"{', '.join(missing)}: missing; a line has {', '.join(_LINE_FIELDS)} "
            "or, in the short form, messages or prompt",
            param=missing[0],
        )
    if row["method"] != "POST":
        raise RowError("invalid_value", f"method: must be POST, got {row['method']!r}", param="method")
    url = as_text("url", row["url"])
    if url not in tuple(Endpoint):
        raise RowError("unknown_url", f"url: must be {' or '.join(Endpoint)}, got {url!r}", param="url")
    if not isinstance(row["body"], dict):
        raise wrong_type("body", "an object", row["body"])
    return Endpoint(url), row["body"]


def _short_form(row: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    for name in ("method", "url", "body"):
        if name in row:
            raise RowError(
                "unknown_field", f"{name}: is given beside a prompt; the prompt belongs into the body", param=name
            )
    if "messages" in row and "prompt" in row:
        raise RowError("unknown_field", "prompt: is given beside messages; keep one of them", param="prompt")
    body = {name: value for name, value in row.items() if name not in ("id", "custom_id")}
    return Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS, body


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _ignore(_: bytes) -> None:
    pass


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
