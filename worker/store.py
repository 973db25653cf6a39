"""The store: every job's fate, in SQL.

Owns opening and closing; what it does is in store_jobs, store_workers, store_outbox, store_webhooks, store_reading,
store_figures and store_upkeep, and only these files (with store_moves and the bulk statements) talk SQL. It knows
nothing of Redis, Celery or the engine.

Invariants: a job moves only along ``LEGAL_MOVES``; it has a result row exactly when it is in a terminal state;
only the worker that holds it (same owner, same claim) can finish it; leases are measured by the database's clock.
"""

from __future__ import annotations

from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from kvq.migrations import migrate
from kvq.worker.database import Database
from kvq.worker.errors import SchemaOutOfDate
from kvq.worker.failpoints import Failpoints
from kvq.worker.privacy import Privacy
from kvq.worker.store_dedup import AnswerStore
from kvq.worker.store_figures import FiguresStore
from kvq.worker.store_jobs import JobStore
from kvq.worker.store_outbox import OutboxStore
from kvq.worker.store_reading import ReadingStore
from kvq.worker.store_records import (
    BatchProgress,
    BatchSummary,
    ErrorCount,
    FinishReport,
    InsertReport,
    OutboxRow,
    Percentiles,
    ReapReport,
    ResultRow,
    WorkerRow,
)
from kvq.worker.store_tenants import TenantRow, TenantStore
from kvq.worker.store_upkeep import UpkeepStore
from kvq.worker.store_waiting import WaitingStore
from kvq.worker.store_webhooks import WebhookStore
from kvq.worker.store_workers import WorkerStore

__all__ = [
    "BatchProgress",
    "BatchSummary",
    "ErrorCount",
    "FinishReport",
    "InsertReport",
    "OutboxRow",
    "Percentiles",
    "ReapReport",
    "ResultRow",
    "Store",
    "TenantRow",
    "WorkerRow",
]


class Store(
    JobStore,
    WaitingStore,
    AnswerStore,
    TenantStore,
    WorkerStore,
    OutboxStore,
    WebhookStore,
    ReadingStore,
    FiguresStore,
    UpkeepStore,
):
    """One database of jobs, used by any number of threads. ``Store.open`` makes one; it is a context manager."""

    def __init__(self, db: Database) -> None:
        JobStore.__init__(self, db)

    @classmethod
    def open(cls, url: str, *, create: bool = False, privacy: Privacy | None = None) -> Self:
        """Open the database at ``url``: ``sqlite:///path``, a path, or ``postgresql://...``.

        Args:
            create: make or upgrade a SQLite file that is missing or of an older version. A PostgreSQL database is
                shared, so it is upgraded by ``kvq db upgrade`` only.
            privacy: what is kept of prompts and answers, and the keys to read them; by default everything, and none.

        Raises:
            SchemaOutOfDate: the tables are not of this version.
            StoreUnavailable: the database cannot be reached.
        """
        db = Database(url, privacy)
        found, expected = db.revision(), migrate.head()
        if found != expected and create and db.path is not None and migrate.is_known(found):
            failpoints = Failpoints.from_environment()
            try:
                migrate.upgrade(db.full_url, before_commit=lambda: failpoints.hit("during_migrate"))
            except SQLAlchemyError as err:  # the folder is full
                db.close()
                raise db.translated(err) from err
            found = db.revision()
        if found != expected:
            db.close()
            upgrade = "kvq db upgrade" if migrate.is_known(found) else None
            raise SchemaOutOfDate(url=db.shown_url, found=found, expected=expected, upgrade=upgrade)
        return cls(db)

    @property
    def url(self) -> str:
        """For people: without the password."""
        return self._db.shown_url

    def tidy(self) -> None:
        """Leave nothing of what was forgotten where it can be left out; now and then, where prompts are forgotten."""
        privacy = self._db.privacy
        if privacy.forget_prompts or privacy.forget_answers:
            self._db.empty_log()

    def close(self) -> None:
        """Close the connections."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
