"""No command shows a password of its URLs: not when all goes well, and not when nothing does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest
from sqlalchemy.engine import make_url

from kvq.cli.main import cli
from kvq.worker.store import Store
from kvq.worker.urls import masked
from tests.cli.conftest import Kvq, Ran, start
from tests.factories import new_batch, new_job
from tests.servers import RedisServer

SECRET = "hunter2-of-the-tests"
NOBODY = "127.0.0.1:1"  # nobody listens there

# What each command needs besides its URLs, so that it has something to do. {file}, {model} and {role} are filled in.
NEEDS: dict[str, Sequence[str]] = {
    "run": ["{file}", "--model", "{model}", "--device", "cpu", "--kv-cache-memory", "64MiB", "--output", "out.jsonl"],
    "plan": ["{file}", "--model", "{model}", "--kv-cache-memory", "64MiB"],
    "submit": ["{file}"],
    "worker": ["--model", "{model}", "--device", "cpu", "--log-level", "debug"],
    "status": ["latest"],
    "top": ["--once"],
    "doctor": ["--audit"],
    "results": ["latest"],
    "export": ["latest", "--output", "out.jsonl"],
    "cancel": ["latest"],
    "retry": ["latest"],
    "rerun": ["no-such-job", "--model", "{model}"],
    "dead drop": ["--all"],
    "dead list": [],
    "dead retry": ["--all"],
    "poison drop": ["--yes"],
    "poison list": [],
    "poison retry": [],
    "pause": ["kvq", "--list"],
    "resume": ["kvq"],
    "tenants list": [],
    "tenants set": ["acme", "--weight", "2"],
    "prune": ["--older-than", "30d"],
    "db current": [],
    "db grant-reader": ["{role}"],
    "db upgrade": [],
    "config show": [],
}
DATABASES = {
    "unreachable": f"postgresql://kvq:{SECRET}@{NOBODY}/kvq?connect_timeout=2",
    "in a parameter": f"postgresql://kvq@{NOBODY}/kvq?password={SECRET}",
    "of a key": f"postgresql://kvq@{NOBODY}/kvq?sslmode=require&sslpassword={SECRET}",
    "not escaped": f"postgresql://kvq:a/{SECRET}@b@{NOBODY}/kvq?connect_timeout=2",
    "with a port that is none": f"postgresql://kvq:{SECRET}@127.0.0.1:port/kvq",
    "with a parameter that is none": f"postgresql://kvq:{SECRET}@{NOBODY}/kvq?sslmode=nonsense",
    "with an unknown parameter": f"postgresql://kvq:{SECRET}@{NOBODY}/kvq?nonsense=1",
    "of another kind": f"mysql://kvq:{SECRET}@{NOBODY}/kvq",
    "without its slashes": f"postgresql:/kvq:{SECRET}@{NOBODY}",
    "without its colon": f"postgresql//kvq:{SECRET}@{NOBODY}/kvq",
    "without its scheme": f"kvq:{SECRET}@127.0.0.1",
}
BROKERS = {
    "unreachable": f"redis://:{SECRET}@{NOBODY}/0",
    "in a parameter": f"redis://{NOBODY}/0?password={SECRET}",
    "by TLS": f"rediss://:{SECRET}@{NOBODY}/0?ssl_cert_reqs=CERT_REQUIRED",
    "by TLS to be verified somehow": f"rediss://:{SECRET}@{NOBODY}/0?ssl_cert_reqs=somehow",
    "by TLS with a file that is not there": f"rediss://:{SECRET}@{NOBODY}/0?ssl_ca_certs=/no/such/file",
    "not escaped": f"redis://:a/{SECRET}@b@{NOBODY}/0",
    "with a port that is none": f"redis://:{SECRET}@127.0.0.1:port/0",
    "with a parameter that is none": f"redis://:{SECRET}@{NOBODY}/0?socket_timeout=nonsense",
    "with an unknown parameter": f"redis://:{SECRET}@{NOBODY}/0?nonsense=1",
    "of another kind": f"http://:{SECRET}@{NOBODY}/0",
    "without its slashes": f"redis:/:{SECRET}@{NOBODY}/0",
    "without its colon": f"redis//:{SECRET}@{NOBODY}/0",
    "of RabbitMQ, without a result backend": f"amqp://kvq:{SECRET}@{NOBODY}//",
}


def commands() -> dict[str, click.Command]:
    """Every command that takes the URL of a database or a broker, by its name."""

    def walk(group: click.Group, path: list[str]) -> Iterator[tuple[str, click.Command]]:
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found is not None
            if isinstance(found, click.Group):
                yield from walk(found, [*path, name])
            elif takes(found, "--db") or takes(found, "--broker"):
                yield " ".join([*path, name]), found

    context = click.Context(cli)
    return dict(walk(cli, []))


def takes(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


@pytest.fixture
def line(tmp_path: Path, tiny_model_folder: Path, pg_db_url: str, request: pytest.FixtureRequest) -> Lines:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 2}\n', encoding="utf-8")
    return Lines(file=path, model=tiny_model_folder, role=make_url(pg_db_url).username or "postgres")


class Lines:
    """Makes whole command lines."""

    def __init__(self, *, file: Path, model: Path, role: str) -> None:
        self._values = {"file": str(file), "model": str(model), "role": role}

    def of(self, name: str, **urls: str) -> list[str]:
        command = commands()[name]
        args = [*name.split(), *(arg.format(**self._values) for arg in NEEDS[name])]
        for option, url in urls.items():
            if takes(command, f"--{option}"):
                args += [f"--{option}", url]
        return [*args, "--json"] if takes(command, "--json") else args


def assert_hidden(ran: Ran, caplog: pytest.LogCaptureFixture, what: str) -> None:
    formatter = logging.Formatter()
    said = ran.out + ran.err + "".join(formatter.format(record) for record in caplog.records)
    caplog.clear()
    assert SECRET not in said, f"{what}: {said}"


@pytest.fixture
def secret_redis() -> Iterator[str]:
    """A Redis that wants the secret."""
    server = RedisServer(password=SECRET)
    server.start()
    yield server.url
    server.remove()


def test_every_command_that_takes_a_url_is_tried_here() -> None:
    assert set(commands()) == set(NEEDS)


def test_no_command_that_succeeds_shows_a_password(
    kvq: Kvq, line: Lines, pg_db_url: str, secret_redis: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = make_url(pg_db_url)
    db = (url if url.password else url.set(password=SECRET)).render_as_string(hide_password=False)
    with Store.open(pg_db_url) as store:
        new_batch(store, [new_job(1)])
    for name in NEEDS:
        if name in ("worker", "rerun"):  # below, and with a job that is none
            continue
        ran = kvq(*line.of(name, db=db, broker=secret_redis))
        assert ran.code == 0, (name, ran.err)
        assert_hidden(ran, caplog, name)
    shown = kvq(*line.of("config show", db=db, broker=secret_redis)).out
    assert "***" in shown


@pytest.mark.parametrize("kind", DATABASES)
def test_no_command_shows_the_password_of_a_database_that_cannot_be_used(
    kind: str, kvq: Kvq, line: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name, command in commands().items():
        if takes(command, "--db") and name != "worker":
            ran = kvq(*line.of(name, db=DATABASES[kind]))
            assert ran.code in (1, 2) or name in ("plan", "config show"), (name, ran)
            assert_hidden(ran, caplog, name)


@pytest.mark.parametrize("kind", [*BROKERS, "refused"])
def test_no_command_shows_the_password_of_a_broker_that_cannot_be_used(
    kind: str, kvq: Kvq, line: Lines, sqlite_url: str, secret_redis: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    broker = BROKERS.get(kind, f"redis://:{SECRET}x@127.0.0.1:{urlsplit(secret_redis).port}/0")
    for name, command in commands().items():
        if takes(command, "--broker") and name != "worker":
            ran = kvq(*line.of(name, db=sqlite_url, broker=broker))
            assert ran.code in (1, 2) or name in ("submit", "config show"), (name, ran)
            assert_hidden(ran, caplog, name)


def test_a_worker_that_cannot_start_shows_no_password(line: Lines, tmp_path: Path, sqlite_url: str) -> None:
    """Those whose URLs no worker starts with; of those it starts with, the system's tests read the log."""
    for urls in (
        {"db": DATABASES["unreachable"], "broker": BROKERS["unreachable"]},
        {"db": sqlite_url, "broker": BROKERS["with a port that is none"]},
    ):
        process = start(*line.of("worker", **urls), folder=tmp_path)
        out, err = process.communicate(timeout=120)
        assert process.returncode in (1, 2), err
        assert SECRET not in out + err


def test_a_url_in_the_wrong_place_is_not_shown_either(kvq: Kvq, tmp_path: Path) -> None:
    url = f"redis://:{SECRET}@{NOBODY}/0"
    (tmp_path / "kvq.toml").write_text(f'broker = ["{url}"]\n', encoding="utf-8")
    refused = kvq("status")
    assert refused.code == 2
    assert "broker: must be text" in refused.err
    assert SECRET not in refused.err
    (tmp_path / "kvq.toml").unlink()
    for args in (["worker", url], ["poison", "list", f"--brokr={url}"], ["status", "--config", url]):
        misplaced = kvq(*args)
        assert misplaced.code == 2
        assert SECRET not in misplaced.err + misplaced.out


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql:/kvq:secret@h/x", "postgresql:***@h/x"),
        ("kvq:secret@h/x", "kvq:***@h/x"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("folder:a/kvq.db", "folder:a/kvq.db"),
        ("redis://u:secret@h/0?ssl_ca_certs=/a@b", "redis://u:***@b"),
        ("redis://h/0?x=1&ssl_password=secret&y=2", "redis://h/0?x=1&ssl_password=***&y=2"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert masked(url) == shown
