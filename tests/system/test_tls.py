"""Redis and PostgreSQL behind TLS and passwords: a job goes in, its answer comes out; strangers are told nothing.

The servers that come in wheels speak no TLS, so it ends at a door of the tests before them; clients, certificates,
names and sockets are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from kvq.cli.main import run
from kvq.worker.app import create_app
from kvq.worker.config import Settings
from kvq.worker.errors import SettingsError
from kvq.worker.intake import Intake
from kvq.worker.jobs import JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.plain_door import PlainDoor
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.servers import PostgresServer, RedisServer
from tests.system.conftest import WorkerMaker
from tests.tls import TlsDoor, certificate

PASSWORD = "hunter2-of-the-tests"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``right.pem`` is trusted and for localhost, ``other.pem`` is for another host, ``wrong.pem`` signed nothing."""
    made = tmp_path_factory.mktemp("certificates")
    for name, host in (("right", "localhost"), ("other", "other.test"), ("wrong", "localhost")):
        certificate(made, host, name)
    return made


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer(password=PASSWORD)
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer(password=PASSWORD)
    server.start()
    yield server
    server.remove()


@pytest.fixture
def redis_door(redis_server: RedisServer, folder: Path) -> Iterator[TlsDoor]:
    with TlsDoor(folder / "right.pem", ("127.0.0.1", redis_server.port)) as door:
        yield door


@pytest.fixture
def postgres_door(postgres_server: PostgresServer, folder: Path) -> Iterator[TlsDoor]:
    with TlsDoor(folder / "right.pem", postgres_server.socket, of_postgres=True) as door:
        yield door


def redis_at(door: TlsDoor, authority: Path, password: str = PASSWORD) -> str:
    return f"rediss://:{password}@localhost:{door.port}/0?ssl_ca_certs={authority}"


def postgres_at(door: TlsDoor, authority: Path, password: str = PASSWORD) -> str:
    options = f"sslmode=verify-full&sslrootcert={authority}"
    return f"postgresql://postgres:{password}@localhost:{door.port}/postgres?{options}"


def test_a_job_goes_in_by_celery_and_its_answer_comes_out_all_of_it_by_tls_and_with_passwords(
    redis_door: TlsDoor, postgres_door: TlsDoor, folder: Path, start_worker: WorkerMaker
) -> None:
    broker, db = redis_at(redis_door, folder / "right.pem"), postgres_at(postgres_door, folder / "right.pem")
    assert run(["db", "upgrade", "--db", db]) == 0
    worker = start_worker(db=db, broker=broker)
    # Celery's backend, unlike our worker, wants to be told that the certificate is to be verified.
    with celery_client(broker + "&ssl_cert_reqs=CERT_REQUIRED") as client:
        result = client.send_task("kvq.generate", kwargs=CHAT, queue="kvq")
        worker.wait_ready()
        assert result.get(timeout=60)["object"] == "chat.completion"
    with Store.open(db) as store:
        row = store.job(result.id)
        assert row is not None
        assert row.state is JobState.SUCCEEDED
    assert worker.stop() == 0
    assert redis_door.num_trusting > 1
    assert postgres_door.num_trusting > 1
    assert PASSWORD not in worker.log


def test_a_worker_does_not_speak_to_a_redis_it_does_not_trust_and_says_why(
    redis_door: TlsDoor, sqlite_url: str, folder: Path, start_worker: WorkerMaker
) -> None:
    worker = start_worker(db=sqlite_url, broker=redis_at(redis_door, folder / "wrong.pem"))
    intake = "the broker is away, trying again until it answers: Error 1 connecting to localhost"
    for said in (intake, "consumer: Cannot connect to rediss://:**@localhost", "certificate verify failed"):
        worker.wait_for_log(said)
    assert redis_door.num_trusting == 0
    assert PASSWORD not in worker.log


@pytest.mark.parametrize("authority", ["wrong", "system"])
def test_an_intake_refuses_a_redis_it_does_not_trust(
    authority: str, redis_door: TlsDoor, sqlite_url: str, folder: Path
) -> None:
    broker = redis_at(redis_door, folder / "wrong.pem")
    url = Settings(broker=broker if authority == "wrong" else broker.partition("?")[0]).broker
    assert url is not None
    with Store.open(sqlite_url) as store:
        intake = Intake(
            url, store, keys=QueueKeys(queue="kvq"), max_queued=9, on_new=lambda: None, on_fault=lambda _: None
        )
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            intake.take_once()
    assert redis_door.num_trusting == 0


