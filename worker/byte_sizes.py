"""Amounts of bytes as people write them, the same in every flag, variable and key."""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """``2GiB`` is 2 x 2^30 bytes, ``2GB`` (or ``2G``) is 2 x 10^9, a bare number is bytes.

    Raises:
        ValueError: for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size; write 2GiB (2 x 2^30), 2GB (2 x 10^9) or a number of bytes")
    units = _BINARY if match[3] else _DECIMAL
    return int(float(match[1]) * units[match[2].lower()])
