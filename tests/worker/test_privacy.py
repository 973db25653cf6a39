"""What is kept of prompts and answers: nothing that is to be forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from kvq import Client
from kvq.worker.jobs import JobError, JobState
from kvq.worker.messages import handler_message
from kvq.worker.privacy import Keyring, Privacy, without_quotations
from kvq.worker.store import Store
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker, outcome_of
from tests.worker.private_stores import (
    ANSWER,
    KEYS,
    MARK,
    OpenStore,
    Sql,
    answered,
    everything,
    secret_job,
    succeed,
    text_of,
)


def fail(store: Store) -> None:
    worker_id = new_worker(store)
    store.finish(worker_id, [failure_of(job) for job in claim_all(store, worker_id)])


def quote(store: Store) -> None:
    worker_id = new_worker(store)
    error = JobError(code="invalid_value", message=f"prompt: is odd, got '{MARK} 1'")
    (job,) = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job, state=JobState.FAILED, text=None, response=None, error=error)])
    row = store.job(job.job_id)
    assert row is not None
    assert row.error == JobError(code="invalid_value", message="prompt: is odd, got '...'")


def cancel(store: Store) -> None:
    store.cancel_jobs([job.job_id for job in store.peek("kvq", limit=9)])


def expire(store: Store) -> None:
    with store._db._engine.begin() as connection:
        connection.execute(sa.text("UPDATE jobs SET deadline = '2020-01-01 00:00:00.000'"))
    store.expire_due()


def die(store: Store) -> None:
    for _ in range(3):
        worker_id = new_worker(store)
        claim_all(store, worker_id)
        store.bury_worker(worker_id)
        store.reap(lease_s=60)


@pytest.mark.parametrize("end", [succeed, fail, quote, cancel, expire, die])
@pytest.mark.parametrize("who", ["submitter", "worker"])
def test_a_prompt_is_gone_when_its_job_has_ended_whoever_wishes_it_and_however_it_ends(
    open_store: OpenStore, store_url: str, end: Callable[[Store], None], who: str
) -> None:
    forgetful, keeping = open_store(forget_prompts=True), open_store()
    submitter, worker = (forgetful, keeping) if who == "submitter" else (keeping, forgetful)
    batch_id = new_batch(submitter, [secret_job()])
    assert MARK in everything(store_url)
    end(worker)
    progress = worker.batch_progress(batch_id)
    assert progress.finished
    (row,) = worker.iter_results(batch_id)
    assert worker.job_body(row.job_id) is None
    forgetful.tidy()
    assert MARK not in everything(store_url)
    assert worker.check_integrity() == []
    assert worker.batch_progress(batch_id) == progress


def test_until_the_end_the_prompt_is_there_released_and_requeued_jobs_too(open_store: OpenStore) -> None:
    store = open_store(forget_prompts=True)
    store.insert_jobs([secret_job()])
    worker_id = new_worker(store)
    (job,) = claim_all(store, worker_id)
    store.release(worker_id)
    claim_all(store, worker_id)
    store.bury_worker(worker_id)
    store.reap(lease_s=60)
    (again,) = claim_all(store, new_worker(store))
    assert again.body == job.body == {"prompt": f"{MARK} 1", "max_tokens": 4}, "what would echo the prompt is left out"


def test_a_refused_row_is_stored_without_its_prompt_and_without_quoting_it(
    open_store: OpenStore, store_url: str
) -> None:
    store = open_store(forget_prompts=True)
    error = JobError(code="invalid_type", message=f"messages: must be a list, got '{MARK}'")
    batch_id = new_batch(store, [new_job(1, body={"messages": MARK}, error=error), secret_job(2)])
    store.cancel_batch(batch_id)
    row, _ = store.iter_results(batch_id)
    assert row.error == JobError(code="invalid_type", message="messages: must be a list, got '...'")
    store.tidy()
    assert MARK not in everything(store_url)


def test_a_job_without_its_prompt_is_not_retried_and_its_neighbours_are(open_store: OpenStore) -> None:
    forgetful, keeping = open_store(forget_prompts=True), open_store()
    batch_id = new_batch(forgetful, [secret_job(1)])
    keeping.insert_jobs([secret_job(2)], batch_id=batch_id)
    worker_id = new_worker(keeping)
    keeping.finish(worker_id, [failure_of(job) for job in claim_all(keeping, worker_id)])
    failed = [JobState.FAILED]
    assert keeping.num_forgotten(batch_id=batch_id, states=failed) == 1
    changed = keeping.retry_where(batch_id=batch_id, states=failed, rewrite=lambda _, body: {**body, "max_tokens": 9})
    assert changed == 1
    assert keeping.retry_batch(batch_id) == 0
    (waiting,) = keeping.peek("kvq", limit=9)
    assert waiting.body["max_tokens"] == 9
    assert keeping.batch_progress(batch_id).failed == 1


def test_what_came_with_a_prompt_by_celery_goes_once_its_sender_was_told(open_store: OpenStore, store_url: str) -> None:
    store = open_store(forget_prompts=True)
    store.insert_jobs([secret_job(celery={"links": {"callbacks": [{"task": "t", "args": [MARK]}]}})])
    succeed(store)
    (row,) = store.outbox_pending(9)
    assert row.payload["celery"]["links"]["callbacks"][0]["args"] == [MARK]
    assert row.payload["response"]["choices"] == [{"text": ANSWER}]
    store.outbox_done([row.id])
    store.tidy()
    held = everything(store_url)
    assert MARK not in held
    assert ANSWER in held


def test_answers_are_not_stored_or_only_until_their_sender_has_them(open_store: OpenStore, store_url: str) -> None:
    store = open_store(forget_answers=True)
    batch_id = new_batch(store, [secret_job(1)])
    succeed(store)
    (row,) = store.iter_results(batch_id)
    assert (row.state, row.text, row.response) == (JobState.SUCCEEDED, None, None)
    assert row.metrics.completion_tokens == 5
    store.tidy()
    assert ANSWER not in everything(store_url)
    store.insert_jobs([secret_job(2, celery={"headers": {}})])
    succeed(store)
    (told,) = store.outbox_pending(9)
    assert told.payload["response"]["choices"] == [{"text": ANSWER}]
    store.outbox_done([told.id])
    store.tidy()
    assert ANSWER not in everything(store_url)
    assert store.check_integrity() == []


def test_a_forgotten_prompt_cannot_be_guessed_by_the_key_of_its_answer(open_store: OpenStore, sql: Sql) -> None:
    store = open_store(forget_prompts=True)
    store.insert_jobs([secret_job()])
    worker_id = new_worker(store)
    store.finish(worker_id, [answered(job, request_key="hash") for job in claim_all(store, worker_id)])
    assert sql("SELECT request_key FROM results") == [(None,)]
    assert store.answers_by_key(["hash"]) == {}


@pytest.mark.parametrize("options", [{"forget_prompts": True}, {"keyring": Keyring(KEYS[:1])}])
def test_celery_events_show_nothing_of_a_private_prompt(store_url: str, options: dict[str, Any]) -> None:
    with Store.open(store_url, privacy=Privacy(**options)) as store:
        store.insert_jobs([secret_job(celery={"headers": {}})])
        (job,) = claim_all(store, new_worker(store))
        message = handler_message(job, "kvq.generate", None)
    assert MARK in job.body["prompt"]
    assert MARK not in f"{message.body!r} {message.headers!r}"


def test_the_client_encrypts_and_forgets_as_it_is_told(store_url: str, store: Store) -> None:
    requests = [{"prompt": MARK, "max_tokens": 4}]
    with Client(db=store_url, encryption_key=text_of(KEYS[0]), store_prompts=False) as client:
        batch = client.submit(requests)
        assert MARK not in everything(store_url)
        with Store.open(store_url, privacy=Privacy(keyring=Keyring(KEYS[:1]))) as worker:
            succeed(worker)
        (row,) = client.results(batch)
        assert row.text == ANSWER
        assert store.job_body(row.job_id) is None


@pytest.mark.parametrize(
    ("message", "body", "told"),
    [
        ("role: got 'user'", {"messages": [{"content": "hi"}]}, "role: got 'user'"),
        ("prompt: got 'hi'", {"prompt": "hi"}, "prompt: got ..."),
        ("prompt: got 'a long sentence...'", {"prompt": "a long sentence of many words"}, "prompt: got '......'"),
        ("got 'tab\\there it is'", {"prompt": "tab\there it is"}, "got '...'"),
        ("max_tokens: must be at least 1, got 0", {"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
    ],
)
def test_an_error_loses_what_it_quotes_and_nothing_else(message: str, body: dict[str, Any], told: str) -> None:
    assert without_quotations(message, body) == told
