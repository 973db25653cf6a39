"""What becomes of a message: a job as it asks for, a failed job with a reason, or a place in the poison list."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery

from kvq.worker.jobs import Endpoint, JobState
from kvq.worker.store import Store
from tests.factories import claim_all, new_worker
from tests.worker.intakes import CHAT, KEYS, Doors, assert_nothing_is_left, envelope, error_code, send


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
        ({"prompt": "half \\ \ud83d \\\ude00"}, "invalid_value"),
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
