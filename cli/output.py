"""Printing: tables, JSON and messages. stdout is data, stderr is talk.

Knows no command. Invariant: nothing but the data asked for is written to stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import IO, Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from kvq.cli.main import NO_ROOM

# Terminals tell their width; a pipe does not, and must not have its columns cut to 80.
_PIPE_WIDTH = 200
_BETWEEN_COLUMNS = 2
_USUAL_WORD = 12
_MOST_LINES = 3


def say(message: str) -> None:
    """A message for the person, on stderr."""
    click.echo(message, err=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout, for machines and people."""
    click.echo(json.dumps(jsonable(value), indent=2, ensure_ascii=False))


def json_line(value: Any) -> str:
    """One line of JSON lines."""
    return json.dumps(jsonable(value), ensure_ascii=False)


def jsonable(value: Any) -> Any:
    """Records, times and states as JSON values; derived properties are not included."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    return value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """A table on stdout; where the terminal is too narrow for one, a block of lines for each row.

    ``right`` are the columns of numbers.
    """
    cells = [["" if cell is None else _printable(str(cell)) for cell in row] for row in rows]
    console = stdout_console()
    widths = [_least_width(name, [row[i] for row in cells], name in right) for i, name in enumerate(columns)]
    if sum(widths) + _BETWEEN_COLUMNS * len(widths) > console.width:
        for row in cells:
            console.print(_block(columns, row))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right, min_width=width)
    for row in cells:
        table.add_row(*row)
    console.print(table)
    console.print()


def _least_width(name: str, cells: Sequence[str], is_number: bool) -> int:
    """Below this a column cannot be read: numbers and words of a usual length stay whole, a text takes a few lines."""
    texts = (name, *cells)
    longest = max(map(cell_len, texts))
    if is_number:
        return longest
    words = max(min(_USUAL_WORD, cell_len(word)) for text in texts for word in text.split() or [""])
    return max(words, longest // _MOST_LINES)


def _block(columns: Sequence[str], row: Sequence[str]) -> Table:
    block = Table.grid(padding=(0, _BETWEEN_COLUMNS, 0, 0))
    block.add_column(no_wrap=True)
    block.add_column(overflow="fold")
    for name, cell in zip(columns, row, strict=True):
        if cell:
            block.add_row(name, cell)
    block.add_row()
    return block


def stdout_console() -> Console:
    """A console for data. Text is shown as it is: results may hold what looks like markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def stderr_console() -> Console:
    """The same for talk."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def count(number: int, noun: str) -> str:
    """``1 row``, ``2,000 rows``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def milliseconds(value: float | None) -> str:
    """A duration as a person reads it."""
    if value is None:
        return "-"
    if value < 1000:
        return f"{value:.0f} ms"
    return seconds(value / 1000)


def seconds(value: float | None) -> str:
    """``1.4 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def shorten(text: str | None, width: int) -> str:
    """One line of at most ``width`` characters."""
    line = " ".join((text or "").split())
    return line if len(line) <= width else line[: width - 1] + "…"


@contextmanager
def atomic_file(path: str) -> Iterator[IO[str]]:
    """A text file that appears under ``path`` whole or not at all; ``-`` is stdout.

    It is written beside its place and renamed when complete, so a crash leaves the old file untouched.

    Raises:
        click.ClickException: the file cannot be made, or the disk is full.
    """
    if path == "-":
        yield sys.stdout
        return
    target = Path(path)
    if target.exists() and not target.is_file():  # /dev/stdout, a named pipe
        with target.open("w", encoding="utf-8") as stream:
            yield stream
        return
    target = target.resolve()  # a link is followed, not replaced
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666  # the latter is narrowed by the umask
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as err:
        raise click.FileError(path, hint=err.strerror or str(err)) from err
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, target)
    except BaseException as err:
        beside.unlink(missing_ok=True)
        if isinstance(err, OSError) and err.errno in NO_ROOM:
            raise click.ClickException(
                f"cannot write {path}: {err.strerror}; the results are in the database, `kvq export` writes them"
            ) from err
        raise


def check_writable(path: str) -> None:
    """Refuse an output path now rather than after hours of work.

    Raises:
        click.UsageError: when its folder does not exist or cannot be written to, or it is a folder itself.
    """
    target = Path(path)
    if path == "-":
        return
    folder = target.resolve().parent
    if target.is_dir():
        raise click.UsageError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise click.UsageError(f"cannot write {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise click.UsageError(f"cannot write {path}: no permission to write in {folder}")


def _printable(text: str) -> str:
    """Control characters would move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() or c == " " else "\ufffd" for c in text)
