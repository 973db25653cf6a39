"""Reading and ending batches: status, results, export, cancel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvq.worker.store import Store
from tests.cli.conftest import Kvq
from tests.factories import failure_of, new_batch, new_job, new_worker, outcome_of


@pytest.fixture
def batch_id(store: Store) -> str:
    """Five rows: two succeeded, one failed, one running, one queued."""
    batch_id = new_batch(store, [new_job(i) for i in range(1, 6)], name="mine")
    worker_id = new_worker(store)
    claimed = store.claim(worker_id, [job.seq for job in store.peek("kvq", limit=4)])
    store.finish(
        worker_id,
        [outcome_of(claimed[0]), outcome_of(claimed[1], text="two\n\x1b[31mlines"), failure_of(claimed[2])],
    )
    return batch_id


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_status_lists_batches_and_workers(kvq: Kvq, store_url: str, batch_id: str) -> None:
    out = kvq("status", "--db", store_url).out
    for word in (batch_id[:8], "mine", "60%", "2 succeeded, 1 failed, 1 running, 1 queued", "4242"):
        assert word in out
    parsed = json.loads(kvq("status", "--db", store_url, "--json").out)
    assert [batch["batch_id"] for batch in parsed["batches"]] == [batch_id]
    assert parsed["workers"][0]["pid"] == 4242


@pytest.mark.parametrize("name", ["mine", "latest", "prefix", "id"])
def test_a_batch_goes_by_id_beginning_name_or_latest(kvq: Kvq, store_url: str, batch_id: str, name: str) -> None:
    wanted = {"prefix": batch_id[:6], "id": batch_id}.get(name, name)
    ran = kvq("status", wanted, "--db", store_url, "--json")
    assert json.loads(ran.out)["progress"]["batch_id"] == batch_id


def test_status_of_a_batch_shows_its_errors(kvq: Kvq, store_url: str, batch_id: str) -> None:
    out = kvq("status", batch_id, "--db", store_url).out
    assert "engine_error in a test" in out
    assert "first on line 3" in out
    assert "secret" not in out


@pytest.mark.parametrize("command", ["status", "results", "cancel"])
def test_an_unknown_batch_is_bad_usage(kvq: Kvq, store_url: str, command: str) -> None:
    for name in ("nope", "latest"):
        ran = kvq(command, name, "--db", store_url)
        assert ran.code == 2
        assert ran.out == ""
        assert name in ran.err


def test_a_missing_database_is_bad_usage_and_is_not_created(kvq: Kvq) -> None:
    for args in (["status"], ["results", "x"], ["cancel", "x"], ["export", "x", "--output", "o.jsonl"]):
        ran = kvq(*args)
        assert ran.code == 2
        assert "kvq.db" in ran.err
    assert not Path("kvq.db").exists()


def test_results_are_a_table_that_cannot_move_the_cursor(kvq: Kvq, store_url: str, batch_id: str) -> None:
    out = kvq("results", batch_id, "--db", store_url).out
    rows = [line for line in out.splitlines() if "row-" in line]
    assert len(rows) == 5
    assert "\x1b" not in out
    assert "engine_error: engine_error in a test" in out


def test_results_as_json_lines_hold_everything(kvq: Kvq, store_url: str, batch_id: str) -> None:
    out = kvq("results", batch_id, "--db", store_url, "--json").out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["custom_id"] for row in rows] == [f"row-{i}" for i in range(1, 6)]
    assert rows[0]["metrics"]["cached_tokens"] == 4
    assert rows[2]["error"]["code"] == "engine_error"


def test_results_can_be_narrowed(kvq: Kvq, store_url: str, batch_id: str) -> None:
    chosen = kvq("results", batch_id, "--db", store_url, "--json", "--state", "succeeded", "--limit", "1").out
    assert json.loads(chosen)["custom_id"] == "row-1"
    assert kvq("results", batch_id, "--db", store_url, "--state", "odd").code == 2


def test_export_works_while_the_batch_goes_on(kvq: Kvq, store_url: str, batch_id: str) -> None:
    ran = kvq("export", batch_id, "--db", store_url, "--output", "out.jsonl", "--errors", "err.jsonl")
    assert ran.code == 0
    assert [line["custom_id"] for line in lines("out.jsonl")] == ["row-1", "row-2"]
    (error,) = lines("err.jsonl")
    assert error["custom_id"] == "row-3"
    assert error["error"]["code"] == "engine_error"
    assert "2 rows not finished" in ran.err


def test_export_after_a_cancel_has_every_row_once(kvq: Kvq, store: Store, store_url: str, batch_id: str) -> None:
    ran = kvq("cancel", "mine", "--db", store_url)
    assert ran.code == 0
    assert "2 rows cancelled, 2 had succeeded\n1 row still runs: " in ran.err
    progress = store.batch_progress(batch_id)
    assert (progress.succeeded, progress.failed, progress.cancelled, progress.running) == (2, 1, 1, 1)
    kvq("export", batch_id, "--db", store_url, "--output", "out.jsonl", "--errors", "err.jsonl")
    written = [line["custom_id"] for line in lines("out.jsonl") + lines("err.jsonl")]
    assert sorted(written) == ["row-1", "row-2", "row-3", "row-5"]


def test_single_jobs_and_a_whole_queue_can_be_cancelled(kvq: Kvq, store: Store, store_url: str) -> None:
    jobs = [new_job(number, queue="slow") for number in range(1, 6)]
    batch_id = new_batch(store, jobs)
    new_batch(store, [new_job(1)])
    worker_id = new_worker(store)
    store.claim(worker_id, [job.seq for job in store.peek("slow", limit=1)])
    first, second = jobs[0].job_id, jobs[1].job_id

    ran = kvq("cancel", "--job", first, "--job", second, "--db", store_url)
    assert ran.code == 0
    assert "2 rows cancelled\n1 row still runs: " in ran.err
    assert [job_id for _, job_id in store.cancel_requests(worker_id)] == [first]

    ran = kvq("cancel", "--queue", "slow", "--db", store_url)
    assert "queue slow: 3 rows cancelled\n1 row still runs: " in ran.err
    progress = store.batch_progress(batch_id)
    assert (progress.running, progress.cancelled) == (1, 4)
    assert store.num_queued("kvq", at_most=9) == 1


def test_what_cannot_be_cancelled_is_named_and_nothing_is(kvq: Kvq, store: Store, store_url: str) -> None:
    (job,) = jobs = [new_job(1)]
    new_batch(store, jobs)
    ran = kvq("cancel", "--job", job.job_id, "--job", "nobody", "--db", store_url)
    assert ran.code == 2
    assert "there is no job nobody; nothing was cancelled" in ran.err
    for args in ([], ["latest", "--queue", "kvq"]):
        ran = kvq("cancel", *args, "--db", store_url)
        assert ran.code == 2
        assert "one of BATCH, --job and --queue" in ran.err
    assert store.num_queued("kvq", at_most=9) == 1


def test_export_to_stdout_is_data_alone(kvq: Kvq, store_url: str, batch_id: str) -> None:
    ran = kvq("export", batch_id, "--db", store_url, "--output", "-")
    assert [json.loads(line)["custom_id"] for line in ran.out.splitlines()] == ["row-1", "row-2"]


def test_export_needs_somewhere_to_write(kvq: Kvq, store_url: str, batch_id: str) -> None:
    assert kvq("export", batch_id, "--db", store_url).code == 2
    ran = kvq("export", batch_id, "--db", store_url, "--output", "no/folder/out.jsonl")
    assert ran.code == 2
    assert "does not exist" in ran.err
