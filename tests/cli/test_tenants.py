"""``kvq tenants``, and what ``kvq status`` says of those whose budget is used up."""

from __future__ import annotations

import json
from typing import Any

from kvq.worker.store import Store
from tests.factories import new_batch, new_job, new_worker, outcome_of


def test_budgets_are_set_listed_and_said_to_hold_jobs_up(kvq: Any, store: Store, store_url: str) -> None:
    ran = kvq("tenants", "set", "acme", "--tokens-per-day", "10", "--weight", "2", "--db", store_url)
    assert (ran.code, ran.out) == (0, "")
    assert "acme: 10 tokens a day, weight 2" in ran.err
    batch_id = new_batch(store, [new_job(i, tenant="acme") for i in range(2)])
    assert json.loads(kvq("status", "--db", store_url, "--json").out)["over_budget"] == []
    worker_id = new_worker(store)
    (job,) = store.claim(worker_id, [store.peek("kvq", limit=1)[0].seq])
    store.finish(worker_id, [outcome_of(job)])
    (row,) = json.loads(kvq("tenants", "list", "--db", store_url, "--json").out)
    assert (row["tenant"], row["weight"], row["used_tokens"], row["over_budget"]) == ("acme", 2.0, 11, True)
    assert row["resumes_at"].endswith("00:00:00+00:00")
    told = kvq("status", batch_id, "--db", store_url)
    assert "tenant acme has used 11 of 10 tokens today: its jobs wait until" in told.err
    (held,) = json.loads(kvq("status", batch_id, "--db", store_url, "--json").out)["over_budget"]
    assert held["tenant"] == "acme"
    assert "acme" in kvq("tenants", "list", "--db", store_url).out
    assert kvq("tenants", "set", "acme", "--no-budget", "--db", store_url).code == 0
    assert json.loads(kvq("status", "--db", store_url, "--json").out)["over_budget"] == []


def test_what_cannot_be_set_is_refused(kvq: Any, store_url: str) -> None:
    for args in (["acme"], ["acme", "--weight", "0"], ["acme", "--tokens-per-day", "-1"], ["", "--weight", "1"]):
        ran = kvq("tenants", "set", *args, "--db", store_url)
        assert ran.code == 2, args
        assert ran.err
