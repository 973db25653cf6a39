"""The database connection: engine, transactions, and what the two databases spell differently.

Knows no table. Invariants: every write on SQLite is BEGIN IMMEDIATE and one at a time in this process; a write
is repeated whole when the database asks for it (deadlock); driver errors leave as StoreError.
"""

from __future__ import annotations

import json
import select
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from kvq.migrations import migrate
from kvq.migrations.url import database_url
from kvq.worker.errors import StoreError, StoreUnavailable, ValueRefused
from kvq.worker.privacy import Privacy
from kvq.worker.urls import masked

T = TypeVar("T")

_BUSY_TIMEOUT_S = 30
_USED = "kvq_used_s"
_MAX_REPEATS = 8
# A connection that was used so lately, and whose server has sent nothing since (an end is announced), is taken to live.
_ALIVE_S = 1.0
# PostgreSQL ends a session that has been silent in the middle of a transaction for so long: a process that was stopped
# (SIGSTOP) there would keep its locks, and the others waiting, for ever.
_SILENCE_S = 30
# idle_in_transaction_session_timeout; read_only_sql_transaction: a standby that is about to take over, or just did
_AWAY_SQLSTATES = frozenset({"25P03", "25006"})
# program_limit_exceeded, as of an index entry
_TOO_LARGE = "54"
# deadlock_detected, serialization_failure
_REPEAT_SQLSTATES = frozenset({"40P01", "40001"})


