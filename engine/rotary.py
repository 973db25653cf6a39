"""RotaryTable: cosines and sines by position, each computed once.

Owns the table. A vectorised cosine differs in its last bits from the scalar one that ends a run of numbers, so what a
step computes for itself depends on where in the step a token lies; a row of the table does not. Invariant: a position's
row is computed in a call of one fixed shape, too small to be divided among threads.
"""

from __future__ import annotations

from typing import Any

import torch

_CALL_ELEMENTS = 1 << 15  # torch divides longer runs among threads


class RotaryTable:
    """Rows of a Hugging Face rotary embedding ``module``."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Its frequencies follow the longest position of a step; there is then nothing to keep.
        rope_type = str(getattr(module, "rope_type", "default"))
        self._keeps = "dynamic" not in rope_type and rope_type != "longrope"
        self._cos, self._sin = self._compute(torch.arange(1))
        self._num_per_call = max(1, _CALL_ELEMENTS // self._cos.shape[1])
        self._cos, self._sin = self._cos[:0], self._sin[:0]

    def rows(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, D] of position_ids [T], float32."""
        if not self._keeps:
            return self._compute(position_ids)
        last = int(position_ids.max())
        while len(self._cos) <= last:
            first = len(self._cos)
            cos, sin = self._compute(torch.arange(first, first + self._num_per_call))
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])
        return self._cos[position_ids], self._sin[position_ids]

    def _compute(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._module(torch.empty(0), position_ids=position_ids[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()
