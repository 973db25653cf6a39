"""EarlyRows: a large file's first rows run before its check ends, and a bad file still leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq.worker import early_rows
from kvq.worker.client import Client
from kvq.worker.errors import FileInvalid
from kvq.worker.store import Store
from tests.factories import claim_all, new_worker, outcome_of

NUM_LINES = 3000


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check ends in time."""
    monkeypatch.setattr(early_rows, "PATIENCE_S", 0.0)


def _file(folder: Path, **changed: Any) -> str:
    lines = [json.dumps({"id": number, "prompt": f"Say {number}"}) for number in range(1, NUM_LINES + 1)]
    for number, line in changed.items():
        lines[int(number.removeprefix("line")) - 1] = line
    path = folder / "jobs.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _claim_all(url: str) -> list[Any]:
    with Store.open(url) as store:
        return claim_all(store, new_worker(store, worker_id="w"))


@pytest.fixture
def claimed_early(store_url: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a worker gets hold of while the check goes on."""
    claimed: list[Any] = []
    monkeypatch.setattr(Client, "_ring", lambda self: claimed or claimed.extend(_claim_all(store_url)))
    return claimed


def test_the_first_rows_can_run_while_the_rest_is_checked_and_none_is_there_twice(
    store_url: str, tmp_path: Path, claimed_early: list[Any]
) -> None:
    with Client(db=store_url) as client:
        (batch,) = client.submit_files([_file(tmp_path)])
        assert 0 < len(claimed_early) < NUM_LINES
        assert [job.custom_id for job in claimed_early] == [str(i + 1) for i in range(len(claimed_early))]
        assert batch.num_jobs == batch.num_new == NUM_LINES
        assert client.status(batch).total == NUM_LINES
        assert client.status(batch).running == len(claimed_early)


@pytest.mark.parametrize("bad", ["{", json.dumps({"id": 5, "prompt": "the id of line 5"})])
def test_a_bad_line_found_late_leaves_nothing_and_the_results_of_what_ran_are_refused(
    store_url: str,
    tmp_path: Path,
    bad: str,
    claimed_early: list[Any],
    sql: Callable[..., list[Any]],
) -> None:
    with Client(db=store_url) as client, pytest.raises(FileInvalid, match="line 2990:"):
        client.submit_files([_file(tmp_path, line2990=bad)])
    assert claimed_early
    for table in ("batches", "jobs", "job_payloads", "results", "job_attempts", "outbox"):
        assert sql(f"SELECT count(*) FROM {table}") == [(0,)]
    with Store.open(store_url) as store:
        report = store.finish("w", [outcome_of(job) for job in claimed_early])
    assert len(report.fenced) == len(claimed_early)
    assert sql("SELECT count(*) FROM results") == [(0,)]


def test_bad_lines_among_the_first_keep_everything_waiting(
    store_url: str, tmp_path: Path, claimed_early: list[Any]
) -> None:
    with Client(db=store_url) as client, pytest.raises(FileInvalid, match="line 3:"):
        client.submit_files([_file(tmp_path, line3="{")])
    assert claimed_early == []


def test_a_batch_that_was_there_is_not_withdrawn(store_url: str, tmp_path: Path) -> None:
    with Client(db=store_url) as client:
        (batch,) = client.submit_files([_file(tmp_path)], idempotency_key="k")
        with pytest.raises(FileInvalid):
            client.submit_files([_file(tmp_path, line2990="{")], idempotency_key="k")
        assert client.status(batch).queued == NUM_LINES
        assert client.submit_files([_file(tmp_path)], idempotency_key="k")[0].num_new == 0


def test_a_full_queue_takes_no_early_rows(store_url: str, tmp_path: Path, claimed_early: list[Any]) -> None:
    with Client(db=store_url, max_queued=10) as client, pytest.raises(FileInvalid):
        client.submit_files([_file(tmp_path, line2990="{")])
    assert claimed_early == []
