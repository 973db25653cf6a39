"""``kvq top`` and ``kvq doctor``: what is going on, what it means, and what is broken."""

from __future__ import annotations

import json

from kvq.worker.store import Store
from tests.cli.conftest import Kvq
from tests.factories import claim_all, new_batch, new_job, new_worker


def test_top_shows_workers_queues_and_batches(kvq: Kvq, store: Store, store_url: str) -> None:
    new_batch(store, [new_job(1), new_job(2)], name="mine")
    worker_id = new_worker(store, worker_id="worker-1", model="tiny")
    store.claim(worker_id, [store.peek("kvq", limit=1)[0].seq])
    store.record_stats(
        worker_id,
        {"running": 1, "generation_tps": 123.4, "kv_usage": 0.42, "num_draft_tokens": 80, "num_accepted_tokens": 60},
    )
    ran = kvq("top", "--db", store_url, "--once")
    assert ran.code == 0, ran.err
    for text in ("worker-1", "tiny", "123", "42%", "75%", "mine", "1 running, 1 queued"):
        assert text in ran.out
    shown = json.loads(kvq("top", "--db", store_url, "--json").out)
    assert shown["samples"][worker_id]["generation_tps"] == 123.4
    assert (shown["queues"][0]["queued"], shown["queues"][0]["running"]) == (1, 1)
    assert shown["workers"][0]["worker_id"] == worker_id
    assert shown["batches"][0]["total"] == 2


def test_top_of_an_empty_database_says_that_no_worker_runs(kvq: Kvq, sqlite_url: str) -> None:
    ran = kvq("top", "--db", sqlite_url)
    assert ran.code == 0
    assert "no worker is running" in ran.out


def test_doctor_says_in_words_what_the_figures_mean(kvq: Kvq, store: Store, store_url: str) -> None:
    worker_id = new_worker(store)
    for _ in range(4):
        store.record_stats(
            worker_id,
            {"running": 16, "generation_tps": 100, "kv_usage": 0.99, "swapped_out": 50, "prefix_hit_rate": 0.9},
        )
    ran = kvq("doctor", "--db", store_url)
    assert ran.code == 0
    assert "memory is the limit" in ran.out
    assert "lower max_num_seqs to about 12" in ran.out
    found = json.loads(kvq("doctor", "--db", store_url, "--json").out)
    assert [finding["code"] for finding in found] == ["swapping", "memory_bound"]


def test_audit_ends_with_1_when_an_invariant_is_broken(kvq: Kvq, store: Store, store_url: str, redis_url: str) -> None:
    new_batch(store, [new_job(1)])
    claim_all(store, new_worker(store, worker_id="w"))
    calm = kvq("doctor", "--audit", "--db", store_url, "--broker", redis_url)
    assert calm.code == 0, calm.out + calm.err
    assert calm.out.count("holds") == 6
    store.bury_worker("w")
    ran = kvq("doctor", "--audit", "--db", store_url)
    assert ran.code == 1
    assert "BROKEN  every running job has a live owner" in ran.out
    document = json.loads(kvq("doctor", "--audit", "--db", store_url, "--json").out)
    assert document["holds"] is False
    assert [check["holds"] for check in document["checks"]].count(False) == 1
