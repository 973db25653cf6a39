"""The revisions: applied whole, once, by whoever comes first, and equal to what the store believes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

from kvq.migrations import migrate
from kvq.migrations.url import database_url
from kvq.worker import schema

ACCEPTANCE = ["num_draft_tokens", "num_accepted_tokens", "acceptance"]
JOB_RESULTS = [
    "job_id",
    "batch_id",
    "custom_id",
    "line_no",
    "state",
    "finish_reason",
    "text",
    "error_code",
    "error_message",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "queue_ms",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "preemptions",
    "attempts",
    "seed",
    "model",
    "worker_id",
    "created_at",
    "started_at",
    "finished_at",
    "served_from",
    *ACCEPTANCE,
]

VIEWS = {
    "job_results",
    "batch_progress",
    "job_summary",
    "latency_percentiles",
    "prefix_savings",
    "throughput_by_minute",
    "error_top",
    "worker_health",
}


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'new.db'}"
    return str(request.getfixturevalue("pg_empty_url"))


@pytest.fixture
def engine(store_url: str) -> sa.Engine:
    return sa.create_engine(database_url(store_url), poolclass=sa.pool.NullPool)


def test_an_empty_database_has_no_revision_and_asking_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    assert migrate.current(f"sqlite:///{path}") is None
    assert not path.exists()


def test_upgrade_reaches_the_head_and_a_second_one_changes_nothing(empty_url: str) -> None:
    assert migrate.current(empty_url) is None
    migrate.upgrade(empty_url)
    assert migrate.current(empty_url) == migrate.head()
    migrate.upgrade(empty_url)
    assert migrate.current(empty_url) == migrate.head()


def test_many_upgrades_at_once_are_one(empty_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        program = f"from kvq.migrations import migrate; migrate.upgrade({empty_url!r})"
        runs = list(
            pool.map(
                lambda _: subprocess.run([sys.executable, "-c", program], capture_output=True, text=True), range(4)
            )
        )
    assert [run.returncode for run in runs] == [0] * 4, [run.stderr for run in runs]
    assert migrate.current(empty_url) == migrate.head()


def test_a_failed_upgrade_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "taken.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE outbox (mine INTEGER)")  # the last table of the first revision
    other.close()
    with pytest.raises(sa.exc.OperationalError, match="outbox already exists"):
        migrate.upgrade(str(path))
    assert migrate.current(str(path)) is None
    with sqlite3.connect(path) as other:
        tables = {name for (name,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    other.close()
    assert tables == {"outbox"}


def test_the_tables_are_those_the_store_believes_in(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                # SQLite has no type of its own for times, so there is nothing to compare there.
                "compare_type": connection.dialect.name == "postgresql",
                "include_object": lambda _object, name, kind, _reflected, _other: (
                    kind != "index" and name != "alembic_version"
                ),
            },
        )
        assert compare_metadata(context, schema.metadata) == []


def test_the_columns_have_the_same_nullability_as_the_store_believes(engine: sa.Engine) -> None:
    inspector = sa.inspect(engine)
    for table in schema.metadata.sorted_tables:
        found = {column["name"]: column["nullable"] for column in inspector.get_columns(table.name)}
        assert found == {column.name: column.nullable for column in table.columns}, table.name


def test_every_view_is_there_and_those_the_store_reads_have_its_columns(engine: sa.Engine) -> None:
    inspector = sa.inspect(engine)
    assert set(inspector.get_view_names()) == VIEWS
    for view in schema.views.sorted_tables:
        assert [column["name"] for column in inspector.get_columns(view.name)] == [
            column.name for column in view.columns
        ]


def test_job_results_has_exactly_the_promised_columns(engine: sa.Engine) -> None:
    assert [column["name"] for column in sa.inspect(engine).get_columns("job_results")] == JOB_RESULTS


def test_an_older_database_keeps_its_rows_and_its_readers_and_gains_the_new_columns(store_url: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(files("kvq.migrations")))
    config.set_main_option("path_separator", "os")
    engine = sa.create_engine(database_url(store_url), poolclass=sa.pool.NullPool)
    columns = sa.text("SELECT * FROM job_results")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0008")
        connection.execute(
            sa.text(
                "INSERT INTO jobs (seq, job_id, custom_id, queue, endpoint, state)"
                " VALUES (1, 'a', 'a', 'kvq', '/v1/completions', 'succeeded')"
            )
        )
        connection.execute(
            sa.text(
                "INSERT INTO results (seq, attempt, text, num_draft_tokens, num_accepted_tokens)"
                " VALUES (1, 1, 'x', 8, 6)"
            )
        )
        assert list(connection.execute(columns).keys()) == JOB_RESULTS[: -len(ACCEPTANCE)]
        if on_postgres := connection.dialect.name == "postgresql":
            connection.execute(sa.text("GRANT SELECT ON job_results, batch_progress, worker_health TO pg_monitor"))
    migrate.upgrade(store_url)
    with engine.begin() as connection:
        if on_postgres:
            connection.execute(sa.text("SET LOCAL ROLE pg_monitor"))
        for view in ("batch_progress", "worker_health"):
            assert list(connection.execute(sa.text(f"SELECT * FROM {view}")).keys())[-len(ACCEPTANCE) :] == ACCEPTANCE
        row = connection.execute(columns).one()
        assert list(row._mapping) == JOB_RESULTS
        assert (row.text, row.num_draft_tokens, row.num_accepted_tokens, row.acceptance) == ("x", 8, 6, 0.75)


def test_an_unknown_state_is_refused_by_the_database(engine: sa.Engine) -> None:
    insert = sa.text(
        "INSERT INTO jobs (job_id, custom_id, queue, endpoint, state) VALUES ('a', 'a', 'kvq', '/v1/completions', :s)"
    )
    with engine.begin() as connection:
        connection.execute(insert, {"s": "queued"})
    with pytest.raises(sa.exc.IntegrityError, match="jobs_state_is_known"), engine.begin() as connection:
        connection.execute(insert, {"s": "lost"})


def test_a_running_job_must_have_an_owner(engine: sa.Engine) -> None:
    with pytest.raises(sa.exc.IntegrityError, match="jobs_owner_while_running"), engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO jobs (job_id, custom_id, queue, endpoint, state)"
                " VALUES ('a', 'a', 'kvq', '/v1/completions', 'running')"
            )
        )


def test_the_package_carries_the_scripts() -> None:
    folder = files("kvq.migrations")
    assert folder.joinpath("env.py").is_file()
    assert folder.joinpath("versions", "0001_first_schema.py").is_file()


def test_a_database_of_a_newer_version_is_not_touched(engine: sa.Engine, store_url: str) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(migrate.UnknownRevision, match="9999, of a newer kvq"):
        migrate.upgrade(store_url)
    assert migrate.current(store_url) == "9999"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kvq.db", "sqlite:///kvq.db"),
        ("/data/kvq.db", "sqlite:////data/kvq.db"),
        ("sqlite:///kvq.db", "sqlite:///kvq.db"),
        ("postgresql://u:p@h:5/n", "postgresql+psycopg://u:p@h:5/n"),
        ("postgres://h/n", "postgresql+psycopg://h/n"),
        ("postgresql+psycopg://h/n?sslmode=require", "postgresql+psycopg://h/n?sslmode=require"),
    ],
)
def test_every_usual_spelling_of_a_database_is_read(text: str, expected: str) -> None:
    assert database_url(text).render_as_string(hide_password=False) == expected


@pytest.mark.parametrize(("text", "hint"), [("mysql://h/n", "not supported"), ("sqlite://", "in-memory")])
def test_other_databases_are_refused_with_what_to_use(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        database_url(text)
