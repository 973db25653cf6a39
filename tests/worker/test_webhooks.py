"""Webhooks: the end of a batch is told at least once, signed, by one worker at a time, however the batch ends."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvq import Client
from kvq.worker.errors import SettingsError, WebhookRefused
from kvq.worker.jobs import JobState
from kvq.worker.store import Store
from kvq.worker.store_webhooks import MAX_TRIES, pause_after
from kvq.worker.webhooks import WebhookOptions, WebhookSender, event_of, sign, signing_keys
from tests.factories import claim_all, failure_of, new_job, new_worker, outcome_of
from tests.receivers import Receiver, receiver
from tests.waiting import wait_until
from tests.worker.conftest import ServiceMaker

Sql = Callable[..., list[Any]]

KEY = b"a key of the tests"
REQUESTS = [{"id": f"row-{i}", "prompt": f"Count to {i}", "max_tokens": 4} for i in range(3)]


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as opened:
        yield opened


@pytest.fixture
def client(store_url: str) -> Iterator[Client]:
    with Client(db=store_url) as opened:
        yield opened


@pytest.fixture
def make_due(sql: Sql) -> Callable[[], None]:
    """Lets every pause and hold run out."""
    return lambda: sql("UPDATE webhooks SET next_at = '2020-01-01 00:00:00.000' WHERE state = 'pending'") and None


def sender(store: Store, worker_id: str | None = None, keys: tuple[bytes, ...] = (KEY,), **options: Any) -> Any:
    """A worker's sender without its thread."""
    given = worker_id or new_worker(store)
    return WebhookSender(
        store,
        identity=lambda: given,
        options=WebhookOptions(keys=keys, **{"allow_private": True, **options}),
        on_fault=lambda fault: pytest.fail(str(fault)),
    )


def finish_all(store: Store) -> None:
    worker_id = new_worker(store)
    store.finish(worker_id, [outcome_of(job) for job in claim_all(store, worker_id)])


def ended_batch(client: Client, store: Store, url: str) -> str:
    batch = client.submit(REQUESTS, name="mine", webhook=url)
    finish_all(store)
    return batch.id


def state_of(store: Store, batch_id: str) -> tuple[str, int, str | None]:
    row = store.webhook(batch_id)
    assert row is not None
    return row.state, row.tries, row.last_error


