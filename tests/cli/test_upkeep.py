"""Running again, giving up, pausing and pruning from the command line."""

from __future__ import annotations

import json

import pytest

from kvq.worker.store import Store
from tests.cli.conftest import Kvq
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker


@pytest.fixture
def batch_id(store: Store) -> str:
    """Two rows that have failed."""
    batch_id = new_batch(store, [new_job(1), new_job(2)], name="mine")
    worker_id = new_worker(store)
    store.finish(worker_id, [failure_of(job, f"code_{job.custom_id[-1]}") for job in claim_all(store, worker_id)])
    return batch_id


def test_retry_picks_rows_and_changes_them(kvq: Kvq, store_url: str, store: Store, batch_id: str) -> None:
    ran = kvq(
        "retry",
        "mine",
        "--db",
        store_url,
        "--where",
        "error_code = code_2",
        "--set",
        "max_tokens=7",
        "--set",
        "stop=END",
    )
    assert (ran.code, ran.err) == (0, f"{batch_id}: 1 row queued again\n")
    (job,) = store.peek("kvq", limit=9)
    assert (job.body["max_tokens"], job.body["stop"]) == (7, "END")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--where", "nonsense"], "cannot read 'nonsense'"),
        (["--set", "max_tokens"], "is not FIELD=VALUE"),
        (["--set", "max_tokns=3"], "did you mean max_tokens"),
        (["--state", "succeeded"], "is not one of"),
    ],
)
def test_a_retry_that_makes_no_sense_changes_nothing(
    kvq: Kvq, store_url: str, store: Store, batch_id: str, options: list[str], reason: str
) -> None:
    ran = kvq("retry", "mine", "--db", store_url, *options)
    assert ran.code == 2
    assert reason in ran.err
    assert store.batch_progress(batch_id).failed == 2


def test_dead_letters_are_listed_retried_and_dropped(kvq: Kvq, store_url: str, store: Store) -> None:
    new_batch(store, [new_job(i, job_id=f"job-{i}") for i in range(3)])
    for _ in range(3):
        worker_id = new_worker(store)
        claim_all(store, worker_id)
        store.bury_worker(worker_id)
        store.reap(lease_s=60)
    assert "3 workers were lost" in kvq("dead", "list", "--db", store_url).out
    listed = json.loads(kvq("dead", "list", "--db", store_url, "--json").out)
    assert [letter["job_id"] for letter in listed] == ["job-2", "job-1", "job-0"]
    assert kvq("dead", "retry", "--db", store_url).code == 2, "nothing is retried by leaving something out"
    assert kvq("dead", "retry", "job-0", "job-9", "--db", store_url).err == "1 job queued again\n"
    assert kvq("dead", "drop", "--all", "--db", store_url).err == "2 jobs dropped\n"
    assert [job.job_id for job in store.peek("kvq", limit=9)] == ["job-0"]


def test_a_dead_letter_is_not_dropped_before_its_sender_was_told(kvq: Kvq, store_url: str, store: Store) -> None:
    store.insert_jobs([new_job(1, celery={"reply_to": "q"})])
    for _ in range(3):
        worker_id = new_worker(store)
        claim_all(store, worker_id)
        store.bury_worker(worker_id)
        store.reap(lease_s=60)
    said = kvq("dead", "drop", "--all", "--db", store_url).err
    assert said.startswith("0 jobs dropped\n1 job left: ")
    store.outbox_done([row.id for row in store.outbox_pending(9)])
    assert kvq("dead", "drop", "--all", "--db", store_url).err == "1 job dropped\n"


def test_a_paused_queue_is_served_again_after_resume(kvq: Kvq, store_url: str, store: Store) -> None:
    new_batch(store, [new_job(1)])
    assert kvq("pause", "--json", "--db", store_url).code == 2
    assert kvq("pause", "--list", "--db", store_url).out == ""
    assert kvq("pause", "--db", store_url).err == "queue kvq is paused\n"
    assert kvq("pause", "other", "--db", store_url).code == 0
    assert kvq("pause", "--list", "--db", store_url).out == "kvq\nother\n"
    assert json.loads(kvq("pause", "--list", "--json", "--db", store_url).out) == ["kvq", "other"]
    assert store.peek("kvq", limit=1) == []
    assert kvq("resume", "--db", store_url).code == 0
    assert len(store.peek("kvq", limit=1)) == 1
    assert kvq("resume", "other", "--db", store_url).code == 0
    assert kvq("pause", "--list", "--db", store_url).err == "no queue is paused\n"


def test_prune_takes_an_age(kvq: Kvq, store_url: str, store: Store, batch_id: str) -> None:
    assert kvq("prune", "--db", store_url, "--older-than", "soon").code == 2
    assert kvq("prune", "--db", store_url, "--older-than", "30d").err == "0 batches and 0 jobs deleted\n"
    assert kvq("prune", "--db", store_url, "--older-than", "0s", "--dry-run").err.endswith("2 jobs would be deleted\n")
    assert store.batch_progress(batch_id).total == 2
    assert kvq("prune", "--db", store_url, "--older-than", "0s").err == "1 batch and 2 jobs deleted\n"
