"""FeederOptions: how far a worker looks into its queue, and how much of it it takes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kvq.worker.fair_share import QUANTUM_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederOptions:
    """How far to look and how much to take.

    Args:
        queue: the queue served.
        window: most rows held for planning.
        window_tokens: about how many prompt tokens these may have together.
        claim_ahead: claimed jobs that may wait for admission; small, so that other workers get their share.
        max_claimed: most jobs claimed at a time. Jobs equal to one that runs wait for its answer without
            waiting for admission, so ``claim_ahead`` does not bound them.
        poll_s: how often to look for new rows when nobody rings.
        busy_poll_s: the same while jobs run.
        suspect_patience_s: how long fresh jobs may keep crash suspects waiting.
        fair_share: serve the batches and tenants of one priority by weight; else in order of arrival.
        quantum: tokens that a batch or tenant is given at a time.
        serve_answers: give rows the stored answers of equal ones instead of computing them again.
    """

    queue: str
    window: int = 4096
    window_tokens: int = 4_000_000
    claim_ahead: int = 16
    max_claimed: int = 512
    poll_s: float = 0.5
    busy_poll_s: float = 2.0
    suspect_patience_s: float = 60.0
    fair_share: bool = True
    quantum: int = QUANTUM_TOKENS
    serve_answers: bool = True
