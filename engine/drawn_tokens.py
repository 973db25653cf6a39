"""DrawnTokens: the tokens a step drew, on the device, where the next step can take them from.

Owns their way to the host, and what makes them SampledTokens there. Shape: R rows, one token each, of R sequences.
"""

from __future__ import annotations

import math

import torch

from kvq.engine.staging import OnTheWay
from kvq.engine.step import SampledToken


class DrawnTokens:
    """One token for each of some sequences.

    Args:
        token_ids: int64 [R].
        largest: the largest logit [R] of each row; where it is not finite the token means nothing.
        seq_ids: whose they are, R of them.
    """

    def __init__(self, token_ids: torch.Tensor, largest: torch.Tensor, seq_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.row_by_seq = {seq_id: row for row, seq_id in enumerate(seq_ids)}
        self._seq_ids = seq_ids
        # In one tensor, so that one copy brings both.
        self._on_the_way = OnTheWay(torch.stack((largest.double().view(torch.int64), token_ids)))

    def wait(self) -> dict[int, tuple[SampledToken, ...]]:
        """The tokens by sequence id, once the device has drawn them."""
        values = self._on_the_way.wait()
        largest, token_ids = values[0].view(torch.float64).tolist(), values[1].tolist()
        return {
            seq_id: (
                SampledToken(token_id=token_id)
                if math.isfinite(most)
                else SampledToken(token_id=0, failure=not_finite(most)),
            )
            for seq_id, token_id, most in zip(self._seq_ids, token_ids, largest, strict=True)
        }


def not_finite(largest: float) -> str:
    """Why no token can be drawn from a row whose largest logit is ``largest``."""
    return f"the model computed {largest} for a token"
