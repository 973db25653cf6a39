"""The intake on both databases and a real Redis: what Celery clients send becomes rows, and nothing is lost."""

from __future__ import annotations

import base64
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery

from kvq.worker.intake import Intake
from kvq.worker.jobs import Endpoint, JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.factories import claim_all, new_worker
from tests.servers import RedisServer
from tests.waiting import wait_until

KEYS = QueueKeys(queue="kvq")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@pytest.fixture
def client(redis_url: str) -> Iterator[Celery]:
    with celery_client(redis_url) as app:
        yield app


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        yield connection


class Doors:
    """Intakes of one queue into one store."""

    def __init__(self, redis_url: str, store: Store) -> None:
        self.redis_url = redis_url
        self.store = store
        self.rings = 0
        self.revoked: set[str] = set()
        self.faults: list[Exception] = []

    def open(self, *, max_queued: int = 1000, clock: Callable[[], float] = time.monotonic) -> Intake:
        return Intake(
            self.redis_url,
            self.store,
            keys=KEYS,
            max_queued=max_queued,
            clock=clock,
            on_new=self._ring,
            on_fault=self.faults.append,
            is_revoked=self.revoked.__contains__,
        )

    def _ring(self) -> None:
        self.rings += 1


@pytest.fixture
def doors(redis_url: str, store: Store) -> Iterator[Doors]:
    made = Doors(redis_url, store)
    yield made
    assert not made.faults


def send(client: Celery, body: dict[str, Any] | None = None, **options: Any) -> str:
    return str(client.send_task("kvq.generate", kwargs=CHAT if body is None else body, queue="kvq", **options).id)


def error_code(store: Store, job_id: str) -> str:
    row = store.job(job_id)
    assert row is not None
    assert row.state is JobState.FAILED
    assert row.error is not None
    return row.error.code


def assert_nothing_is_left(server: redis.Redis) -> None:
    assert server.exists(*KEYS.waiting, KEYS.unacked, KEYS.unacked_index) == 0


def test_a_message_of_any_celery_client_becomes_a_queued_job(
    client: Celery, server: redis.Redis, doors: Doors, store: Store
) -> None:
    job_id = send(client)
    assert doors.open().take_once() == 1
    (job,) = store.peek("kvq", limit=10)
    assert (job.job_id, job.endpoint, job.body, job.priority) == (job_id, Endpoint.CHAT, CHAT, 0)
    assert doors.rings == 1
    assert_nothing_is_left(server)


def test_a_full_store_leaves_messages_in_redis_until_there_is_room(
    client: Celery, server: redis.Redis, doors: Doors, store: Store
) -> None:
    for _ in range(7):
        send(client)
    now_s = 0.0
    intake = doors.open(max_queued=3, clock=lambda: now_s)
    assert [intake.take_once() for _ in range(3)] == [3, 0, 0]
    assert server.llen(KEYS.queue) == 4
    claim_all(store, new_worker(store))
    now_s = 60.0
    assert [intake.take_once() for _ in range(2)] == [3, 0]
    assert server.llen(KEYS.queue) == 1


def test_a_prompt_makes_a_completion_and_messages_make_a_chat(client: Celery, doors: Doors, store: Store) -> None:
    send(client, {"prompt": "once"})
    send(client)
    doors.open().take_once()
    assert [job.endpoint for job in store.peek("kvq", limit=10)] == [Endpoint.COMPLETIONS, Endpoint.CHAT]


def test_urgent_messages_are_taken_first_and_keep_their_priority(client: Celery, doors: Doors, store: Store) -> None:
    priorities = [9, 5, 0, 3, 7]
    for priority in priorities:
        send(client, priority=priority)
    doors.open().take_once()
    assert [job.priority for job in store.peek("kvq", limit=10)] == sorted(priorities)


