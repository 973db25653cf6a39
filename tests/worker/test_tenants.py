"""Tenants: what they used, what they may still start, and where a job's tenant comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvq.worker.errors import SettingsError
from kvq.worker.jobs import JobMetrics
from kvq.worker.messages import read_message
from kvq.worker.store import Store, TenantRow
from kvq.worker.tenants import Budgets, checked_tenant
from tests.factories import claim_all, new_batch, new_job, new_worker, outcome_of


def tenant(store: Store, name: str) -> TenantRow:
    return next(row for row in store.tenants() if row.tenant == name)


def test_tokens_computed_and_generated_are_counted_for_whom_they_were(store: Store) -> None:
    new_batch(store, [new_job(i, tenant="acme") for i in range(3)])
    store.insert_jobs([new_job(9)])
    worker_id = new_worker(store)
    jobs = claim_all(store, worker_id)
    served = JobMetrics(prompt_tokens=10, cached_tokens=10, completion_tokens=5, served_from=jobs[0].job_id)
    store.finish(worker_id, [outcome_of(job) for job in jobs[:2]])
    store.finish(worker_id, [outcome_of(jobs[2], metrics=served), outcome_of(jobs[3])])
    store.finish(worker_id, [outcome_of(job) for job in jobs])  # fenced: counted once
    acme, default = tenant(store, "acme"), tenant(store, "default")
    assert (acme.used_tokens, acme.num_jobs) == (22, 3)
    assert (default.used_tokens, default.num_jobs) == (11, 1)
    assert not acme.waiting


def test_a_budget_is_over_until_the_end_of_the_day_of_utc(store: Store, sql: Callable[..., list[Any]]) -> None:
    store.change_tenant("acme", tokens_per_day=10, weight=2.5)
    assert not tenant(store, "acme").over_budget
    new_batch(store, [new_job(i, tenant="acme") for i in range(2)])
    worker_id = new_worker(store)
    first = store.claim(worker_id, [store.peek("kvq", limit=1)[0].seq])
    store.finish(worker_id, [outcome_of(first[0])])
    row = tenant(store, "acme")
    assert (row.used_tokens, row.waiting, row.over_budget, row.weight) == (11, True, True, 2.5)
    now = datetime.now(UTC)
    assert row.resumes_at is not None
    assert now < row.resumes_at <= now + timedelta(days=1)
    assert (row.resumes_at.hour, row.resumes_at.minute) == (0, 0)
    sql("UPDATE tenant_usage SET day = '2020-01-01'")
    assert not tenant(store, "acme").over_budget
    store.prune(older_than_s=0)
    assert sql("SELECT count(*) FROM tenant_usage")[0][0] == 0


def test_what_is_not_given_of_a_tenant_stays_as_it_is(store: Store) -> None:
    store.change_tenant("acme", tokens_per_day=5)
    store.change_tenant("acme", weight=3.0)
    assert (tenant(store, "acme").tokens_per_day, tenant(store, "acme").weight) == (5, 3.0)
    store.change_tenant("acme", without_budget=True)
    assert (tenant(store, "acme").tokens_per_day, tenant(store, "acme").weight) == (None, 3.0)


def test_jobs_start_while_those_that_run_and_the_new_one_fit_into_what_is_left(store: Store) -> None:
    store.change_tenant("acme", tokens_per_day=100)
    budgets = Budgets(store)
    budgets.refresh()
    assert budgets.start("anyone's", "other", 10**9)
    assert budgets.start("a", "acme", 60)
    assert not budgets.start("b", "acme", 41)
    assert budgets.start("c", "acme", 40)
    budgets.note_dropped(["a", "c"])
    assert budgets.start("d", "acme", 1_000), "alone it may go over, or it would never run"
    assert not budgets.start("e", "acme", 1)
    budgets.note_committed(["d"])
    assert not budgets.start("e", "acme", 1), "its tokens are not among those read yet"
    budgets.refresh()
    assert budgets.start("e", "acme", 1)
    assert budgets.exhausted() == set()


def test_a_budget_of_nothing_starts_nothing(store: Store) -> None:
    store.change_tenant("acme", tokens_per_day=0)
    budgets = Budgets(store)
    budgets.refresh()
    assert budgets.exhausted() == {"acme"}
    assert not budgets.start("a", "acme", 1)


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 129, "a\x00"])
def test_names_that_cannot_be_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError, match="tenant"):
        checked_tenant(name)


def message(headers: dict[str, Any], **body: Any) -> bytes:
    return json.dumps(
        {
            "body": json.dumps([[], {"prompt": "x", **body}, None]),
            "content-type": "application/json",
            "headers": {"id": "task-1", "task": "kvq.generate", **headers},
            "properties": {},
        }
    ).encode()


def test_a_celery_message_names_its_tenant_and_dedup_key_in_its_headers() -> None:
    job = read_message(message({"tenant": "acme", "dedup_key": "k"}, metadata={"tenant": "not this"}), "kvq")
    assert (job.tenant, job.dedup_key, job.error) == ("acme", "k", None)
    assert read_message(message({}, metadata={"tenant": "from the body"}), "kvq").tenant == "from the body"
    assert read_message(message({}), "kvq").tenant == "default"
    for headers in ({"tenant": 5}, {"tenant": " "}, {"dedup_key": []}):
        error = read_message(message(headers), "kvq").error
        assert error is not None
        assert next(iter(headers)) in error.message
