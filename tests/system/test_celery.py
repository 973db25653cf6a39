"""A worker as its users see it: any Celery client, celery inspect, revoke, events; PostgreSQL and Redis."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.exceptions import TaskRevokedError

from kvq.worker.intake import Intake
from kvq.worker.jobs import JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from kvq.worker.urls import celery_url
from tests.clients import celery_client
from tests.factories import new_batch, new_job
from tests.servers import RedisServer
from tests.system.conftest import WorkerMaker
from tests.system.processes import START_TIMEOUT_S
from tests.waiting import wait_until
from tests.worker.test_fuzz import message as malformed_message

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
# Runs for many seconds unless somebody stops it.
LONG = {"prompt": "once upon a time " * 20, "max_tokens": 1900, "ignore_eos": True, "n": 32}


@pytest.fixture
def client(redis_url: str) -> Iterator[Celery]:
    with celery_client(redis_url) as app:
        yield app


def send(client: Celery, body: dict[str, Any], **options: Any) -> Any:
    return client.send_task("kvq.generate", kwargs=body, queue="kvq", **options)


def inspector(client: Celery) -> Any:
    """``celery inspect`` of the one worker, by name, so that its answer is not waited for in vain."""
    (name,) = wait_until(lambda: client.control.inspect(timeout=1).ping())
    return client.control.inspect(destination=[name], timeout=20)


def state_of(store: Store, job_id: str) -> JobState | None:
    row = store.job(job_id)
    return None if row is None else row.state


def test_a_celery_client_that_knows_only_the_broker_gets_its_answers_and_sees_the_worker(
    client: Celery, redis_url: str, pg_db_url: str, start_worker: WorkerMaker
) -> None:
    worker = start_worker(db=pg_db_url, broker=redis_url, drain_timeout=60)
    # Sent while the worker is still loading its model.
    results = [send(client, {**CHAT, "seed": i}, priority=i % 10) for i in range(30)]
    bad = send(client, {**CHAT, "max_tokns": 1})
    worker.wait_ready()
    inspect = inspector(client)
    with Store.open(pg_db_url) as store:
        _check_answers(results, bad)
        _check_running_jobs_are_seen_and_can_be_revoked(client, store)
        _check_events(client)
        _check_time_limit(client, store)
        _check_jobs_from_sql_are_seen(client, store)
        (stats,) = inspect.stats().values()
        assert stats["pool"]["implementation"] == "kvq.worker.pool:EnginePool"
        assert stats["pool"]["ended"]["succeeded"] >= 30
        assert stats["pool"]["engine"]["generated_tokens"] > 0
        assert worker.stop() == 0
        assert store.live_workers() == []
        assert store.outbox_pending(10, hold_s=0) == []
    with redis.Redis.from_url(redis_url) as server:
        keys = QueueKeys(queue="kvq")
        assert server.exists(*keys.waiting, keys.unacked, keys.unacked_index, keys.poison, "unacked") == 0


def _check_answers(results: list[Any], bad: Any) -> None:
    for result in results:
        answer = result.get(timeout=60)
        assert answer["object"] == "chat.completion"
        assert answer["id"] == f"chatcmpl-{result.id}"
        assert answer["usage"]["completion_tokens"] <= 5
        assert result.state == "SUCCESS"
    with pytest.raises(Exception, match="max_tokns: is not a known field"):
        bad.get(timeout=60)
    assert bad.state == "FAILURE"


def _check_running_jobs_are_seen_and_can_be_revoked(client: Celery, store: Store) -> None:
    inspect = inspector(client)
    assert [reply["ok"] for reply in inspect.ping().values()] == ["pong"]
    plain, terminated, waiting = send(client, LONG), send(client, LONG), send(client, CHAT, countdown=3600)
    wait_until(lambda: state_of(store, waiting.id) is JobState.QUEUED)

    def active() -> dict[str, Any]:
        (tasks,) = inspect.active().values()
        return {task["id"]: task for task in tasks}

    running = wait_until(lambda: (seen := active()) and set(seen) == {plain.id, terminated.id} and seen)
    wait_until(lambda: {plain.state, terminated.state} == {"STARTED"})
    assert set(plain.info) == {"pid", "hostname"}
    for task in running.values():
        assert task["name"] == "kvq.generate"
        assert task["kwargs"]["max_tokens"] == 1900
        assert len(json.dumps(task["kwargs"])) < 300
    plain.revoke()
    terminated.revoke(terminate=True)
    waiting.revoke()
    for result in (plain, terminated, waiting):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
        wait_until(lambda result=result: state_of(store, result.id) is JobState.CANCELLED)  # type: ignore[misc]
    row = store.job(plain.id)
    assert row is not None
    assert row.text, "what was generated before the revocation is kept"
    wait_until(lambda: active() == {})


def _check_events(client: Celery) -> None:
    events: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        receiver.should_stop = event["type"] == "task-succeeded"

    def listen() -> None:
        receiver.capture(limit=None, timeout=60, wakeup=False)

    with client.connection() as connection:
        receiver = client.events.Receiver(connection, handlers={"*": on_event})
        listener = threading.Thread(target=listen)
        listener.start()
        wait_until(lambda: any(event["type"] == "worker-heartbeat" for event in events))
        result = send(client, {"prompt": "a secret prompt " * 50, "max_tokens": 3})
        result.get(timeout=60)
        listener.join(60)
    kinds = [event["type"] for event in events if event.get("uuid") == result.id]
    assert kinds == ["task-received", "task-started", "task-succeeded"]
    assert all(len(json.dumps(event)) < 1000 for event in events), "prompts and answers stay out of events"


def _check_time_limit(client: Celery, store: Store) -> None:
    result = send(client, LONG, time_limit=1)
    with pytest.raises(Exception, match="time_limit_exceeded: it ran longer than its time limit of 1 s"):
        result.get(timeout=60)
    row = store.job(result.id)
    assert row is not None
    assert row.state is JobState.FAILED


def _check_jobs_from_sql_are_seen(client: Celery, store: Store) -> None:
    job = new_job(1, body=CHAT)
    batch_id = new_batch(store, [job])
    wait_until(lambda: store.batch_progress(batch_id).succeeded == 1)
    assert client.AsyncResult(job.job_id).state == "PENDING", "nobody waits for it in Celery: no result is kept there"
    wait_until(lambda: list(inspector(client).active().values()) == [[]])


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_was_revoked_with_terminate_stays_cancelled_when_the_worker_starts_again(
    end: str, client: Celery, redis_url: str, sqlite_url: str, start_worker: WorkerMaker
) -> None:
    first = start_worker(db=sqlite_url, broker=redis_url, max_num_seqs=1).wait_ready()
    with Store.open(sqlite_url) as store:
        running, queued = send(client, {**LONG, "n": 1}), send(client, {**LONG, "n": 1}, priority=9)
        wait_until(lambda: state_of(store, running.id) is JobState.RUNNING, timeout_s=60)
        wait_until(lambda: state_of(store, queued.id) is not None)
        for result in (queued, running):
            result.revoke(terminate=True)
        for result in (running, queued):
            wait_until(lambda result=result: state_of(store, result.id) is JobState.CANCELLED)  # type: ignore[misc]
        if end == "stop":
            assert first.stop() == 0
        else:
            first.kill()
        before = [store.job(result.id) for result in (running, queued)]
        start_worker(db=sqlite_url, broker=redis_url).wait_ready()
        assert send(client, CHAT).get(timeout=60)["object"] == "chat.completion"
        assert [store.job(result.id) for result in (running, queued)] == before
        assert before[0] is not None
        assert before[0].text, "what was generated before the revocation is kept"
        for result in (running, queued):
            with pytest.raises(TaskRevokedError):
                result.get(timeout=60)
        assert store.check_integrity() == []


def test_a_worker_on_a_unix_socket_survives_the_loss_of_redis_and_answers_afterwards(
    pg_db_url: str, start_worker: WorkerMaker
) -> None:
    server = RedisServer(durable=True, password="p@ss/word")
    server.start()
    as_celery_spells_it = celery_url(server.socket_url)
    try:
        worker = start_worker(db=pg_db_url, broker=server.socket_url).wait_ready()
        with celery_client(as_celery_spells_it) as client:
            job_id = send(client, {**LONG, "n": 1, "max_tokens": 600}).id
            with Store.open(pg_db_url) as store:
                wait_until(lambda: state_of(store, job_id) is JobState.RUNNING)
                server.kill()
                wait_until(lambda: state_of(store, job_id) is JobState.SUCCEEDED, timeout_s=60)
            server.start()
        with celery_client(as_celery_spells_it) as client:
            assert client.AsyncResult(job_id).get(timeout=60)["usage"]["completion_tokens"] == 600
            assert send(client, CHAT).get(timeout=60)["object"] == "chat.completion"
        assert worker.stop() == 0
    finally:
        server.remove()


def test_a_worker_without_a_broker_leaves_the_answers_of_celery_jobs_to_one_with_a_broker(
    client: Celery, redis_url: str, sqlite_url: str, start_worker: WorkerMaker
) -> None:
    with Store.open(sqlite_url) as store:
        result = send(client, CHAT)
        Intake(
            redis_url,
            store,
            keys=QueueKeys(queue="kvq"),
            max_queued=9,
            on_new=lambda: None,
            on_fault=lambda _: None,
        ).take_once()
        alone = start_worker("--no-broker", db=sqlite_url)
        wait_until(lambda: state_of(store, result.id) is JobState.SUCCEEDED, timeout_s=START_TIMEOUT_S)
        alone.wait_for_log("1 jobs that ended here came by Celery")
        assert result.state == "PENDING"
        start_worker(db=sqlite_url, broker=redis_url)
        assert result.get(timeout=START_TIMEOUT_S)["object"] == "chat.completion"
        wait_until(lambda: store.check_outbox(lease_s=60) == [])
        assert len(store.live_workers()) == 2, "told although the worker that computed it lives"


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_a_worker_process_outlives_malformed_messages_and_answers_the_next_good_one(
    client: Celery, redis_url: str, sqlite_url: str, sql: Callable[..., list[Any]], start_worker: WorkerMaker
) -> None:
    draw, keys, number = random.Random(5), QueueKeys(queue="kvq"), 400
    with redis.Redis.from_url(redis_url) as server, Store.open(sqlite_url) as store:
        server.lpush(keys.queue, *(malformed_message(i, draw) for i in range(number)))
        worker = start_worker(db=sqlite_url, broker=redis_url, log_level="error")
        wait_until(lambda: server.llen(keys.queue) == 0, timeout_s=START_TIMEOUT_S)
        assert send(client, CHAT).get(timeout=START_TIMEOUT_S)["object"] == "chat.completion"
        wait_until(lambda: store.num_queued("kvq", at_most=1) == 0, timeout_s=START_TIMEOUT_S)
        assert worker.stop() == 0, worker.log
        assert server.exists(keys.unacked, keys.unacked_index) == 0
        assert store.check_integrity() == []
        # What is left to be told has links that make no sense, which are tried for a minute.
        assert all(error for (error,) in sql("SELECT last_error FROM outbox"))
