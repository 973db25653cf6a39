"""Budgets: which tenants may start jobs now.

Owns what this worker knows of tenants: budget and weight, tokens used today (as of the last look into SQL), and what
its own running jobs may still take. Knows no flows and no engine. Invariants: a job starts only while its tenant has
budget left, and with others of that tenant running here only if all of them fit into it; tokens are counted either as
running or as used, from the start of a job until after its commit. So a tenant exceeds its budget by one job at most,
and by what other workers run at that moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq.worker.errors import SettingsError

if TYPE_CHECKING:
    from kvq.worker.store import Store

_MAX_NAME_CHARS = 128


def tenant_name(name: str) -> str:
    """``name``, checked: 1 to 128 printable characters, no white space at its ends.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        raise ValueError(f"must have 1 to {_MAX_NAME_CHARS} characters, got {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"must be printable, without white space at its ends, got {name!r}")
    return name


def checked_tenant(name: str) -> str:
    """The same for what came as a setting or an argument.

    Raises:
        SettingsError: naming ``tenant``.
    """
    try:
        return tenant_name(name)
    except ValueError as err:
        raise SettingsError("tenant", str(err)) from err


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBudget:
    """A tenant that the operator named: its weight, its budget (None: no bound) and the tokens used of it today."""

    tenant: str
    weight: float
    tokens_per_day: int | None
    used_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    tenant: str
    tokens: int


class Budgets:
    """Any thread may report ends; the feeder's thread does the rest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._budgets: Mapping[str, TenantBudget] = {}
        self._running: dict[str, _Running] = {}
        self._committed: set[str] = set()  # of the running: their tokens may not be among those read yet

    def refresh(self) -> None:
        """Read budgets, and what was used today.

        Raises:
            StoreError: the database cannot be read.
        """
        with self._lock:
            committed = set(self._committed)
        budgets = {budget.tenant: budget for budget in self._store.tenant_budgets()}
        with self._lock:
            self._budgets = budgets
            self._committed -= committed
            for job_id in committed:
                self._running.pop(job_id, None)

    @property
    def weights(self) -> dict[str, float]:
        """Weights by tenant, of those that the operator named."""
        return {tenant: budget.weight for tenant, budget in self._budgets.items()}

    @property
    def is_stale(self) -> bool:
        """True when jobs ended whose tokens may not be among those read."""
        return bool(self._committed)

    def is_limited(self, tenant: str) -> bool:
        """True for a tenant with a budget."""
        budget = self._budgets.get(tenant)
        return budget is not None and budget.tokens_per_day is not None

    def exhausted(self) -> set[str]:
        """The tenants that may start nothing more today."""
        return {
            tenant
            for tenant, budget in self._budgets.items()
            if budget.tokens_per_day is not None and budget.used_tokens >= budget.tokens_per_day
        }

    def start(self, job_id: str, tenant: str, tokens: int) -> bool:
        """True, and booked, when a job that takes at most ``tokens`` may start now."""
        budget = self._budgets.get(tenant)
        if budget is None or budget.tokens_per_day is None:
            return True
        with self._lock:
            running = [job.tokens for job in self._running.values() if job.tenant == tenant]
            left = budget.tokens_per_day - budget.used_tokens
            if left <= 0 or (running and sum(running) + tokens > left):
                return False
            self._running[job_id] = _Running(tenant=tenant, tokens=tokens)
            return True

    def note_committed(self, job_ids: Iterable[str]) -> None:
        """Jobs ended and what they took is in SQL."""
        with self._lock:
            self._committed.update(job_id for job_id in job_ids if job_id in self._running)

    def note_dropped(self, job_ids: Iterable[str]) -> None:
        """Jobs left this worker without an end of ours."""
        with self._lock:
            for job_id in job_ids:
                self._running.pop(job_id, None)
                self._committed.discard(job_id)
