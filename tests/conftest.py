"""Servers and databases for every test that wants them.

``KVQ_TEST_REDIS_URL`` and ``KVQ_TEST_PG_URL`` name servers to use instead of private ones: the Redis database
is emptied before every test that uses it, and the PostgreSQL user must be allowed to create databases.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Test processes side by side: compute threads of one would wait for cores that the other has. Before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("COLUMNS", None)  # the other process's; what is written to a pipe is as wide as it is

import psycopg
import pytest
import redis
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from kvq.migrations import migrate
from kvq.migrations.url import database_url
from kvq.worker.store import Store
from tests.servers import PostgresServer, RedisServer


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Compute with two threads, whatever the other tests do."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    if url := os.environ.get("KVQ_TEST_REDIS_URL"):
        yield url
        return
    server = RedisServer()
    server.start()
    yield server.url
    server.remove()


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    """An empty Redis database."""
    with redis.Redis.from_url(redis_server_url) as client:
        client.flushdb()
    return redis_server_url


@pytest.fixture(scope="session")
def pg_url() -> Iterator[str]:
    """A PostgreSQL server's maintenance database."""
    if url := os.environ.get("KVQ_TEST_PG_URL"):
        yield url
        return
    server = PostgresServer()
    server.start()
    yield server.url
    server.remove()


def _in_same_server(pg_url: str, database: str) -> str:
    return make_url(pg_url).set(database=database).render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def make_pg_database(pg_url: str) -> Iterator[Callable[..., str]]:
    """Creates databases, empty or as a copy of another; those on a lent server are dropped at the end."""
    names = []

    def make(template: str = "template1") -> str:
        name = f"kvq_test_{uuid.uuid4().hex}"
        with psycopg.connect(pg_url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        names.append(name)
        return _in_same_server(pg_url, name)

    yield make
    if "KVQ_TEST_PG_URL" not in os.environ:
        return
    with psycopg.connect(pg_url, autocommit=True) as connection:
        for name in reversed(names):
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture
def pg_empty_url(make_pg_database: Callable[..., str]) -> str:
    """A PostgreSQL database without our tables."""
    return make_pg_database()


@pytest.fixture(scope="session")
def _pg_template(make_pg_database: Callable[..., str]) -> str:
    url = make_pg_database()
    migrate.upgrade(url)
    return str(make_url(url).database)


@pytest.fixture
def pg_db_url(make_pg_database: Callable[..., str], _pg_template: str) -> str:
    """A fresh PostgreSQL database at the newest revision."""
    return make_pg_database(_pg_template)


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path, _sqlite_template: Path) -> str:
    """A fresh SQLite file at the newest revision."""
    path = tmp_path / "kvq.db"
    shutil.copyfile(_sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Each database in turn."""
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "pg_db_url"))


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with Store.open(store_url) as opened:
        yield opened


@pytest.fixture
def sql(store_url: str) -> Iterator[Callable[..., list[Any]]]:
    """Runs one statement on the store's database behind its back: ``sql("SELECT :a", a=1)`` -> rows."""
    engine = sa.create_engine(database_url(store_url), poolclass=sa.pool.NullPool)

    def run(statement: str, **values: Any) -> list[Any]:
        with engine.begin() as connection:
            result = connection.execute(sa.text(statement), values)
            return list(result.all()) if result.returns_rows else []

    yield run
    engine.dispose()
