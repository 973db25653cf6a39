"""The Python client against real stores: submit, wait, read, cancel."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvq import Client
from kvq.worker.errors import FileInvalid, FileUnreadable, SchemaOutOfDate, SettingsError, UnknownBatch
from kvq.worker.jobs import JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from tests.factories import claim_all, new_worker, outcome_of
from tests.waiting import wait_until

REQUESTS = [{"id": f"row-{i}", "prompt": f"Count to {i}", "max_tokens": 4} for i in range(3)]


@pytest.fixture
def client(store_url: str) -> Iterator[Client]:
    with Client(db=store_url) as opened:
        yield opened


def finish_all(store: Store) -> None:
    worker_id = new_worker(store)
    store.finish(worker_id, [outcome_of(job) for job in claim_all(store, worker_id)])


def test_what_is_submitted_is_run_and_read_in_order(client: Client, store: Store) -> None:
    batch = client.submit(REQUESTS, name="mine", priority=-3)
    assert (batch.num_jobs, batch.num_new, batch.name) == (3, 3, "mine")
    assert [job.priority for job in store.peek("kvq", limit=9)] == [-3, -3, -3]
    assert client.status(batch).queued == 3
    finish_all(store)
    assert client.wait(batch, timeout=10).succeeded == 3
    rows = list(client.results(batch))
    assert [(row.custom_id, row.state, row.text) for row in rows] == [
        (f"row-{i}", JobState.SUCCEEDED, f"row-{i}") for i in range(3)
    ]
    assert client.summary(batch).progress.succeeded == 3


def test_without_a_name_the_last_batch_is_meant(client: Client) -> None:
    with pytest.raises(ValueError, match="submitted none"):
        client.wait()
    client.submit(REQUESTS)
    last = client.submit(REQUESTS[:2])
    assert client.status().batch_id == last.id
    assert len(list(client.results())) == 2


def test_a_batch_is_found_by_name_and_by_the_beginning_of_its_id(client: Client) -> None:
    batch = client.submit(REQUESTS, name="mine")
    assert client.status("mine").batch_id == batch.id
    assert client.status(batch.id[:8]).batch_id == batch.id
    with pytest.raises(UnknownBatch):
        client.status("other")


def test_one_bad_request_keeps_everything_out(client: Client, store: Store) -> None:
    with pytest.raises(FileInvalid) as caught:
        client.submit([*REQUESTS, {"prompt": "x", "temprature": 1}, 7])
    assert "line 4: temprature" in str(caught.value)
    assert "line 5: is a number" in str(caught.value)
    assert store.list_batches() == []


def test_skip_invalid_records_the_bad_ones_as_failed(client: Client) -> None:
    batch = client.submit([*REQUESTS, {"id": "bad", "prompt": "x", "temprature": 1}], skip_invalid=True)
    progress = client.status(batch)
    assert (progress.total, progress.queued, progress.failed) == (4, 3, 1)
    (bad,) = [row for row in client.results(batch) if row.state is JobState.FAILED]
    assert bad.custom_id == "bad"
    assert bad.error is not None
    assert bad.error.code == "unknown_field"


def test_the_same_idempotency_key_is_the_same_batch(client: Client) -> None:
    first = client.submit(REQUESTS, idempotency_key="order-7")
    again = client.submit(REQUESTS, idempotency_key="order-7")
    other = client.submit(REQUESTS, idempotency_key="order-8")
    assert again.id == first.id
    assert (first.num_new, again.num_new) == (3, 0)
    assert other.id != first.id
    assert client.status(first).total == 3


def test_without_a_key_every_submission_is_a_batch_of_its_own(client: Client) -> None:
    assert client.submit(REQUESTS).id != client.submit(REQUESTS).id


def test_files_are_all_checked_before_any_is_enqueued(client: Client, store: Store, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "x"}\n', encoding="utf-8")
    bad.write_text("null\n", encoding="utf-8")
    with pytest.raises(FileInvalid, match=r"bad\.jsonl"):
        client.submit_files([str(good), str(bad)])
    with pytest.raises(FileUnreadable):
        client.submit_files([str(good), str(tmp_path / "none.jsonl")])
    assert store.list_batches() == []
    first, second = client.submit_files([str(good), str(good)])
    assert first.id != second.id
    assert len(store.list_batches()) == 2


def test_a_submission_that_breaks_off_leaves_nothing_to_run(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n' * 3, encoding="utf-8")

    def break_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvq.worker.client.Client._ring", break_off)
    insert_jobs = Store.insert_jobs

    def insert_and_break_off(self: Store, *args: object, **kwargs: object) -> None:
        insert_jobs(self, *args, **kwargs)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "insert_jobs", insert_and_break_off)
    with pytest.raises(KeyboardInterrupt):
        client.submit_files([str(path)])
    (progress,) = store.list_batches()
    assert (progress.queued, progress.cancelled) == (0, 3)


def test_waiting_ends_at_its_timeout_and_the_batch_goes_on(client: Client) -> None:
    batch = client.submit(REQUESTS)
    with pytest.raises(TimeoutError, match="0 of 3"):
        client.wait(batch, timeout=0.05)
    assert client.status(batch).queued == 3


def test_cancelling_spares_what_is_finished(client: Client, store: Store) -> None:
    done = client.submit(REQUESTS)
    finish_all(store)
    open_batch = client.submit(REQUESTS)
    assert client.cancel(open_batch) == 3
    assert client.cancel(done) == 0
    assert client.wait(open_batch, timeout=10).cancelled == 3
    assert client.status(done).succeeded == 3


def test_jobs_and_queues_are_cancelled_too(client: Client, store: Store) -> None:
    batch = client.submit(REQUESTS)
    first = store.peek("kvq", limit=1)[0]
    assert client.cancel_jobs([first.job_id, "unknown"]) == 1
    assert client.cancel_queue("other") == 0
    assert client.cancel_queue() == 2
    assert client.status(batch).cancelled == 3


def test_what_is_not_finished_when_the_completion_window_ends_expires(client: Client, store: Store) -> None:
    batch = client.submit(REQUESTS, completion_window=0.3)
    worker_id = new_worker(store)
    (claimed,) = store.claim(worker_id, [store.peek("kvq", limit=1)[0].seq])
    store.finish(worker_id, [outcome_of(claimed)])
    wait_until(store.expire_due)
    assert [(row.custom_id, row.state) for row in client.results(batch)] == [
        ("row-0", JobState.SUCCEEDED),
        ("row-1", JobState.EXPIRED),
        ("row-2", JobState.EXPIRED),
    ]
    for window in (0, -1.0, float("nan"), 1e15):
        with pytest.raises(SettingsError, match="completion_window"):
            client.submit(REQUESTS, completion_window=window)


def test_submitting_rings_the_doorbell(sqlite_url: str, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as server:
        bell = server.pubsub(ignore_subscribe_messages=True)
        bell.subscribe(QueueKeys(queue="kvq").doorbell)
        wait_until(lambda: bell.subscribed and server.pubsub_numsub(QueueKeys(queue="kvq").doorbell)[0][1] == 1)
        with Client(db=sqlite_url, broker=redis_url) as client:
            client.submit(REQUESTS)
        wait_until(lambda: bell.get_message(timeout=0.1), what="the bell")
        bell.close()


def test_an_unreachable_broker_only_costs_a_warning(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Client(db=sqlite_url, broker="redis://127.0.0.1:1/0") as client:
        assert client.status(client.submit(REQUESTS)).queued == 3
    assert "no worker could be woken" in caplog.text


def test_an_old_postgresql_database_is_refused_with_the_command_to_run(pg_empty_url: str) -> None:
    with pytest.raises(SchemaOutOfDate, match="kvq db upgrade"):
        Client(db=pg_empty_url)


def test_a_client_may_be_used_by_several_threads(client: Client) -> None:
    batches: list[str] = []
    threads = [threading.Thread(target=lambda: batches.append(client.submit(REQUESTS).id)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(batches)) == 4
    assert all(client.status(batch).total == 3 for batch in batches)


def test_the_client_needs_no_torch() -> None:
    code = "import sys; from kvq import Client; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