def test_eta_and_expires_become_the_earliest_start_and_the_deadline(
    client: Celery, doors: Doors, store: Store, sql: Callable[..., list[Any]]
) -> None:
    now = datetime.now(UTC)
    later = send(client, countdown=3600)
    expired = send(client, expires=now - timedelta(seconds=5))
    bounded = send(client, expires=7200)
    doors.open().take_once()
    assert [job.job_id for job in store.peek("kvq", limit=10)] == [bounded]
    assert store.expire_due() == 1
    row = store.job(expired)
    assert row is not None
    assert row.state is JobState.EXPIRED
    (waits,) = sql("SELECT not_before FROM jobs WHERE job_id = :id", id=later)
    assert str(now.year) in str(waits[0])
    (claimed,) = claim_all(store, new_worker(store))
    assert claimed.deadline is not None
    assert timedelta(seconds=7000) < claimed.deadline - now < timedelta(seconds=7400)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokns": 5}, "unknown_field"),
        ({"messages": "hello"}, "invalid_type"),
        ({"max_tokens": 5}, "missing_field"),
        ({}, "missing_field"),
        ({"prompt": "a", **CHAT}, "invalid_value"),
        ({**CHAT, "stream": True}, "stream_unsupported"),
        ({**CHAT, "temperature": -1}, "invalid_value"),
    ],
)
def test_a_bad_body_makes_a_failed_job_and_an_answer_for_its_sender(
    body: dict[str, Any], code: str, client: Celery, server: redis.Redis, doors: Doors, store: Store
) -> None:
    job_id, good = send(client, body), send(client)
    doors.open().take_once()
    assert error_code(store, job_id) == code
    assert [row.job_id for row in store.outbox_pending(10)] == [job_id]
    assert [job.job_id for job in store.peek("kvq", limit=10)] == [good]
    assert_nothing_is_left(server)


def test_positional_arguments_and_other_tasks_are_refused_with_an_answer(
    client: Celery, doors: Doors, store: Store
) -> None:
    positional = client.send_task("kvq.generate", args=[CHAT], queue="kvq").id
    other = client.send_task("reports.daily", queue="kvq").id
    doors.open().take_once()
    assert error_code(store, positional) == "invalid_value"
    assert error_code(store, other) == "unknown_task"


def test_pickle_is_refused_and_never_read(client: Celery, doors: Doors, store: Store) -> None:
    job_id = send(client, serializer="pickle")
    doors.open().take_once()
    row = store.job(job_id)
    assert row is not None
    assert row.error is not None
    assert "application/json" in row.error.message


def test_a_compressed_message_is_read(client: Celery, doors: Doors, store: Store) -> None:
    send(client, {"prompt": "long " * 500}, compression="zlib")
    doors.open().take_once()
    (job,) = store.peek("kvq", limit=10)
    assert job.body == {"prompt": "long " * 500}


def test_a_message_of_protocol_1_is_read(redis_url: str, doors: Doors, store: Store) -> None:
    with Celery("old", broker=redis_url, set_as_current=False) as old:
        old.conf.task_protocol = 1
        job_id = send(old)
        doors.open().take_once()
    assert [job.job_id for job in store.peek("kvq", limit=10)] == [job_id]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b"[1, 2, 3]",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"properties": {"delivery_tag": 7}}',
        b'{"properties": {"delivery_tag": "t"}, "body": "bm8gdGFzaw==", "content-type": "application/json"}',
        b'{"properties": {"delivery_tag": "t"}, "headers": {"id": 5, "task": "kvq.generate"}}',
        b'{"properties": {"delivery_tag": "t"}, "headers": {"id": ""}}',
        b'{"properties": {"delivery_tag": "t"}, "headers": []}',
        b"[" * 3000,
    ],
)
def test_a_message_that_nobody_could_answer_ends_in_the_poison_list_as_it_came(
    raw: bytes, client: Celery, server: redis.Redis, doors: Doors, store: Store
) -> None:
    server.lpush("kvq", raw)
    good = send(client)
    doors.open().take_once()
    assert server.lrange(KEYS.poison, 0, -1) == [raw]
    assert [job.job_id for job in store.peek("kvq", limit=10)] == [good]
    assert_nothing_is_left(server)


