"""Other tiles for prefill and decode on the shape of an 8B model, timed beside those that ``attention_config`` chooses.

What to change there after a first run on a card: the choices were made by counting registers and shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from bench.gpu import attention_rates
from bench.gpu.device import Device
from bench.gpu.rates import Rates
from kvq.kernels import paged_attention

_PREFILL_TILES = (
    *((128, 64, 8, stages) for stages in (3, 2, 4)),
    *((128, 128, 8, stages) for stages in (2, 3)),
    *((64, block_n, 4, stages) for block_n, stages in ((64, 3), (64, 2), (128, 2))),
    (128, 32, 8, 4),
    (128, 64, 4, 3),
)  # block_m, block_n, warps, stages
_DECODE_TILES = ((64, 4, 3), (64, 4, 4), (64, 4, 2), (32, 4, 4), (128, 4, 2), (128, 8, 2), (64, 8, 3), (32, 2, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """``changes`` to the configuration that the ``kernel`` (prefill or decode) takes."""

    kernel: str
    changes: dict[str, Any]

    def chosen(self) -> AbstractContextManager[Any]:
        """Calls inside take it."""
        name = f"{self.kernel}_config"
        usual = getattr(paged_attention, name)
        return patch.object(paged_attention, name, lambda **shape: replace(usual(**shape), **self.changes))


def tiles() -> list[Tile]:
    """All that are tried, the usual one of each kernel first; no limit on registers but the card's."""
    names = ("block_m", "block_n", "num_warps", "num_stages")
    found = [
        Tile(kernel="prefill", changes=dict(zip(names, tile, strict=True)) | {"max_registers": None})
        for tile in _PREFILL_TILES
    ]
    return found + [
        Tile(kernel="decode", changes=dict(zip(names[1:], tile, strict=True)) | {"max_registers": limit})
        for tile, limit in [(tile, 248) for tile in _DECODE_TILES] + [(_DECODE_TILES[0], 160)]
    ]


def sweep(device: Device, rates: Rates) -> Iterator[dict[str, Any]]:
    """A point per tile: its share of the matmul rate (prefill) or of the copy bandwidth (decode)."""
    for tile in tiles():
        point = {"kernel": tile.kernel} | tile.changes
        try:
            with tile.chosen():
                yield point | attention_rates.at_one_shape(device, rates, tile.kernel)
        except Exception as err:  # noqa: BLE001 (too much shared memory, say: that tile is none)
            yield point | {"failed": f"{type(err).__name__}: {err}"[:200]}
