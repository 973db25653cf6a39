"""The intake on both databases and a real Redis: what Celery clients send becomes rows, and nothing is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery

from kvq.worker.intake import Intake
from kvq.worker.jobs import Endpoint, JobState
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.factories import claim_all, new_worker
from tests.servers import RedisServer
from tests.waiting import wait_until
from tests.worker.intakes import CHAT, KEYS, Doors, assert_nothing_is_left, envelope, error_code, send


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


def test_half_a_surrogate_pair_is_taken_over_too(client: Celery, doors: Doors, store: Store) -> None:
    job_id = send(client, {"prompt": "half \ud83d"})
    doors.open()._pop(10)  # and then it dies
    assert doors.open().reclaim_once(idle_s=0) == 1
    assert error_code(store, job_id) == "invalid_value"


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


def test_a_burst_lasts_until_nothing_more_comes(client: Celery, doors: Doors, store: Store) -> None:
    now_s = 0.0
    intake = doors.open(clock=lambda: now_s)
    for number in range(1, 3):
        send(client)
        intake.take_once()
        assert intake.in_burst
        assert len(store.peek("kvq", limit=10)) == number, "rows can be read while more are coming"
        now_s += 0.09
        intake.take_once()
        assert intake.in_burst, "the sender may have been put off for a moment"
    rings = doors.rings
    now_s += 0.02
    intake.take_once()
    assert not intake.in_burst
    assert doors.rings == rings + 1


def test_a_burst_that_does_not_end_is_not_waited_for(client: Celery, doors: Doors) -> None:
    now_s = 0.0
    intake = doors.open(clock=lambda: now_s)
    for second, waited_for in enumerate([True, False, False]):
        now_s = float(second)
        send(client)
        intake.take_once()
        assert intake.in_burst is waited_for


def test_while_jobs_run_nothing_is_waited_for(client: Celery, doors: Doors) -> None:
    intake = doors.open(is_busy=lambda: True)
    send(client)
    intake.take_once()
    assert not intake.in_burst


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


@pytest.mark.parametrize("table", ["jobs", "job_payloads"])
def test_no_message_is_poison_by_a_fault_of_the_database(
    table: str, client: Celery, server: redis.Redis, doors: Doors, store: Store, sql: Callable[..., list[Any]]
) -> None:
    sql(f"ALTER TABLE {table} RENAME TO {table}_away")
    sent = [send(client) for _ in range(3)]
    intake = doors.open()
    intake.start()
    with pytest.raises(AssertionError):
        wait_until(lambda: doors.faults or server.exists(KEYS.poison), timeout_s=1.5)
    assert server.hlen(KEYS.unacked) + server.llen(KEYS.queue) == 3
    sql(f"ALTER TABLE {table}_away RENAME TO {table}")
    wait_until(lambda: len(store.peek("kvq", limit=10)) == 3)
    intake.stop()
    assert {job.job_id for job in store.peek("kvq", limit=10)} == set(sent)
    assert_nothing_is_left(server)


def test_a_standby_that_takes_no_writes_yet_is_waited_for(
    client: Celery, server: redis.Redis, doors: Doors, pg_db_url: str
) -> None:
    with Store.open(pg_db_url) as standby:
        doors.store = standby
        become(pg_db_url, "on")
        sent = send(client)
        intake = doors.open()
        intake.start()
        wait_until(lambda: server.hlen(KEYS.unacked))
        with pytest.raises(AssertionError):
            wait_until(lambda: server.exists(KEYS.poison), timeout_s=1.5)
        become(pg_db_url, "off")
        wait_until(lambda: standby.job(sent))
        intake.stop()
    assert_nothing_is_left(server)


def become(url: str, read_only: str) -> None:
    """Make a PostgreSQL database take no writes ("on"), or take them again, and end its sessions."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET default_transaction_read_only = {read_only}')
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid()"
        )


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
