"""The company rule: which jobs may run beside which, so that a poison job is found and its neighbours saved.

A pure decision over counts; knows no store and no engine. When a worker dies, every job it ran becomes a
suspect (``crashes`` >= 1): most are innocent. Invariants: a suspect never runs beside a job that has not
crashed; second offenders run alone, so the third crash convicts the right one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

MAX_FIRST_OFFENDERS = 4


class Company(StrEnum):
    """Who may start now."""

    FRESH = "fresh"  # jobs that never crashed
    FIRST_OFFENDERS = "first_offenders"  # crashes == 1
    SECOND_OFFENDERS = "second_offenders"  # crashes >= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Up to ``limit`` jobs of one company may start; no limit of its own where ``limit`` is None."""

    company: Company
    limit: int | None = None


def company_of(crashes: int) -> Company:
    """The company a job with this many crashes belongs to."""
    if crashes == 0:
        return Company.FRESH
    return Company.FIRST_OFFENDERS if crashes == 1 else Company.SECOND_OFFENDERS


def admission(
    running: Collection[Company], waiting: Collection[Company], *, suspects_overdue: bool = False
) -> Admission | None:
    """Decide who may start beside what runs; None: nobody, wait for what runs to end.

    Args:
        running: companies of the jobs running in this worker, one entry per job.
        waiting: companies of which at least one job waits.
        suspects_overdue: suspects have waited so long that fresh jobs must let them pass; without this a
            stream of fresh jobs would starve them for ever.
    """
    fresh_first = Company.FRESH in waiting and not (suspects_overdue and len(set(waiting)) > 1)
    if fresh_first:
        only_fresh = all(company is Company.FRESH for company in running)
        return Admission(company=Company.FRESH) if only_fresh else None
    if Company.FIRST_OFFENDERS in waiting:
        others = any(company is not Company.FIRST_OFFENDERS for company in running)
        room = MAX_FIRST_OFFENDERS - len(running)
        return None if others or room <= 0 else Admission(company=Company.FIRST_OFFENDERS, limit=room)
    if Company.SECOND_OFFENDERS in waiting and not running:
        return Admission(company=Company.SECOND_OFFENDERS, limit=1)
    return None