def envelope(headers: dict[str, Any], body: Any, tag: str | None = None, **properties: Any) -> bytes:
    return json.dumps(
        {
            "body": base64.b64encode(json.dumps(body).encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": {"delivery_tag": tag or uuid.uuid4().hex, "body_encoding": "base64", **properties},
        }
    ).encode()


@pytest.mark.parametrize(
    "body",
    [None, 5, [], [[], {}], [1, 2, 3], [[], CHAT, [1]], [[], {"prompt": "\x00\ud800"}, {}], [[], [CHAT], {}]],
)
def test_any_body_under_a_task_id_makes_a_job_that_can_be_answered(
    body: Any, server: redis.Redis, doors: Doors, store: Store
) -> None:
    server.lpush("kvq", envelope({"id": "one", "task": "kvq.generate"}, body))
    doors.open().take_once()
    assert store.job("one") is not None
    assert not server.exists(KEYS.poison)
    assert_nothing_is_left(server)


@pytest.mark.parametrize("when", ["soon", 17, "2026-13-45", {}, "9999-99-99T00:00:00"])
def test_an_unreadable_eta_makes_a_failed_job(when: Any, server: redis.Redis, doors: Doors, store: Store) -> None:
    headers = {"id": "one", "task": "kvq.generate", "eta": when}
    server.lpush("kvq", envelope(headers, [[], CHAT, {}]))
    doors.open().take_once()
    assert error_code(store, "one") == "invalid_value"


def test_the_same_task_twice_is_one_job(server: redis.Redis, doors: Doors, store: Store) -> None:
    for _ in range(3):
        server.lpush("kvq", envelope({"id": "one", "task": "kvq.generate"}, [[], CHAT, {}]))
    intake = doors.open()
    intake.take_once()
    server.lpush("kvq", envelope({"id": "one", "task": "kvq.generate"}, [[], CHAT, {}]))
    intake.take_once()
    assert len(store.peek("kvq", limit=10)) == 1
    assert_nothing_is_left(server)


def test_messages_of_an_intake_that_died_are_taken_over_byte_for_byte(
    client: Celery, server: redis.Redis, doors: Doors, store: Store
) -> None:
    body = {"messages": [{"role": "user", "content": 'ünï "quoted", [] {}'}], "stop": [], "logit_bias": {}}
    job_id = send(client, body)
    raw = server.lrange("kvq", 0, -1)
    dead = doors.open()
    assert [popped.raw for popped in dead._pop(10)] == raw  # and then it dies
    assert server.llen("kvq") == 0
    living = doors.open()
    assert living.reclaim_once() == 0, "a message that was popped just now belongs to a living intake"
    assert living.reclaim_once(idle_s=0) == 1
    (job,) = store.peek("kvq", limit=10)
    assert (job.job_id, job.body) == (job_id, body)
    assert_nothing_is_left(server)


def test_unacked_messages_have_the_format_of_kombu(client: Celery, server: redis.Redis, doors: Doors) -> None:
    send(client)
    (raw,) = server.lrange("kvq", 0, -1)
    doors.open()._pop(10)
    ((tag, value),) = server.hgetall(KEYS.unacked).items()
    message, exchange, routing_key = json.loads(value)
    assert message == json.loads(raw)
    assert message["properties"]["delivery_tag"] == tag.decode()
    assert (exchange, routing_key) == ("", "kvq")
    assert server.zscore(KEYS.unacked_index, tag) == pytest.approx(datetime.now().timestamp(), abs=60)


def test_two_intakes_share_a_queue_and_each_message_becomes_one_job(
    client: Celery, server: redis.Redis, doors: Doors, store: Store
) -> None:
    sent = {send(client) for _ in range(500)}

    def take_all(intake: Intake) -> None:
        while intake.take_once():
            pass

    threads = [threading.Thread(target=take_all, args=(doors.open(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {job.job_id for job in store.peek("kvq", limit=1000)} == sent
    assert_nothing_is_left(server)


def test_a_task_revoked_before_its_message_was_taken_in_is_cancelled(
    client: Celery, doors: Doors, store: Store
) -> None:
    job_id = send(client)
    doors.revoked.add(job_id)
    doors.open().take_once()
    row = store.job(job_id)
    assert row is not None
    assert row.state is JobState.CANCELLED
    assert [told.job_id for told in store.outbox_pending(10)] == [job_id]


def test_the_doorbell_is_heard(server: redis.Redis, doors: Doors) -> None:
    intake = doors.open()
    intake.start()
    wait_until(lambda: server.publish(KEYS.doorbell, "") == 1)
    wait_until(lambda: doors.rings)
    intake.stop()


def test_an_intake_goes_on_after_redis_was_away(doors: Doors, store: Store) -> None:
    own = RedisServer(durable=True)
    own.start()
    try:
        doors.redis_url = own.url
        intake = doors.open()
        intake.start()
        with celery_client(own.url) as client:
            first = send(client)
            wait_until(lambda: store.job(first))
            own.kill()
            own.start()
            second = send(client)
            wait_until(lambda: store.job(second))
        intake.stop()
    finally:
        own.remove()


def test_intake_leaves_the_keys_of_other_celery_applications_alone(
    client: Celery, server: redis.Redis, doors: Doors
) -> None:
    client.send_task("reports.daily")
    server.hset("unacked", "tag", "theirs")
    server.zadd("unacked_index", {"tag": 0})
    intake = doors.open()
    assert intake.take_once() == 0
    assert intake.reclaim_once(idle_s=0) == 0
    assert server.llen("celery") == 1
    assert server.hget("unacked", "tag") == b"theirs"


def test_columns_are_ours_even_when_the_body_holds_sql(
    client: Celery, doors: Doors, store: Store, sql: Callable[..., list[Any]]
) -> None:
    evil = "'; DROP TABLE jobs; --"
    job_id = send(client, {"prompt": evil, "model": evil, "user": evil})
    doors.open().take_once()
    assert sql("SELECT count(*) FROM jobs")[0][0] == 1
    row = store.job(job_id)
    assert row is not None
    assert row.model == evil
