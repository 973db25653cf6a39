"""Submission: a checked input becomes a batch of jobs in the store.

Owns the rule that nothing is enqueued while any row is bad, unless bad rows are to be recorded as failed.
Knows neither SQL nor how input is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from kvq.worker.backlog import Backlog
from kvq.worker.errors import FileInvalid, SettingsError
from kvq.worker.files import BadRow, FileReport, InputFile
from kvq.worker.jobs import DEDUP_PERIOD_S, DEFAULT_TENANT, NewJob
from kvq.worker.tenants import checked_tenant
from kvq.worker.webhook_http import parse_target

if TYPE_CHECKING:
    from kvq.worker.store import Store
    from kvq.worker.store_records import InsertReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a batch is to be called, where its jobs go, and where its end is announced (a URL).

    ``tenant``: whose budget and share it counts to. ``deadline``: when what is not finished expires.
    ``dedup_period_s``: how old a job may be whose dedup key counts.
    """

    batch_id: str
    queue: str
    name: str | None = None
    source: str | None = None
    priority: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    webhook: str | None = None
    tenant: str = DEFAULT_TENANT
    deadline: datetime | None = None
    dedup_period_s: float = DEDUP_PERIOD_S

    def __post_init__(self) -> None:
        """Raises SettingsError for a tenant that cannot be one, WebhookRefused for a URL that no worker would call."""
        checked_tenant(self.tenant)
        if self.webhook is not None:
            parse_target(self.webhook)


def deadline_after(completion_window_s: float | None) -> datetime | None:
    """When a completion window that begins now is over; None: never.

    Raises:
        SettingsError: naming ``completion_window``, which must be above 0 and end before the year 10000.
    """
    if completion_window_s is None:
        return None
    try:
        if completion_window_s > 0:
            return datetime.now(UTC) + timedelta(seconds=completion_window_s)
    except OverflowError:
        pass
    raise SettingsError("completion_window", f"{completion_window_s:g} seconds cannot be waited for")


def require_good(*reports: FileReport) -> None:
    """Refuse files with bad rows.

    Raises:
        FileInvalid: whose message names every bad line of every file with its reason.
    """
    bad = tuple(report for report in reports if report.bad)
    if bad:
        raise FileInvalid("\n".join(map(describe_bad_rows, bad)), bad)


def enqueue(store: Store, source: InputFile, submission: Submission, *, backlog: Backlog | None = None) -> InsertReport:
    """Insert the rows of a checked file, the bad ones as failed. Safe to repeat: rows that are there stay.

    With a ``backlog`` the rows wait until there is room for them.
    """
    open_batch(store, submission)
    if submission.webhook is not None:
        store.add_webhook(submission.batch_id, submission.webhook)
    jobs = jobs_of(source, submission)
    if backlog is not None:
        jobs = backlog.paced(jobs)
    report = store.insert_jobs(jobs, batch_id=submission.batch_id, dedup_period_s=submission.dedup_period_s)
    if submission.webhook is not None:  # not before all rows are in: those in first may have ended by now
        store.arm_webhook(submission.batch_id)
    return report


def open_batch(store: Store, submission: Submission) -> bool:
    """Create the batch of a submission; False where it was there before."""
    return store.create_batch(
        batch_id=submission.batch_id,
        name=submission.name,
        source=submission.source,
        metadata=dict(submission.metadata),
    )


def jobs_of(source: InputFile, submission: Submission) -> Iterator[NewJob]:
    """The rows of a checked file as jobs of a submission."""
    return source.jobs(
        batch_id=submission.batch_id,
        queue=submission.queue,
        priority=submission.priority,
        tenant=submission.tenant,
        deadline=submission.deadline,
    )


def describe_bad_rows(report: FileReport) -> str:
    """The report for people: every bad line with its number and reason; lines with the same fault share one."""
    rows = "row" if report.num_rows == 1 else "rows"
    head = f"{report.path}: {len(report.bad)} of {report.num_rows} {rows} cannot be run:"
    lines_by_fault: dict[tuple[str, str], list[BadRow]] = {}
    for row in report.bad:
        lines_by_fault.setdefault((row.code, row.message), []).append(row)
    return "\n".join(
        [head, *(f"  {_lines(rows)}: {message} [{code}]" for (code, message), rows in lines_by_fault.items())]
    )


def _lines(rows: list[BadRow]) -> str:
    """``line 3`` or ``lines 3-7, 9``."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and row.line_no == ranges[-1][1] + 1:
            ranges[-1][1] = row.line_no
        else:
            ranges.append([row.line_no, row.line_no])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ("line " if len(rows) == 1 else "lines ") + ", ".join(texts)
