"""Databases to measure on: fresh SQLite files, and databases of a private PostgreSQL (or of one that is named)."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvq.migrations import migrate


@contextmanager
def sqlite_urls() -> Iterator[Iterator[str]]:
    """Fresh files, one at a time."""

    def fresh(folder: str) -> Iterator[str]:
        number = 0
        while True:
            url = f"sqlite:///{folder}/queue-{number}.db"
            migrate.upgrade(url)
            yield url
            for file in Path(folder).glob(f"queue-{number}.db*"):
                file.unlink()
            number += 1

    with tempfile.TemporaryDirectory() as folder:
        yield fresh(folder)


@contextmanager
def postgres_urls(server_url: str | None) -> Iterator[Iterator[str]]:
    """Fresh databases on ``server_url``, or on a private server; each is dropped when the next is asked for."""
    import psycopg
    from sqlalchemy.engine import make_url

    def fresh(url: str) -> Iterator[str]:
        while True:
            name = f"kvq_bench_{uuid.uuid4().hex}"
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload,unused-ignore]
            database = make_url(url).set(database=name).render_as_string(hide_password=False)
            migrate.upgrade(database)
            yield database
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')  # type: ignore[call-overload,unused-ignore]

    if server_url is not None:
        yield fresh(server_url)
        return
    from tests.servers import PostgresServer

    server = PostgresServer(durable=True)
    server.start()
    try:
        yield fresh(server.url)
    finally:
        server.remove()
