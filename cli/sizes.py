"""Bytes on the command line: read as people write them, printed as people read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvq.worker.byte_sizes import parse_bytes

F = TypeVar("F", bound=Callable[..., Any])


def bytes_from(text: str) -> int:
    """A number of bytes, as ``parse_bytes`` reads it.

    Raises:
        click.BadParameter: for anything else.
    """
    try:
        return parse_bytes(text)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


def bytes_option(flag: str, text: str) -> Callable[[F], F]:
    """An option for a number of bytes."""
    return click.option(flag, type=bytes_from, metavar="BYTES", help=text)


def size(num_bytes: float) -> str:
    """``10.7 GB``, ``655 kB``: decimal units, three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5 or unit == "GB":
            break
        num_bytes /= 1000
    if unit == "bytes":
        return f"{num_bytes:,.0f} bytes"
    digits = 0 if num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:,.{digits}f} {unit}"
