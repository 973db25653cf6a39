"""What becomes of a job whose worker died: a pure decision.

Knows no SQL and no clock: the caller states the facts, ``after_crash`` states the verdict. The invariant is
that a job that takes workers down with it ends as a dead letter after ``max_crashes`` crashes, and that any
other job is run again without anybody asking.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.worker.jobs import LEGAL_MOVES, JobError, JobState

DEFAULT_MAX_CRASHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Where the job goes; ``error`` is its result unless it is queued again."""

    state: JobState
    error: JobError | None = None

    def __post_init__(self) -> None:
        assert self.state in LEGAL_MOVES[JobState.RUNNING]
        assert (self.error is None) == (self.state is JobState.QUEUED)


def after_crash(
    *, crashes: int, max_crashes: int = DEFAULT_MAX_CRASHES, cancel_requested: bool = False, expired: bool = False
) -> Verdict:
    """Decide for a job that was running when its worker died.

    Args:
        crashes: workers that died while running this job, the one just lost included (so at least 1).
        max_crashes: with this many the job is given up.
        cancel_requested: somebody asked for its end while it ran.
        expired: its deadline has passed by now.
    """
    assert crashes >= 1
    if cancel_requested:
        return Verdict(state=JobState.CANCELLED, error=JobError(code="cancelled", message="cancelled on request"))
    if crashes >= max_crashes:
        message = (
            f"{crashes} workers were lost while running this job, so it is not tried again; "
            f"look at the workers' logs, then retry it alone"
        )
        return Verdict(state=JobState.DEAD, error=JobError(code="worker_lost", message=message))
    if expired:
        message = "its worker was lost and the deadline passed before it could run again"
        return Verdict(state=JobState.EXPIRED, error=JobError(code="expired", message=message))
    return Verdict(state=JobState.QUEUED)
