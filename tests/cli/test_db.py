"""``kvq db`` and ``kvq config``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from kvq.migrations import migrate
from kvq.worker.store_roles import READABLE_VIEWS
from kvq.worker.urls import masked
from tests.cli.conftest import Kvq


def test_a_postgresql_database_is_upgraded_once(kvq: Kvq, pg_empty_url: str) -> None:
    before = kvq("db", "current", "--db", pg_empty_url)
    assert (before.code, before.out) == (0, "none\n")
    flag = f"--db {shlex.quote(masked(pg_empty_url))}`"
    assert f"run `kvq db upgrade {flag}" in before.err
    assert f"run `kvq db upgrade {flag}" in kvq("status", "--db", pg_empty_url).err
    first = kvq("db", "upgrade", "--db", pg_empty_url)
    assert first.code == 0
    assert migrate.head() in first.err
    assert "already at revision" in kvq("db", "upgrade", "--db", pg_empty_url).err
    after = kvq("db", "current", "--db", pg_empty_url, "--json")
    assert json.loads(after.out) == {"current": migrate.head(), "head": migrate.head()}
    assert after.err == ""


def test_nobody_is_told_to_upgrade_tables_of_a_newer_version(kvq: Kvq) -> None:
    assert kvq("db", "upgrade").code == 0
    with closing(sqlite3.connect("kvq.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    for args in (["db", "current"], ["status"], ["db", "upgrade"]):
        said = kvq(*args).err
        assert "newer kvq" in said
        assert "run `kvq db upgrade" not in said


def test_asking_for_the_revision_creates_no_file(kvq: Kvq) -> None:
    assert kvq("db", "current").out == "none\n"
    assert not Path("kvq.db").exists()
    assert kvq("db", "upgrade").code == 0
    assert kvq("db", "current").out == migrate.head() + "\n"


@pytest.mark.parametrize(
    ("url", "code", "word"),
    [
        ("mysql://me:secret@host/db", 2, "not supported"),
        ("junk.db", 2, "not a database"),
        ("no/such/folder/kvq.db", 2, "no/such/folder does not exist"),
        ("postgresql://me:secret@127.0.0.1:1/db", 1, "refused"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_without_its_password(kvq: Kvq, url: str, code: int, word: str) -> None:
    Path("junk.db").write_text("this is no database, but long enough to be taken for one" * 40, encoding="utf-8")
    ran = kvq("db", "upgrade", "--db", url)
    assert ran.code == code
    assert word in ran.err
    assert "secret" not in ran.err
    assert "Traceback" not in ran.err


def test_tables_that_no_room_is_left_for_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}', encoding="utf-8")
    code = """
import resource, signal, sys
from kvq.cli.main import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sys.exit(run(["submit", "a.jsonl", "--db", "full.db"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("kvq: error: the database is unavailable (setting db, sqlite:///full.db): ")
    assert len(done.stderr.splitlines()) == 1


def test_a_database_of_another_kind_is_named_once(kvq: Kvq) -> None:
    ran = kvq("status", "--db", "mysql://me:secret@host/db")
    assert ran.code == 2
    assert ran.err.count("mysql://me:***@host/db") == 1


def test_config_show_tells_values_sources_and_no_password(kvq: Kvq, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("kvq.toml").write_text('broker = "redis://:hunter2@host/0"\n', encoding="utf-8")
    monkeypatch.setenv("KVQ_MAX_NUM_SEQS", "7")
    ran = kvq("config", "show", "--queue", "fast", "--json")
    shown = json.loads(ran.out)
    assert shown["queue"] == {"value": "fast", "source": "--queue"}
    assert shown["max_num_seqs"] == {"value": 7, "source": "KVQ_MAX_NUM_SEQS"}
    assert shown["broker"] == {"value": "redis://:***@host/0", "source": "kvq.toml"}
    assert shown["block_size"] == {"value": 16, "source": "default"}
    table = kvq("config", "show").out
    assert "KVQ_BLOCK_SIZE" in table
    assert "hunter2" not in ran.out + table


def test_an_unknown_setting_stops_every_command(kvq: Kvq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_BROKR", "redis://host")
    for args in (["config", "show"], ["status"], ["worker"], ["db", "current"]):
        ran = kvq(*args)
        assert ran.code == 2
        assert "brokr" in ran.err
        assert "did you mean broker?" in ran.err


def test_a_worker_without_a_broker_is_told_what_to_give(kvq: Kvq) -> None:
    ran = kvq("worker", "--model", "/no/such/model")
    assert ran.code == 2
    assert "--no-broker" in ran.err


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_an_upgrade_that_is_killed_leaves_nothing_and_the_next_one_completes(
    request: pytest.FixtureRequest, tmp_path: Path, database: str
) -> None:
    url = str(tmp_path / "kvq.db") if database == "sqlite" else request.getfixturevalue("pg_empty_url")
    command = [sys.executable, "-m", "kvq.cli", "db", "upgrade", "--db", url]
    killed = subprocess.run(command, env={**os.environ, "KVQ_FAILPOINTS": "during_migrate"}, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert migrate.current(url) is None
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
    assert migrate.current(url) == migrate.head()


@pytest.mark.parametrize("role", ["reader_{}", 'odd "name" %s :x {}'])
def test_a_reader_sees_the_views_and_neither_prompts_nor_a_way_to_change_them(
    kvq: Kvq, pg_db_url: str, role: str
) -> None:
    role = role.format(uuid.uuid4().hex[:8])
    name = sql.Identifier(role)
    try:
        assert "was created" in kvq("db", "grant-reader", role, "--db", pg_db_url).err
        assert "was created" not in kvq("db", "grant-reader", role, "--db", pg_db_url).err
        with psycopg.connect(pg_db_url, autocommit=True) as connection:
            views = {
                row[0]
                for row in connection.execute("SELECT viewname FROM pg_views WHERE schemaname = current_schema()")
            }
            assert set(READABLE_VIEWS) <= views
            connection.execute(sql.SQL("SET ROLE {}").format(name))
            for view in READABLE_VIEWS:
                connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(view)))
            for statement in ("SELECT * FROM job_payloads", "DELETE FROM jobs", "UPDATE results SET text = 'x'"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(statement)
    finally:
        with psycopg.connect(pg_db_url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(name))
            connection.execute(sql.SQL("DROP ROLE {}").format(name))


def test_sqlite_has_no_roles(kvq: Kvq) -> None:
    assert kvq("db", "upgrade").code == 0
    ran = kvq("db", "grant-reader", "someone")
    assert ran.code == 2
    assert "SQLite has no roles" in ran.err
