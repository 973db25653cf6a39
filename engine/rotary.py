"""RotaryTable: cosines and sines by position, each computed once.

Owns the table. A vectorised cosine differs in its last bits from the scalar one that ends a run of numbers, so what a
step computes for itself depends on where in the step a token lies; a row of the table does not. Invariant: a position's
row is computed in one call, always of the same positions, too small to be divided among threads.
"""

from __future__ import annotations

from typing import Any

import torch

_CALL_ELEMENTS = 1 << 15  # torch divides longer runs among threads


class RotaryTable:
    """Rows of a Hugging Face rotary embedding ``module``.

    Args:
        longest: positions that are kept; some models have other frequencies beyond.
        layer_type: the layers it is for, where the module tells types of layers apart.
    """

    def __init__(self, module: Any, *, longest: int | None = None, layer_type: str | None = None) -> None:
        self._module = module
        self._longest = longest
        self._arguments = {} if layer_type is None else {"layer_type": layer_type}
        # Where frequencies follow the longest position of a step, and nothing bounds it, there is nothing to keep.
        rope_type = str(getattr(module, "rope_type", "default"))
        self._keeps = longest is not None or not ("dynamic" in rope_type or "longrope" in rope_type)
        self._cos, self._sin = self._compute(torch.arange(1))
        self._num_per_call = max(1, _CALL_ELEMENTS // self._cos.shape[1])
        self._cos, self._sin = self._cos[:0], self._sin[:0]

    def rows(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, D] of position_ids [T], float32."""
        last = int(position_ids.max())
        if not self._keeps or (self._longest is not None and last >= self._longest):
            return self._compute(position_ids)
        while len(self._cos) <= last:
            first = len(self._cos)
            end = min(first + self._num_per_call, self._longest or first + self._num_per_call)
            cos, sin = self._compute(torch.arange(first, end))
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])
        return self._cos[position_ids], self._sin[position_ids]

    def _compute(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._module(torch.empty(0), position_ids=position_ids[None], **self._arguments)
        return cos[0].float().contiguous(), sin[0].float().contiguous()