def test_a_sender_refuses_a_redis_it_does_not_trust(redis_door: TlsDoor, folder: Path) -> None:
    url = redis_at(redis_door, folder / "wrong.pem") + "&ssl_cert_reqs=CERT_REQUIRED"
    with (
        Celery(broker=url, set_as_current=False) as sender,
        pytest.raises(OperationalError, match="certificate verify failed"),
    ):
        sender.send_task("kvq.generate", kwargs=CHAT, queue="kvq", retry=False)
    assert redis_door.num_trusting == 0


def test_a_redis_with_a_certificate_for_another_host_is_refused(redis_server: RedisServer, folder: Path) -> None:
    with TlsDoor(folder / "other.pem", ("127.0.0.1", redis_server.port)) as door:
        url = Settings(broker=redis_at(door, folder / "other.pem")).broker
        assert url is not None
        with redis.Redis.from_url(url) as client, pytest.raises(redis.ConnectionError, match="Hostname mismatch"):
            client.ping()
        assert door.num_trusting == 0


def test_a_command_refuses_a_redis_it_does_not_trust_or_that_does_not_trust_it(
    redis_door: TlsDoor, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["poison", "list", "--broker"]
    assert run([*command, redis_at(redis_door, folder / "right.pem")]) == 0
    assert run([*command, redis_at(redis_door, folder / "wrong.pem")]) == 1
    untrusted = capsys.readouterr().err
    assert "certificate verify failed" in untrusted
    assert run([*command, redis_at(redis_door, folder / "right.pem", "not-the-password")]) == 1
    unknown = capsys.readouterr().err
    assert "invalid username-password pair" in unknown
    assert not {PASSWORD, "not-the-password"} & set((untrusted + unknown).split())


@pytest.mark.parametrize(
    ("signed_by", "trusted", "password", "reason"),
    [
        ("right", "wrong", PASSWORD, "certificate verify failed"),
        ("other", "other", PASSWORD, 'certificate for "other.test" does not match host name "localhost"'),
        ("right", "right", "not-the-password", "password authentication failed"),
    ],
)
def test_a_command_refuses_a_postgresql_it_does_not_trust_or_that_does_not_trust_it(
    signed_by: str,
    trusted: str,
    password: str,
    reason: str,
    postgres_server: PostgresServer,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TlsDoor(folder / f"{signed_by}.pem", postgres_server.socket, of_postgres=True) as door:
        db = postgres_at(door, folder / f"{trusted}.pem", password)
        for command in (["status"], ["db", "upgrade"]):
            assert run([*command, "--db", db]) == 1
            said = capsys.readouterr()
            assert reason in said.err
            assert password not in said.err + said.out
        assert (door.num_trusting > 0) == (password != PASSWORD)


@pytest.mark.parametrize(
    ("signed_by", "trusted", "reason"),
    [
        ("right", "wrong", "certificate verify failed"),
        ("other", "other", "Hostname mismatch"),
        ("right", "right", None),
    ],
)
def test_a_rabbitmq_is_spoken_to_when_its_certificate_and_its_name_are_right(
    signed_by: str, trusted: str, reason: str | None, redis_server: RedisServer, folder: Path
) -> None:
    # Behind the door is no RabbitMQ: what matters here is whether anything is said to it, by each of two clients.
    with TlsDoor(folder / f"{signed_by}.pem", ("127.0.0.1", redis_server.port)) as door:
        url = f"amqps://kvq:{PASSWORD}@localhost:{door.port}//?ssl_ca_certs={folder / f'{trusted}.pem'}"
        intake = PlainDoor(url, QueueKeys(queue="kvq"))
        with pytest.raises(intake.errors, match=reason):
            intake.pop(1)
        settings = Settings(broker=url, result_backend="redis://localhost", engine={"model": "tiny"})
        with (
            create_app(settings) as app,
            app.connection_for_read(connect_timeout=1) as connection,
            pytest.raises(intake.errors, match=reason),
        ):
            connection.connect()
        assert (door.num_trusting > 0) == (reason is None)


def test_how_a_certificate_is_verified_is_said_to_every_client_alike(tmp_path: Path) -> None:
    def broker(options: str) -> str | None:
        return Settings(broker=f"rediss://h/0{options}").broker

    assert broker("") == "rediss://h/0?ssl_cert_reqs=required"
    assert broker("?ssl_cert_reqs=CERT_NONE&protocol=2") == "rediss://h/0?ssl_cert_reqs=none&protocol=2"
    assert broker("?ssl_cert_reqs=optional") == "rediss://h/0?ssl_cert_reqs=optional"
    with pytest.raises(SettingsError, match="broker: ssl_cert_reqs must be required, optional, none, got 'maybe'"):
        broker("?ssl_cert_reqs=maybe")
    with pytest.raises(SettingsError, match=r"broker: ssl_ca_certs names .*, and there is no such file"):
        broker(f"?ssl_ca_certs={tmp_path / 'none.pem'}")