def test_a_batch_that_ends_is_told_once_with_its_counters_and_a_signature(
    client: Client, store: Store, hook: Receiver
) -> None:
    batch = client.submit(REQUESTS, name="mine", webhook=hook.url)
    telling = sender(store)
    assert telling.deliver_due() == 0
    assert state_of(store, batch.id) == ("waiting", 0, None)
    finish_all(store)
    assert telling.deliver_due() == 1
    assert telling.deliver_due() == 0
    (got,) = hook.received
    assert got.headers["content-type"] == "application/json"
    assert got.is_signed_with(KEY)
    assert abs(int(got.headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60
    event = got.event
    assert event["id"] == got.headers["webhook-id"]
    assert event["type"] == "batch.completed"
    counters = {name: event["data"][name] for name in ("id", "batch_id", "name", "total", "succeeded", "failed")}
    assert counters == {
        "id": batch.id,
        "batch_id": batch.id,
        "name": "mine",
        "total": 3,
        "succeeded": 3,
        "failed": 0,
    }
    assert event["data"]["completion_tokens"] == 15
    assert datetime.fromisoformat(event["data"]["finished_at"]).tzinfo is not None
    assert state_of(store, batch.id) == ("delivered", 1, None)


def expire(client: Client, store: Store, sql: Sql) -> None:
    sql("UPDATE jobs SET deadline = '2020-01-01 00:00:00.000' WHERE line_no = 1")
    store.expire_due()
    finish_all(store)


def crash(client: Client, store: Store, sql: Sql) -> None:
    for _ in range(3):
        worker_id = new_worker(store)
        claim_all(store, worker_id)
        store.bury_worker(worker_id)
        store.reap(lease_s=60)


def fail(client: Client, store: Store, sql: Sql) -> None:
    worker_id = new_worker(store)
    store.finish(worker_id, [failure_of(job) for job in claim_all(store, worker_id)])


def cancel(client: Client, store: Store, sql: Sql) -> None:
    client.cancel("mine")


@pytest.mark.parametrize(
    ("end", "type_", "state"),
    [
        (cancel, "batch.cancelled", "cancelled"),
        (expire, "batch.expired", "expired"),
        (crash, "batch.failed", "dead"),
        (fail, "batch.failed", "failed"),
    ],
)
def test_whatever_way_a_batch_ends_it_is_told(
    client: Client, store: Store, sql: Sql, hook: Receiver, end: Callable[..., None], type_: str, state: str
) -> None:
    client.submit(REQUESTS, name="mine", webhook=hook.url)
    end(client, store, sql)
    assert sender(store).deliver_due() == 1
    (got,) = hook.received
    assert got.event["type"] == type_
    assert got.event["data"][state] >= 1


def test_a_batch_of_bad_rows_alone_is_told_too(client: Client, store: Store, hook: Receiver) -> None:
    client.submit([{"prompt": 5}], skip_invalid=True, webhook=hook.url)
    assert sender(store).deliver_due() == 1
    assert hook.received[0].event["data"]["failed"] == 1


def test_a_failed_try_is_repeated_under_the_same_id_with_the_same_body(
    client: Client, store: Store, hook: Receiver, make_due: Callable[[], None]
) -> None:
    hook.answers = [500, 302]
    batch_id = ended_batch(client, store, hook.url)
    telling = sender(store)
    assert telling.deliver_due() == 1
    assert state_of(store, batch_id) == ("pending", 1, "the receiver answered 500")
    assert telling.deliver_due() == 0  # not before its time
    make_due()
    telling.deliver_due()
    assert state_of(store, batch_id) == ("pending", 2, "the receiver answered 302")
    make_due()
    telling.deliver_due()
    assert state_of(store, batch_id) == ("delivered", 3, None)
    assert len({got.body for got in hook.received}) == 1
    assert len({got.headers["webhook-id"] for got in hook.received}) == 1
    assert all(got.is_signed_with(KEY) for got in hook.received)


def test_pauses_grow_and_are_bounded_and_the_last_try_is_the_last(
    client: Client, store: Store, sql: Sql, hook: Receiver, make_due: Callable[[], None]
) -> None:
    assert [pause_after(tries) for tries in (1, 2, 3)] == [1, 4, 16]
    assert pause_after(MAX_TRIES) == pause_after(10_000) == 6 * 3600
    hook.answers = [503] * (MAX_TRIES + 1)
    batch_id = ended_batch(client, store, hook.url)
    telling = sender(store)
    for _ in range(MAX_TRIES + 2):
        telling.deliver_due()
        make_due()
    assert state_of(store, batch_id) == ("failed", MAX_TRIES, "the receiver answered 503")
    assert len(hook.received) == MAX_TRIES


def test_a_receiver_that_is_gone_for_good_is_not_asked_again(client: Client, store: Store, hook: Receiver) -> None:
    hook.answers = [410]
    batch_id = ended_batch(client, store, hook.url)
    sender(store).deliver_due()
    assert state_of(store, batch_id) == ("failed", 1, "the receiver answered 410")


def test_a_private_address_is_refused_unless_the_operator_allows_it(
    client: Client, store: Store, hook: Receiver
) -> None:
    batch_id = ended_batch(client, store, hook.url)
    sender(store, allow_private=False).deliver_due()
    state, tries, error = state_of(store, batch_id)
    assert (state, tries) == ("pending", 1)
    assert error is not None
    assert "127.0.0.1, a loopback address" in error
    assert "webhook_allow_private" in error
    assert hook.received == []


def test_a_worker_without_a_secret_sends_nothing_and_says_so_where_people_look(
    client: Client, store: Store, hook: Receiver
) -> None:
    batch_id = ended_batch(client, store, hook.url)
    for _ in range(2):
        assert sender(store, keys=()).deliver_due() == 0
    state, tries, error = state_of(store, batch_id)
    assert (state, tries) == ("pending", 0)
    assert error is not None
    assert "webhook_secret" in error
    assert sender(store).deliver_due() == 1
    assert state_of(store, batch_id) == ("delivered", 1, None)


def test_a_delivery_is_held_by_one_worker_until_it_is_gone_or_its_time_is_over(
    client: Client, store: Store, hook: Receiver, make_due: Callable[[], None]
) -> None:
    batch_id = ended_batch(client, store, hook.url)
    store.write_events(event_of)
    first, second = new_worker(store), new_worker(store)
    held = store.claim_webhook(first, hold_s=60)
    assert held is not None
    assert store.claim_webhook(second, hold_s=60) is None
    assert not store.webhooks_due()
    store.bury_worker(first)
    taken = store.claim_webhook(second, hold_s=60)
    assert taken is not None
    assert (taken.event_id, taken.payload, taken.tries) == (held.event_id, held.payload, 2)
    assert store.claim_webhook(first, hold_s=60) is None, "who holds no lease gets nothing"
    # What the first one says now of its failure is nobody's business any more; that it was delivered is true.
    store.webhook_failed(held, "late")
    assert state_of(store, batch_id) == ("pending", 2, None)
    make_due()
    assert store.claim_webhook(new_worker(store), hold_s=60) is not None
    store.webhook_delivered(held)
    assert state_of(store, batch_id)[0] == "delivered"


def test_a_worker_that_dies_after_the_answer_leaves_it_to_be_told_again(
    client: Client, store: Store, hook: Receiver
) -> None:
    batch_id = ended_batch(client, store, hook.url)

    class Killed(BaseException):
        pass

    class Kill:
        def hit(self, name: str) -> None:
            if name == "after_webhook":
                raise Killed

    worker_id = new_worker(store)
    dying = WebhookSender(
        store,
        identity=lambda: worker_id,
        options=WebhookOptions(keys=(KEY,), allow_private=True),
        on_fault=lambda fault: None,
        failpoints=Kill(),  # type: ignore[arg-type]
    )
    with pytest.raises(Killed):
        dying.deliver_due()
    assert sender(store).deliver_due() == 0
    store.bury_worker(worker_id)
    assert sender(store).deliver_due() == 1
    assert state_of(store, batch_id) == ("delivered", 2, None)
    assert len({got.headers["webhook-id"] for got in hook.received}) == 1
    assert len(hook.received) == 2


def test_a_batch_that_is_still_being_submitted_is_not_told_of(client: Client, store: Store, hook: Receiver) -> None:
    store.create_batch(batch_id="half")
    store.add_webhook("half", hook.url)
    store.insert_jobs([new_job(1)], batch_id="half")
    finish_all(store)
    telling = sender(store)
    assert telling.deliver_due() == 0
    assert state_of(store, "half")[0] == "open"
    store.arm_webhook("half")
    assert telling.deliver_due() == 1


def test_a_batch_whose_rows_are_retried_is_told_of_again_when_it_ends_again(
    client: Client, store: Store, sql: Sql, hook: Receiver
) -> None:
    client.submit(REQUESTS, name="mine", webhook=hook.url)
    fail(client, store, sql)
    telling = sender(store)
    telling.deliver_due()
    batch_id = store.find_batch("mine")
    assert store.retry_batch(batch_id) == 3
    assert telling.deliver_due() == 0
    assert state_of(store, batch_id) == ("waiting", 0, None)
    finish_all(store)
    assert telling.deliver_due() == 1
    assert [got.event["type"] for got in hook.received] == ["batch.failed", "batch.completed"]
    assert len({got.event["id"] for got in hook.received}) == 2


def test_submitting_again_with_the_same_key_does_not_tell_twice(client: Client, store: Store, hook: Receiver) -> None:
    telling = sender(store)
    for _ in range(2):
        client.submit(REQUESTS, idempotency_key="k", webhook=hook.url)
        finish_all(store)
        telling.deliver_due()
    assert len(hook.received) == 1


def test_a_batch_with_something_to_tell_is_not_pruned(client: Client, store: Store, sql: Sql, hook: Receiver) -> None:
    batch_id = ended_batch(client, store, hook.url)
    for table, column in (("batches", "created_at"), ("results", "finished_at")):
        sql(f"UPDATE {table} SET {column} = '2020-01-01 00:00:00.000'")
    assert store.prune(older_than_s=1).batches == 0
    sender(store).deliver_due()
    assert store.prune(older_than_s=1).batches == 1
    assert store.webhook(batch_id) is None


def test_a_url_nobody_would_call_is_refused_before_anything_is_stored(client: Client, store: Store) -> None:
    with pytest.raises(WebhookRefused, match="https:// or http://"):
        client.submit(REQUESTS, webhook="ftp://host/")
    assert store.list_batches() == []


def test_secrets_are_read_as_the_specification_has_them_and_all_of_them_sign() -> None:
    raw = bytes(range(24))
    word = f"whsec_{base64.b64encode(raw).decode()}"
    assert signing_keys(f"{word}  whsec_AAAA") == (raw, bytes(3))
    assert signing_keys("any other text") == (b"any other text",)
    assert signing_keys(None) == ()
    for bad in ("whsec_", "whsec_not-base64!", "whsec_$$$", "whsec_ü"):
        with pytest.raises(SettingsError, match="webhook_secret") as caught:
            signing_keys(bad)
        assert "$$$" not in str(caught.value)


def test_the_signature_is_that_of_the_specifications_example() -> None:
    # https://github.com/standard-webhooks/standard-webhooks, spec, "Signature scheme"; and the libraries' own test.
    (key,) = signing_keys("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_receivers_code_in_the_documentation_verifies_what_is_sent(
    client: Client, store: Store, hook: Receiver
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], namespace)
    verify = namespace["verify"]
    secret = f"whsec_{base64.b64encode(bytes(range(24))).decode()}"
    ended_batch(client, store, hook.url)
    sender(store, keys=(*signing_keys(secret), KEY)).deliver_due()
    (got,) = hook.received
    assert verify(secret, got.headers, got.body)
    assert verify(KEY.decode(), got.headers, got.body)
    assert not verify(secret, got.headers, got.body + b" ")
    assert not verify("another", got.headers, got.body)


def test_a_service_tells_of_what_it_ran_and_of_what_others_left(
    client: Client, store: Store, make_service: ServiceMaker, hook: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    left = ended_batch(client, store, hook.url + "?token=hidden")
    run = client.submit(REQUESTS, webhook=hook.url)
    service = make_service(webhooks=WebhookOptions(keys=(KEY,), allow_private=True))
    service.start()
    service.run_until_idle(run.id)
    wait_until(lambda: len(hook.received) == 2)
    assert {got.event["data"]["id"] for got in hook.received} == {left, run.id}
    wait_until(lambda: {state_of(store, batch_id)[0] for batch_id in (left, run.id)} == {"delivered"})
    assert KEY.decode() not in caplog.text
    assert "hidden" not in caplog.text
    row = store.webhook(left)
    assert row is not None
    assert "hidden" not in json.dumps(row.url)
    assert store.batch_progress(run.id).succeeded == 3
    assert {r.state for r in store.iter_results(run.id)} == {JobState.SUCCEEDED}
    assert datetime.now(UTC) - store.batch_progress(run.id).created_at < timedelta(hours=1)
