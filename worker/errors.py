"""The worker's error tree.

WorkerError
├── SettingsError           a setting is unknown or invalid; names the setting and where it came from
├── BrokerError             Redis cannot be reached or answers nonsense
├── EngineStuck             a step of the engine does not end; only a new process helps
├── FilterError             the conditions by which jobs are picked cannot be understood
├── RowError                one row of a file, or one message, is refused; the others go on
├── WebhookRefused          a webhook's URL or address may not be called
├── WebhookUndelivered      nobody took a webhook: it is tried again later
├── FileUnreadable          a file cannot be opened, is no text, or holds no rows
├── FileInvalid             a file has bad rows; carries the report of all of them
└── StoreError              the database refused something
    ├── StoreUnavailable    it cannot be reached or is locked: the same call may succeed later
    ├── ValueRefused        it cannot hold a value that it was given: the same call never succeeds
    ├── SchemaOutOfDate     its tables are not those of this version; says what to run
    ├── ValueUnreadable     a stored value is encrypted, and not by a key that is set here
    ├── UnknownBatch        no batch, or more than one, goes by that name
    └── LeaseLost           this worker was declared dead: it must stop and drop what it runs
"""

from __future__ import annotations

from typing import Any


class WorkerError(Exception):
    """Base of everything the worker raises on purpose."""


class SettingsError(WorkerError):
    """A setting is unknown or invalid. ``setting`` is its name, ``source`` says where it was found."""

    def __init__(self, setting: str, message: str, *, source: str | None = None) -> None:
        super().__init__(f"{setting}: {message}" + (f" (from {source})" if source else ""))
        self.setting = setting
        self.source = source


class EngineStuck(WorkerError):
    """A step of the engine takes longer than ``step_timeout_s``: the process must end, others run its jobs."""

    def __init__(self, *, age_s: float, timeout_s: float) -> None:
        super().__init__(
            f"a step of the engine has been running for {age_s:.0f} s, longer than step_timeout_s ({timeout_s:.0f} s)"
        )
        self.age_s = age_s


class FilterError(WorkerError):
    """The conditions by which a person picks jobs cannot be understood; says what may be written."""


class BrokerError(WorkerError):
    """The message broker cannot be reached, or what it holds cannot be understood."""


_MAX_MESSAGE_CHARS = 500
_SHOWN_CHARS = 200  # at either end of a longer one

ROW_CODES = frozenset(
    {
        "invalid_json",
        "not_an_object",
        "missing_field",
        "invalid_type",
        "invalid_value",
        "unknown_field",
        "unsupported_field",
        "unknown_url",
        "duplicate_custom_id",
        "stream_unsupported",
        "model_not_found",
        "context_length_exceeded",
    }
)


class RowError(WorkerError):
    """One row is refused. ``code`` is one of ROW_CODES, ``param`` the field that is wrong.

    Of a message that quotes more of the row than a person reads, the middle is left out.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        assert code in ROW_CODES, code
        if len(message) > _MAX_MESSAGE_CHARS:
            message = f"{message[:_SHOWN_CHARS]}...{message[-_SHOWN_CHARS:]}"
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class WebhookRefused(WorkerError):
    """A webhook's URL is none that may be called, or its host is at an address that may not."""

    def __init__(self, message: str) -> None:
        super().__init__(f"webhook: {message}")


class WebhookUndelivered(WorkerError):
    """The receiver of a webhook cannot be reached, or does not answer in time."""


class FileUnreadable(WorkerError):
    """A file cannot be opened, is not text, or holds no rows; the message says which file and why."""


class FileInvalid(WorkerError):
    """Files have rows that cannot be run. ``report`` (their files.FileReport) names every one of them."""

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


class StoreError(WorkerError):
    """The database refused a statement, or holds what it should not."""


class StoreUnavailable(StoreError):
    """The database is away or locked. Nothing was written; the same call may succeed later."""


class ValueRefused(StoreError):
    """The database works, and cannot hold a value that it was given. Nothing was written; nor will it ever be."""


class SchemaOutOfDate(StoreError):
    """The tables are missing or of another version; ``upgrade`` is the command to run, None where they are newer."""

    def __init__(self, *, url: str, found: str | None, expected: str, upgrade: str | None) -> None:
        if upgrade is None:
            reason = (
                f"is at schema revision {found}, of a newer kvq than this one, which needs {expected}: use that version"
            )
        elif found is None:
            reason = f"has no kvq tables, this version of kvq needs {expected}: run `{upgrade}`"
        else:
            reason = (
                f"is at schema revision {found}, this version of kvq needs {expected}: run `{upgrade}` "
                "(or use the kvq version that wrote it)"
            )
        super().__init__(f"the database {url} {reason}")
        self.url = url
        self.found = found
        self.expected = expected
        self.upgrade = upgrade


class ValueUnreadable(StoreError):
    """A stored value is encrypted with a key that is not set here, or was changed since."""


class UnknownBatch(StoreError):
    """No batch, or more than one, goes by ``name``."""

    def __init__(self, name: str, matches: tuple[str, ...] = ()) -> None:
        if matches:
            shown = ", ".join(matches[:5]) + (", ..." if len(matches) > 5 else "")
            super().__init__(f"{name!r} fits several batches ({shown}): give more of the id")
        else:
            super().__init__(f"there is no batch {name!r}: `kvq status` lists them")
        self.name = name
        self.matches = matches


class LeaseLost(StoreError):
    """The worker is not registered, retired, or was declared dead while it was silent."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(
            f"worker {worker_id} holds no lease: it was never registered, retired, or declared dead while "
            f"it was silent; its jobs are being run by others, so stop them and register under a new id"
        )
        self.worker_id = worker_id
