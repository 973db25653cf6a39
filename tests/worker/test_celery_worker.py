"""Inside Celery, without an engine: configuration, the messages Celery sees, and what senders are told."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from kvq.worker.app import KvqApp, control_queue, create_app
from kvq.worker.config import Settings
from kvq.worker.errors import SettingsError
from kvq.worker.intake import Intake
from kvq.worker.jobs import JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import handler_message
from kvq.worker.outbox import Outbox
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of
from tests.servers import RedisServer
from tests.waiting import wait_until

# Celery 5.7 calls what redis-py 8 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

CHAT = {"messages": [{"role": "user", "content": "hello " * 100}], "max_tokens": 5}


@pytest.fixture
def client(redis_url: str) -> Iterator[Celery]:
    with celery_client(redis_url) as app:
        yield app


def make_app(redis_url: str, **settings: Any) -> KvqApp:
    return create_app(Settings(broker=redis_url, engine={"model": "tiny"}, **settings))


@pytest.fixture
def app(redis_url: str) -> Iterator[KvqApp]:
    made = make_app(redis_url)
    yield made
    made.close()


class Teller:
    """An outbox that runs until the test ends."""

    def __init__(self, app: KvqApp, store: Store, worker_id: str) -> None:
        self.told: dict[str, JobState] = {}
        self.faults: list[Exception] = []
        self.outbox = Outbox(
            app,
            store,
            identity=lambda: worker_id,
            on_told=lambda job_id, state, _error: self.told.update({job_id: state}),
            on_fault=self.faults.append,
        )


TellerMaker = Callable[..., Teller]


@pytest.fixture
def start_teller(app: KvqApp, store: Store) -> Iterator[TellerMaker]:
    tellers: list[Teller] = []

    def start(worker_id: str | None = None, of: KvqApp | None = None) -> Teller:
        teller = Teller(of or app, store, worker_id or new_worker(store))
        tellers.append(teller)
        teller.outbox.start()
        return teller

    yield start
    for teller in tellers:
        teller.outbox.stop()
        assert not teller.faults


def send(client: Celery, redis_url: str, store: Store, body: Any = None, **options: Any) -> AsyncResult[Any]:
    """Send a task and take it in."""
    result = client.send_task("kvq.generate", kwargs=body or CHAT, queue="kvq", **options)
    take_in(redis_url, store)
    return result


def take_in(redis_url: str, store: Store) -> None:
    keys = QueueKeys(queue="kvq")
    Intake(redis_url, store, keys=keys, max_queued=100, on_new=lambda: None, on_fault=lambda _: None).take_once()


def test_only_json_is_accepted_and_results_expire(app: KvqApp) -> None:
    assert app.conf.accept_content == ["json"]
    assert app.conf.result_accept_content == ["json"]
    assert (app.conf.task_serializer, app.conf.result_serializer) == ("json", "json")
    assert app.conf.result_expires == 86400


def test_celerys_own_consumer_never_reads_the_job_list() -> None:
    settings = Settings(broker="redis://localhost", queue="jobs", engine={"model": "tiny"})
    assert control_queue(settings) not in QueueKeys(queue="jobs").waiting


def test_a_worker_for_celery_needs_a_broker() -> None:
    with pytest.raises(SettingsError, match="--no-broker"):
        create_app(Settings(engine={"model": "tiny"}))


def test_celery_sees_a_short_description_and_never_the_prompt(store: Store) -> None:
    secret = "secret " * 500
    new_batch(store, [new_job(1, body={"messages": [{"role": "user", "content": secret}], "max_tokens": 5})])
    (job,) = claim_all(store, new_worker(store))
    message = handler_message(job, "kvq.generate", channel=None)
    assert len(message.body) < 600
    assert len(message.headers["kwargsrepr"]) < 400
    args, kwargs, _links = json.loads(message.body)
    assert args == []
    assert kwargs["max_tokens"] == 5
    assert kwargs["prompt"].endswith("(3500 characters)")
    assert message.headers["ignore_result"], "nobody waits in Celery for a job that was submitted through SQL"


def test_a_sender_gets_the_response_body(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    result = send(client, redis_url, store)
    worker_id = new_worker(store)
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job, response={"id": "x", "choices": [{"text": "ünï"}]})])
    teller = start_teller(worker_id)
    assert result.get(timeout=30) == {"id": "x", "choices": [{"text": "ünï"}]}
    wait_until(lambda: teller.told == {result.id: JobState.SUCCEEDED})
    assert store.outbox_pending(10, hold_s=0) == []
    with redis.Redis.from_url(redis_url) as server:
        assert 0 < server.ttl(f"celery-task-meta-{result.id}") <= 86400


def test_a_sender_of_a_failed_job_gets_an_exception_with_the_reason(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    result = send(client, redis_url, store)
    worker_id = new_worker(store)
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [failure_of(job, "context_length_exceeded")])
    start_teller(worker_id)
    with pytest.raises(Exception, match="context_length_exceeded: context_length_exceeded in a test") as raised:
        result.get(timeout=30)
    assert type(raised.value).__name__ == "GenerationFailed"
    assert result.state == "FAILURE"


def test_a_sender_of_a_bad_body_gets_an_exception_that_names_the_field(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    start_teller()
    result = send(client, redis_url, store, {"messages": [{"role": "user", "content": "x"}], "max_tokns": 1})
    with pytest.raises(Exception, match="max_tokns: is not a known field; did you mean max_tokens"):
        result.get(timeout=30)


def test_cancelled_and_expired_jobs_are_revoked_for_their_senders(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    cancelled = send(client, redis_url, store)
    expired = send(client, redis_url, store, expires=0.01)
    store.cancel_jobs([cancelled.id])
    wait_until(store.expire_due)
    start_teller()
    for result, reason in ((cancelled, "revoked"), (expired, "expired")):
        with pytest.raises(TaskRevokedError, match=reason):
            result.get(timeout=30)
        assert result.state == "REVOKED"


def test_the_dead_letter_of_a_poison_job_reaches_its_sender(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    result = send(client, redis_url, store)
    for _ in range(3):
        worker_id = new_worker(store)
        claim_all(store, worker_id)
        store.bury_worker(worker_id)
        store.reap(lease_s=60)
    start_teller()
    with pytest.raises(Exception, match="worker_lost: 3 workers were lost"):
        result.get(timeout=30)


def test_what_a_dead_worker_committed_but_never_told_is_told_by_another(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    result = send(client, redis_url, store)
    dead = new_worker(store)
    (job,) = claim_all(store, dead)
    store.finish(dead, [outcome_of(job)])
    living = start_teller()
    assert store.outbox_pending(10, worker_id=new_worker(store)) == [], "its worker is alive and will tell it"
    store.bury_worker(dead)
    assert result.get(timeout=30) == {"id": result.id, "choices": []}
    wait_until(lambda: result.id in living.told)


def test_a_job_whose_sender_wants_no_result_leaves_none(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    result = send(client, redis_url, store, ignore_result=True)
    worker_id = new_worker(store)
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job)])
    teller = start_teller(worker_id)
    wait_until(lambda: result.id in teller.told)
    with redis.Redis.from_url(redis_url) as server:
        assert not server.exists(f"celery-task-meta-{result.id}")


def test_jobs_that_begin_together_are_told_started_and_a_success_stays(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    results = [send(client, redis_url, store) for _ in range(3)]
    unwanted = send(client, redis_url, store, ignore_result=True)
    jobs = claim_all(store, new_worker(store))
    client.backend.store_result(results[0].id, {"choices": []}, "SUCCESS")
    with redis.Redis.from_url(redis_url) as server:
        server.set(f"celery-task-meta-{results[2].id}", '{"status": "RETRY", "result": null}')
    teller = start_teller()
    for job in jobs:
        teller.outbox.note_started(job)
    wait_until(lambda: results[1].state == "STARTED")
    assert [result.state for result in results] == ["SUCCESS", "STARTED", "STARTED"]
    assert set(results[1].result) == {"pid", "hostname"}
    with redis.Redis.from_url(redis_url) as server:
        assert not server.exists(f"celery-task-meta-{unwanted.id}")
        assert 0 < server.ttl(f"celery-task-meta-{results[1].id}") <= 86_400


def test_what_lies_under_a_key_of_ours_does_not_end_the_telling(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker, caplog: pytest.LogCaptureFixture
) -> None:
    result = send(client, redis_url, store)
    worker_id = new_worker(store)
    (job,) = claim_all(store, worker_id)
    with redis.Redis.from_url(redis_url) as server:
        server.set(f"celery-task-meta-{result.id}", "not JSON")
    teller = start_teller(worker_id)
    teller.outbox.note_started(job)
    wait_until(lambda: "could not be told" in caplog.text)
    with redis.Redis.from_url(redis_url) as server:
        server.delete(f"celery-task-meta-{result.id}")
    store.finish(worker_id, [outcome_of(job)])
    teller.outbox.ring()
    assert result.get(timeout=30) == {"id": result.id, "choices": []}


def test_links_and_chains_get_the_answer(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    generate = client.signature("kvq.generate", kwargs=CHAT, queue="kvq")
    generate.link(client.signature("reports.linked", queue="reports"))
    chain(generate, client.signature("reports.next", queue="reports")).apply_async()
    take_in(redis_url, store)
    worker_id = new_worker(store)
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job)])
    teller = start_teller(worker_id)
    wait_until(lambda: teller.told)
    with redis.Redis.from_url(redis_url) as server:
        messages = [json.loads(raw) for raw in server.lrange("reports", 0, -1)]
    assert {message["headers"]["task"] for message in messages} == {"reports.linked", "reports.next"}
    for message in messages:
        assert message["headers"]["parent_id"] == job.job_id


def test_a_chord_calls_back_once_all_its_jobs_are_told(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    generate = client.signature("kvq.generate", kwargs=CHAT, queue="kvq")
    chord([generate, generate.clone()])(client.signature("reports.collect", queue="reports"))
    take_in(redis_url, store)
    worker_id = new_worker(store)
    jobs = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job) for job in jobs])
    start_teller(worker_id)
    with redis.Redis.from_url(redis_url) as server:
        (raw,) = wait_until(lambda: server.lrange("reports", 0, -1))
    args, _kwargs, _links = json.loads(base64.b64decode(json.loads(raw)["body"]))
    assert sorted(answer["id"] for answer in args[0]) == sorted(job.job_id for job in jobs)


def test_links_that_make_no_sense_are_retried_later_and_hold_nobody_up(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    broken = new_job(1, celery={"headers": {"chord": "?"}, "links": {"callbacks": [{"nonsense": 1}]}})
    store.intake_jobs([broken])
    good = send(client, redis_url, store)
    worker_id = new_worker(store)
    store.finish(worker_id, [outcome_of(job) for job in claim_all(store, worker_id)])
    start_teller(worker_id)
    assert good.get(timeout=30)["id"] == good.id


def test_links_that_never_make_sense_are_given_up_and_the_answer_is_told_without_them(
    client: Celery, redis_url: str, store: Store, start_teller: TellerMaker
) -> None:
    broken = new_job(1, celery={"headers": {}, "links": {"callbacks": [{"nonsense": 1}]}})
    store.intake_jobs([broken])
    worker_id = new_worker(store)
    store.finish(worker_id, [outcome_of(job) for job in claim_all(store, worker_id)])
    teller = start_teller(worker_id)

    def hurry() -> bool:
        store._db.write(lambda c: c.exec_driver_sql("UPDATE outbox SET next_at = '2020-01-01 00:00:00.000'"))
        return broken.job_id in teller.told

    wait_until(hurry)
    assert client.AsyncResult(broken.job_id).get(timeout=30)["id"] == broken.job_id
    assert store.outbox_pending(10, hold_s=0) == []


def test_results_are_told_once_the_backend_is_back(redis_url: str, store: Store, start_teller: TellerMaker) -> None:
    backend = RedisServer()
    backend.start()
    try:
        with make_app(redis_url, result_backend=backend.url) as app:
            worker_id = new_worker(store)
            store.intake_jobs([new_job(1, job_id="one", celery={"headers": {}})])
            (job,) = claim_all(store, worker_id)
            backend.kill()
            teller = start_teller(worker_id, of=app)
            store.finish(worker_id, [outcome_of(job)])
            teller.outbox.ring()
            wait_until(lambda: store._db.write(lambda c: c.exec_driver_sql("SELECT last_error FROM outbox").scalar()))
            assert not teller.told
            backend.start()
            wait_until(lambda: teller.told)
            assert AsyncResult("one", app=app).get(timeout=5) == {"id": "one", "choices": []}
    finally:
        backend.remove()
