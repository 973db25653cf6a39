"""Bytes on the command line: read as people write them, printed as people read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def bytes_from(text: str) -> int:
    """``80GiB`` is 80 x 2^30 bytes, ``80GB`` 80 x 10^9, and a bare number is bytes.

    Raises:
        click.BadParameter: for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; write 80GiB, 80GB or a number of bytes")
    units = _BINARY_UNITS if match[3] else _UNITS
    return int(float(match[1]) * units[match[2].lower()])


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
