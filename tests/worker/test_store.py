"""Opening a store: which database, which revision, what is created and what is not."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import pytest

from kvq.migrations import migrate
from kvq.worker.errors import SchemaOutOfDate, StoreError, StoreUnavailable
from kvq.worker.store import Store
from tests.factories import claim_all, new_batch, new_job, new_worker, outcome_of
from tests.servers import PostgresServer


def test_a_missing_sqlite_file_is_created_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "kvq.db"
    with pytest.raises(SchemaOutOfDate, match="kvq db upgrade"):
        Store.open(f"sqlite:///{path}")
    assert not path.exists()
    with Store.open(f"sqlite:///{path}", create=True) as store:
        assert store.list_batches() == []
    with Store.open(str(path)) as store:
        assert store.list_batches() == []


def test_many_may_create_the_same_sqlite_file_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kvq.db'}"
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: Store.open(url, create=True), range(6)))
    for store in stores:
        store.close()
    assert migrate.current(url) == migrate.head()


def test_postgresql_is_never_upgraded_by_itself(pg_empty_url: str) -> None:
    with pytest.raises(SchemaOutOfDate, match=r"has no kvq tables.*kvq db upgrade"):
        Store.open(pg_empty_url, create=True)
    assert migrate.current(pg_empty_url) is None


def test_a_database_of_a_newer_version_is_refused_and_left_alone(sqlite_url: str) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(SchemaOutOfDate, match=r"revision 9999, of a newer kvq than this one.*: use that version$"):
        Store.open(sqlite_url, create=True)
    assert migrate.current(sqlite_url) == "9999"


def test_an_unknown_kind_of_database_is_refused_with_what_to_use() -> None:
    with pytest.raises(StoreError, match="use sqlite:///PATH or postgresql://"):
        Store.open("mysql://host/name")


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        Store.open(f"postgresql://me:secret@/name?host={tmp_path}")
    assert "secret" not in str(caught.value)
    assert f"me:***@/name?host={tmp_path}" in unquote(str(caught.value))


@pytest.mark.parametrize("url", ["postgresql://postgres@/postgres?host={folder}", "sqlite:///{folder}"])
def test_a_database_that_is_away_is_unavailable_rather_than_wrong_and_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"is unavailable \(setting db, (postgresql|sqlite)://.*\): ") as caught:
        Store.open(url.format(folder=tmp_path))
    assert str(tmp_path) in unquote(str(caught.value))


def test_sqlite_commits_survive_a_power_cut_and_readers_do_not_wait_for_writers(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, store._db.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_a_store_lives_through_a_restart_of_its_server() -> None:
    server = PostgresServer()
    server.start()
    try:
        migrate.upgrade(server.url)
        with Store.open(server.url) as store:
            batch_id = new_batch(store, [new_job(number) for number in range(1, 5)])
            worker_id = new_worker(store)
            outcomes = [outcome_of(job) for job in claim_all(store, worker_id)]
            assert len(store.finish(worker_id, outcomes[:2]).accepted) == 2
            server.kill()
            with pytest.raises(StoreUnavailable):
                store.finish(worker_id, outcomes)
            server.start()
            report = store.finish(worker_id, outcomes)
            assert report.accepted == {outcome.seq for outcome in outcomes[2:]}
            assert report.fenced == {outcome.seq for outcome in outcomes[:2]}
            assert store.batch_progress(batch_id).succeeded == 4
            assert store.check_integrity() == []
    finally:
        server.remove()


def test_a_connection_that_the_server_ended_a_moment_ago_is_replaced_before_a_statement_meets_it(
    pg_empty_url: str,
) -> None:
    migrate.upgrade(pg_empty_url)
    with Store.open(pg_empty_url) as store, Store.open(pg_empty_url) as other:
        batch_id = new_batch(store, [new_job(1)])
        for _ in range(3):
            assert store.batch_progress(batch_id).total == 1
            with other._db.reading() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            assert store.batch_progress(batch_id).total == 1
