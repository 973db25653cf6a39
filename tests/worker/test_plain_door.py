"""Brokers that keep what is not acknowledged: the same intake, asking one message at a time.

Run on kombu's Redis transport, whose messages are restored when a connection closes, by the same code as on RabbitMQ;
on a real RabbitMQ too where ``KVQ_TEST_AMQP_URL`` names one (its queues ``kvq-test`` and ``kvq-test:poison`` are
emptied).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

import amqp
import pytest
from amqp.exceptions import ChannelError
from celery import Celery
from kombu import Connection
from kombu.transport import pyamqp

from kvq.worker import intake as intake_module
from kvq.worker.config import Settings
from kvq.worker.errors import SettingsError
from kvq.worker.intake import Intake, open_door
from kvq.worker.jobs import JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import MAX_BODY_BYTES
from kvq.worker.plain_door import PlainDoor, sealed
from kvq.worker.redis_door import RedisDoor
from kvq.worker.store import Store

KEYS = QueueKeys(queue="kvq-test")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
REAL = [url] if (url := os.environ.get("KVQ_TEST_AMQP_URL")) else []


@pytest.fixture(params=["redis transport", *REAL])
def broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    url = str(request.getfixturevalue("redis_url")) if request.param == "redis transport" else str(request.param)
    monkeypatch.setattr(intake_module, "open_door", PlainDoor)
    with Connection(url) as connection:
        for name in (KEYS.queue, KEYS.poison):
            queue = connection.SimpleQueue(name)
            queue.clear()
            queue.close()
    return url


@pytest.fixture
def client(broker: str) -> Iterator[Celery]:
    with Celery("service", broker=broker, set_as_current=False) as app:
        yield app


def open_intake(broker: str, store: Store, *, max_queued: int = 1000) -> Intake:
    return Intake(
        broker,
        store,
        keys=KEYS,
        max_queued=max_queued,
        on_new=lambda: None,
        on_fault=lambda fault: pytest.fail(f"{fault}"),
    )


def send(client: Celery, task_id: str, **options: Any) -> None:
    client.send_task("kvq.generate", kwargs=CHAT, queue=KEYS.queue, task_id=task_id, **options)


def depth(broker: str, name: str = KEYS.queue) -> int:
    with Connection(broker) as connection:
        queue = connection.SimpleQueue(name)
        try:
            return int(queue.qsize())
        except ChannelError:  # of the Redis transport an empty queue is none
            return 0
        finally:
            queue.close()


def states(store: Store, *job_ids: str) -> list[JobState | None]:
    rows = [store.job(job_id) for job_id in job_ids]
    return [None if row is None else row.state for row in rows]


def test_messages_become_jobs_and_are_acknowledged_after_the_commit(broker: str, client: Celery, store: Store) -> None:
    for number in range(5):
        send(client, f"t{number}")
    send(client, "t0")
    intake = open_intake(broker, store)
    assert intake.take_once() == 6
    assert states(store, *(f"t{number}" for number in range(5))) == [JobState.QUEUED] * 5
    intake._door.close()
    assert depth(broker) == 0


def test_a_message_committed_but_not_acknowledged_is_delivered_again_and_changes_nothing(
    broker: str, client: Celery, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(_: object) -> None:
        raise Killed

    send(client, "once")
    first = open_intake(broker, store)
    monkeypatch.setattr(first._door, "acknowledge", die)
    with pytest.raises(Killed):
        first.take_once()
    assert states(store, "once") == [JobState.QUEUED]
    first._door.close()  # what the system does with a dead process's connection
    second = open_intake(broker, store)
    assert second.take_once() == 1
    assert store.num_queued("kvq-test", at_most=10) == 1
    second._door.close()
    assert depth(broker) == 0


def test_a_full_store_leaves_the_messages_with_the_broker(broker: str, client: Celery, store: Store) -> None:
    for number in range(5):
        send(client, f"t{number}")
    intake = open_intake(broker, store, max_queued=2)
    assert intake.take_once() == 2
    assert intake.take_once() == 0
    intake._door.close()
    assert depth(broker) == 3


def test_a_message_nobody_can_read_is_kept_and_holds_up_nobody(broker: str, client: Celery, store: Store) -> None:
    with Connection(broker) as connection, connection.Producer() as producer:
        producer.publish(b"\xff\xfe", routing_key=KEYS.queue, content_type="application/data")
    send(client, "after")
    intake = open_intake(broker, store)
    assert intake.take_once() == 2
    intake._door.close()
    assert states(store, "after") == [JobState.QUEUED]
    assert (depth(broker), depth(broker, KEYS.poison)) == (0, 1)


def test_a_packed_message_is_unpacked_by_us_and_one_that_cannot_be_fails_alone(
    broker: str, client: Celery, store: Store
) -> None:
    send(client, "packed", compression="zlib")
    with Connection(broker) as connection, connection.Producer() as producer:
        for task_id, body in (("broken", b"no zlib"), ("bomb", zlib.compress(bytes(MAX_BODY_BYTES + 1)))):
            headers = {"id": task_id, "task": "kvq.generate", "compression": "application/x-gzip"}
            producer.publish(
                body, routing_key=KEYS.queue, headers=headers, content_type="application/json", content_encoding="utf-8"
            )
    send(client, "after")
    intake = open_intake(broker, store)
    assert intake.take_once() == 4
    intake._door.close()
    queued, failed = JobState.QUEUED, JobState.FAILED
    assert states(store, "packed", "broken", "bomb", "after") == [queued, failed, failed, queued]
    for task_id, told in (("broken", "cannot be decompressed"), ("bomb", "is larger than 32 MiB")):
        row = store.job(task_id)
        assert row is not None
        assert row.error is not None
        assert told in row.error.message
    assert depth(broker) == 0


@pytest.mark.parametrize("body", [zlib.compress(b"{}"), b"no zlib"])
def test_messages_of_rabbitmq_stay_packed(body: bytes) -> None:
    raw = amqp.Message(body, content_type="application/json", application_headers={"compression": "zlib"})
    raw.delivery_info = {"delivery_tag": 1}
    message = sealed(pyamqp.Message)(raw)
    assert (message.body, message.errors) == (body, [])
    left_to_itself = pyamqp.Message(raw)
    assert left_to_itself.body != body or left_to_itself.errors


def test_of_amqps_priorities_the_highest_runs_first(broker: str, client: Celery, store: Store) -> None:
    for task_id, priority in (("low", 1), ("high", 8)):
        send(client, task_id, priority=priority)
    intake = open_intake(broker, store)
    assert intake.take_once() == 2
    intake._door.close()
    assert [job.job_id for job in store.peek("kvq-test", limit=10)] == ["high", "low"]


def test_the_door_follows_from_the_url() -> None:
    assert isinstance(open_door("amqp://guest@localhost//", KEYS), PlainDoor)
    assert isinstance(open_door("rediss://localhost/0", KEYS), RedisDoor)


@pytest.mark.parametrize("broker_url", ["amqp://u:p@h//", "amqps://h/v"])
def test_an_amqp_broker_wants_to_be_told_where_answers_go(broker_url: str) -> None:
    with pytest.raises(SettingsError, match=r"result_backend: is not set; with an amqp:// broker"):
        Settings(broker=broker_url)
    assert Settings(broker=broker_url, result_backend="redis://h/0").broker == broker_url
