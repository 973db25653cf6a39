"""Webhooks of real workers: killed between the commit and the delivery, and between the delivery and its record."""

from __future__ import annotations

import pytest

from kvq import Client
from kvq.worker.store import Store
from tests.receivers import receiver
from tests.system.conftest import WorkerMaker
from tests.waiting import wait_until

SECRET = "a secret of the tests"


@pytest.mark.parametrize(
    ("store_url", "failpoint"), [("sqlite", "before_webhook"), ("postgres", "after_webhook")], indirect=["store_url"]
)
def test_a_killed_worker_leaves_its_webhook_to_the_next_one(
    redis_url: str, store_url: str, failpoint: str, start_worker: WorkerMaker
) -> None:
    broker = redis_url if store_url.startswith("postgresql") else None
    options = [] if broker else ["--no-broker"]
    settings = {"db": store_url, "webhook_secret": SECRET, "webhook_allow_private": True, "log_level": "debug"}
    settings |= {"broker": broker} if broker else {}
    requests = [{"prompt": f"number {number}", "max_tokens": 4} for number in range(5)]
    with receiver() as hook, Client(db=store_url, broker=broker) as client, Store.open(store_url) as store:
        batch = client.submit(requests, webhook=hook.url)
        killed = start_worker(*options, failpoints=failpoint, **settings)
        killed.wait_killed()
        assert client.status(batch).succeeded == 5, "the end of the batch was committed"
        num_received = 0 if failpoint == "before_webhook" else 1
        assert len(hook.received) == num_received
        row = store.webhook(batch.id)
        assert row is not None
        assert (row.state, row.tries) == ("pending", 1)
        last = start_worker(*options, **settings)
        wait_until(lambda: (now := store.webhook(batch.id)) is not None and now.state == "delivered", timeout_s=120)
        assert last.stop() == 0
        assert len(hook.received) == num_received + 1
        assert len({got.headers["webhook-id"] for got in hook.received}) == 1
        assert len({got.body for got in hook.received}) == 1
        assert all(got.is_signed_with(SECRET.encode()) for got in hook.received)
        assert all(SECRET not in worker.log for worker in (killed, last))