class Database:
    """One database, used by any number of threads.

    ``privacy`` is for those who write and read what people sent: what of it may be kept, and by which keys.
    """

    def __init__(self, url: str, privacy: Privacy | None = None) -> None:
        """Connects lazily. Raises StoreError for a URL of an unsupported kind."""
        self.privacy = privacy or Privacy()
        try:
            self._url = database_url(url)
        except (ValueError, sa.exc.ArgumentError) as err:
            raise StoreError(f"cannot use {masked(url)!r} as a database: {str(err).replace(url, masked(url))}") from err
        self.on_postgres = self._url.get_backend_name() == "postgresql"
        self._one_writer: AbstractContextManager[Any] = nullcontext() if self.on_postgres else threading.Lock()
        # Hidden: a statement's parameters are prompts and answers, and errors end in logs.
        if self.on_postgres:
            # The connection used last comes first: it is alive, and the server has its statements prepared.
            self._engine = sa.create_engine(
                self._url, pool_size=8, max_overflow=24, pool_use_lifo=True, hide_parameters=True
            )
            event.listen(self._engine, "connect", _prepare_session)
            event.listen(self._engine, "checkout", _replace_dead)
            event.listen(self._engine, "checkin", _note_use)
            # One statement sees one state of the database, in a transaction or not; BEGIN and COMMIT are round trips.
            self._reader: sa.Engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        else:
            self._engine = sa.create_engine(
                self._url,
                pool_size=8,
                max_overflow=24,
                connect_args={"timeout": _BUSY_TIMEOUT_S},
                hide_parameters=True,
            )
            event.listen(self._engine, "connect", _set_pragmas)
            event.listen(self._engine, "begin", _begin)
            self._reader = self._engine

    @property
    def shown_url(self) -> str:
        """For people: without the password."""
        driverless = self._url.set(drivername=self._url.get_backend_name())
        return masked(driverless.render_as_string(hide_password=True))

    @property
    def full_url(self) -> str:
        """For opening it again."""
        return self._url.render_as_string(hide_password=False)

    @property
    def path(self) -> str | None:
        """The file, where it is one."""
        return None if self.on_postgres else self._url.database

    def close(self) -> None:
        """Close the pool's idle connections; those in use close when they come back."""
        self._engine.dispose()

    def revision(self) -> str | None:
        """The schema revision the database is at, None without tables of ours. Creates nothing."""
        if self.path is not None and not Path(self.path).exists():
            return None
        with self.reading() as connection:
            return migrate.current_of(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """For statements that only read. On PostgreSQL each sees what is committed when it begins."""
        try:
            with self._reader.connect() as connection, connection.begin():
                yield connection
        except SQLAlchemyError as err:
            raise self.translated(err) from err

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in one transaction, commit, return its result.

        ``work`` may be called more than once (a deadlock undoes the transaction), so it must have no effect
        outside the connection.
        """
        return self._write(self._engine, work)

    def write_at_once(self, work: Callable[[Connection], T]) -> T:
        """The same for a work whose statements may be transactions of their own, as on PostgreSQL they then are.

        It saves the round trips of BEGIN and COMMIT.
        """
        return self._write(self._reader, work)

    def _write(self, engine: sa.Engine, work: Callable[[Connection], T]) -> T:
        with self._one_writer:
            for repeat in range(_MAX_REPEATS):
                try:
                    with engine.connect() as connection:
                        connection.execution_options(kvq_writes=True)
                        with connection.begin():
                            return work(connection)
                except (SQLAlchemyError, psycopg.Error) as err:  # COPY's errors come from the driver as they are
                    if _sqlstate(err) not in _REPEAT_SQLSTATES or repeat == _MAX_REPEATS - 1:
                        raise self.translated(err) from err
                    time.sleep(0.002 * 2**repeat)
        raise AssertionError("the last repeat returns or raises")

    def empty_log(self) -> None:
        """Make SQLite move its write-ahead log into the file and cut it to nothing, if nobody is in the way just now.

        What was overwritten in the file may still stand there. PostgreSQL's log is the server's business.
        """
        if self.on_postgres:
            return
        try:
            with self._engine.connect() as connection:
                driver = connection.connection.driver_connection
                assert driver is not None
                driver.execute("PRAGMA busy_timeout = 50")
                try:
                    driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                finally:
                    driver.execute(f"PRAGMA busy_timeout = {1000 * _BUSY_TIMEOUT_S}")
        except (SQLAlchemyError, sqlite3.Error) as err:
            raise self._unavailable(err) from err

    # What the two databases spell differently.

    @property
    def now(self) -> str:
        """The database's clock as the statement begins, not the transaction.

        Not ``clock_timestamp()``: what may differ from row to row is compared row by row, and no index is used.
        """
        return "statement_timestamp()" if self.on_postgres else "strftime('%Y-%m-%d %H:%M:%f', 'now')"

    @property
    def today(self) -> str:
        """The day of UTC by the database's clock, as in 2026-11-30."""
        if self.on_postgres:
            return "to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
        return "strftime('%Y-%m-%d', 'now')"

    def now_plus(self, seconds_param: str) -> str:
        """The clock plus a parameter of seconds, which may be negative."""
        if self.on_postgres:
            return f"({self.now} + make_interval(secs => CAST(:{seconds_param} AS double precision)))"
        return f"strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :{seconds_param}))"

    def seconds_between(self, start: str, end: str) -> str:
        """A float of seconds."""
        if self.on_postgres:
            return f"CAST(extract(epoch FROM ({end}) - ({start})) AS double precision)"
        return f"((julianday({end}) - julianday({start})) * 86400.0)"

    def later_of(self, one: str, other: str) -> str:
        """The later of two instants that are not null."""
        return f"greatest({one}, {other})" if self.on_postgres else f"max({one}, {other})"

    def among(self, param: str) -> str:
        """``x`` + this: x is one of the integers of the parameter (see ``numbers``)."""
        if self.on_postgres:
            return f"= ANY(CAST(:{param} AS bigint[]))"
        return f"IN (SELECT value FROM json_each(:{param}))"

    def not_among(self, param: str) -> str:
        """``x`` + this: x is none of the integers of the parameter (see ``numbers``)."""
        if self.on_postgres:
            return f"<> ALL(CAST(:{param} AS bigint[]))"
        return f"NOT IN (SELECT value FROM json_each(:{param}))"

    def among_texts(self, param: str) -> str:
        """``x`` + this: x is one of the strings of the parameter (see ``texts``)."""
        if self.on_postgres:
            return f"= ANY(CAST(:{param} AS text[]))"
        return f"IN (SELECT value FROM json_each(:{param}))"

    def numbers(self, values: Collection[int]) -> Any:
        """The value of an ``among`` parameter."""
        return list(values) if self.on_postgres else json.dumps(list(values))

    def texts(self, values: Sequence[str]) -> Any:
        """The value of an ``among_texts`` parameter."""
        return list(values) if self.on_postgres else json.dumps(list(values))

    def for_update(self, of: str, *, skip_locked: bool = False) -> str:
        """Ends a SELECT that locks its rows. On SQLite the transaction already holds the only write lock."""
        if not self.on_postgres:
            return ""
        return f"FOR UPDATE OF {of}" + (" SKIP LOCKED" if skip_locked else "")

    def translated(self, err: SQLAlchemyError | psycopg.Error) -> StoreError:
        """A driver's error as one of ours."""
        cause = getattr(err, "orig", None) or err
        if _is_of_values(err):
            return ValueRefused(f"the database refused a value: {str(cause).strip()}")
        away = isinstance(err, OperationalError | InterfaceError | PoolTimeout)
        away = away or isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
        away = away or _sqlstate(err) in _AWAY_SQLSTATES
        if away or (isinstance(err, DBAPIError) and err.connection_invalidated):
            return self._unavailable(str(cause).strip())
        return StoreError(f"the database refused a statement: {str(cause).strip()}")

    def _unavailable(self, cause: object) -> StoreUnavailable:
        return StoreUnavailable(f"the database is unavailable (setting db, {self.shown_url}): {cause}")


def _sqlstate(err: SQLAlchemyError | psycopg.Error) -> str | None:
    return getattr(getattr(err, "orig", None) or err, "sqlstate", None)


def _is_of_values(err: SQLAlchemyError | psycopg.Error) -> bool:
    """Whether the statement fails by what is in it, and would with any database that works."""
    if isinstance(err, StatementError) and not isinstance(err, DBAPIError):
        return True  # a value was refused before the driver saw it
    cause = getattr(err, "orig", None) or err
    of_values = psycopg.DataError | psycopg.IntegrityError | sqlite3.DataError | sqlite3.IntegrityError
    return isinstance(cause, of_values) or (_sqlstate(err) or "").startswith(_TOO_LARGE)


def _prepare_session(dbapi_connection: Any, _record: object) -> None:
    dbapi_connection.execute(f"SET TIME ZONE 'UTC'; SET idle_in_transaction_session_timeout = {1000 * _SILENCE_S}")
    dbapi_connection.commit()


def _replace_dead(dbapi_connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
    """A connection that died with the server while it lay idle is replaced before a statement meets it."""
    if time.monotonic() - record.info.get(_USED, time.monotonic()) < _ALIVE_S and not _has_unread(dbapi_connection):
        return
    autocommit, dbapi_connection.autocommit = dbapi_connection.autocommit, True
    try:
        dbapi_connection.execute("SELECT 1")
        dbapi_connection.autocommit = autocommit
    except psycopg.Error as err:
        raise sa.exc.InvalidatePoolError(str(err)) from err  # all of them, most likely


def _has_unread(dbapi_connection: Any) -> bool:
    """Whether the server has sent anything unasked, or hung up."""
    try:
        poll = select.poll()
        poll.register(dbapi_connection.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    except psycopg.Error:  # closed
        return True


def _note_use(_dbapi_connection: object, record: ConnectionPoolEntry) -> None:
    record.info[_USED] = time.monotonic()


def _set_pragmas(dbapi_connection: Any, _record: object) -> None:
    # The sqlite3 module would begin transactions late and as readers, which then cannot become writers.
    dbapi_connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {1000 * _BUSY_TIMEOUT_S}",
        # A Celery message is acknowledged after our commit, so the commit must survive a power cut.
        "synchronous = FULL",
        # What is deleted or forgotten is overwritten, too.
        "secure_delete = ON",
        "foreign_keys = ON",
        "temp_store = MEMORY",
        "cache_size = -16384",
    ):
        dbapi_connection.execute(f"PRAGMA {pragma}")
    _enter_wal(dbapi_connection)


def _enter_wal(dbapi_connection: Any) -> None:
    # Kept in the file, so it is a change only the first time; and that one SQLite refuses at once, without the
    # busy timeout, when another connection is there.
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            dbapi_connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("kvq_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
