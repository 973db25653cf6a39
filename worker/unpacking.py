"""Decompression of a message's body, which no bomb can make larger than it may be.

Knows the codecs that Celery's senders have without further packages, by kombu's names. Invariant: no more memory is
taken than the bound asks for, whatever the bytes claim to become.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

# An LZMA stream names the size of its dictionary, up to 4 GiB; the strongest preset's takes 65 MiB.
_LZMA_MEMORY_BYTES = 2**27

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "application/x-gzip": zlib.decompressobj,  # kombu's gzip is zlib's format
    "application/x-bz2": bz2.BZ2Decompressor,
    "application/x-lzma": lambda: lzma.LZMADecompressor(memlimit=_LZMA_MEMORY_BYTES),
}
_NAMES = {
    **{"gzip": "application/x-gzip", "zlib": "application/x-gzip"},
    **{"bzip2": "application/x-bz2", "bzip": "application/x-bz2"},
    **{"lzma": "application/x-lzma", "xz": "application/x-lzma"},
}


def unpacked(data: bytes, codec: Any, *, most: int) -> bytes:
    """The plain bytes, at most ``most``.

    Raises:
        ValueError: the codec is unknown, the bytes are none of it or end too early, or they would become more.
    """
    make = _DECOMPRESSORS.get(_NAMES.get(codec, codec)) if isinstance(codec, str) else None
    if make is None:
        raise ValueError(f"the compression {codec!r} is none of {', '.join(_DECOMPRESSORS)}"[:200])
    stream = make()
    try:
        plain: bytes = stream.decompress(data, most + 1)
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as err:
        raise ValueError(f"cannot be decompressed: {err}") from err
    if len(plain) > most:
        raise ValueError(f"is larger than {most >> 20} MiB once it is decompressed")
    if not stream.eof:
        raise ValueError("cannot be decompressed: it ends too early")
    return plain
