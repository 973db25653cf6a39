"""Applying the revisions: upgrade, current, head.

Owns the Alembic configuration (no ini file: the scripts are found inside the installed package) and the lock
that lets any number of processes call ``upgrade`` at once. Invariant: a revision is applied whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from kvq.migrations.url import database_url

_ADVISORY_LOCK = 0x6B7671  # "kvq"


class UnknownRevision(ValueError):
    """The database is at a revision this version has never heard of."""

    def __init__(self, revision: str) -> None:
        super().__init__(f"its tables are at revision {revision}, of a newer kvq: use that version")


def _nothing() -> None:
    """For an upgrade that nobody watches."""


def upgrade(url: str, *, before_commit: Callable[[], None] = _nothing) -> None:
    """Bring the database at ``url`` to the newest revision, creating a SQLite file that is not there.

    ``before_commit`` is called once the revisions are applied and can still be undone.

    Raises:
        UnknownRevision: a newer version wrote it; nothing was changed.
    """
    where = database_url(url)
    if where.get_backend_name() == "sqlite" and where.database:
        Path(where.database).parent.mkdir(parents=True, exist_ok=True)
    with _engine(url).connect() as connection, connection.begin(), as_file(files("kvq.migrations")) as folder:
        if connection.dialect.name == "postgresql":
            # Released at commit; the second of two upgrades then finds nothing left to do.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (_ADVISORY_LOCK,))
        else:
            # The write lock, taken before the revision is read, does the same.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        found = current_of(connection)
        if found is not None and not is_known(found):
            raise UnknownRevision(found)
        config = _config(folder)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        before_commit()


def current(url: str) -> str | None:
    """The revision the database at ``url`` is at, None where it has no tables of ours. Creates nothing."""
    where = database_url(url)
    if where.get_backend_name() == "sqlite" and not Path(where.database or "").exists():
        return None
    with _engine(url).connect() as connection:
        return current_of(connection)


def current_of(connection: Connection) -> str | None:
    """The revision of an open connection's database."""
    return MigrationContext.configure(connection).get_current_revision()


def head() -> str:
    """The newest revision this version knows."""
    with as_file(files("kvq.migrations")) as folder:
        revision = ScriptDirectory.from_config(_config(folder)).get_current_head()
    assert revision is not None, "the package ships at least one revision"
    return revision


def is_known(revision: str | None) -> bool:
    """True for no revision and for those this version can upgrade from; false for one of a newer version."""
    with as_file(files("kvq.migrations")) as folder:
        scripts = ScriptDirectory.from_config(_config(folder)).walk_revisions()
        return revision is None or revision in {script.revision for script in scripts}


def _config(folder: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _engine(url: str) -> Engine:
    engine = create_engine(database_url(url), poolclass=NullPool)
    if engine.dialect.name == "sqlite":
        # The sqlite3 module opens transactions late, and not at all for DDL: take that out of its hands.
        event.listen(engine, "connect", _manual_transactions)
    return engine


def _manual_transactions(dbapi_connection: Any, _record: object) -> None:
    dbapi_connection.isolation_level = None
    dbapi_connection.execute("PRAGMA busy_timeout = 60000")
