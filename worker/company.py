"""The company rule: which jobs may run beside which, so that a poison job is found and its neighbours saved.

Owns the decision, over counts, and the suspects that wait for it; knows no store and no engine. When a worker dies,
every job it ran becomes a suspect (``crashes`` >= 1): most are innocent. Invariants: a suspect never runs beside a job
that has not crashed; second offenders run alone, so the third crash convicts the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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


class Suspects:
    """Jobs that ran when their worker died, until their company may start.

    Args:
        patience_s: how long fresh jobs may keep them waiting.
    """

    def __init__(self, *, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since: dict[Company, dict[str, float]] = {}  # company -> job id -> since when

    def add(self, job_id: str, company: Company) -> None:
        """A suspect that waits from now on."""
        self._since.setdefault(company, {})[job_id] = self._clock()

    def take(self, company: Company, number: int) -> list[str]:
        """Up to ``number`` of a company, first come first; they wait no longer."""
        waiting = self._since[company]
        taken = list(waiting)[:number]
        for job_id in taken:
            del waiting[job_id]
        return taken

    @property
    def companies(self) -> list[Company]:
        """Those of which somebody waits."""
        return [company for company, jobs in self._since.items() if jobs]

    @property
    def overdue(self) -> bool:
        """True when one of them has waited longer than it should."""
        since = min((since_s for jobs in self._since.values() for since_s in jobs.values()), default=None)
        return since is not None and self._clock() - since > self._patience_s


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
