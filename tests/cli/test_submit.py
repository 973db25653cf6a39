"""``kvq submit``: what is enqueued, what is printed where, and waiting."""

from __future__ import annotations

import json
import signal
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvq.worker.store import Store
from kvq.worker.webhooks import event_of
from tests.cli.conftest import Kvq, start
from tests.factories import claim_all, failure_of, new_worker, outcome_of
from tests.waiting import wait_until

ROW = '{"prompt": "Hello"}\n'


@pytest.fixture
def jobs_file(tmp_path: Path) -> str:
    path = tmp_path / "jobs.jsonl"
    path.write_text(ROW * 3, encoding="utf-8")
    return str(path)


def test_the_batch_id_alone_is_on_stdout(kvq: Kvq, store_url: str, store: Store, jobs_file: str) -> None:
    ran = kvq("submit", jobs_file, "--db", store_url, "--name", "mine", "--priority", "4", "--queue", "fast")
    assert ran.code == 0, ran.err
    (progress,) = store.list_batches()
    assert ran.out == progress.batch_id + "\n"
    assert (progress.name, progress.queued) == ("mine", 3)
    assert [job.priority for job in store.peek("fast", limit=9)] == [4, 4, 4]
    assert "3 jobs enqueued on queue fast" in ran.err


def test_a_batch_has_the_name_of_its_file_unless_it_is_given_one(kvq: Kvq, store_url: str, jobs_file: str) -> None:
    ran = kvq("submit", jobs_file, "--db", store_url)
    status = kvq("status", "jobs.jsonl", "--db", store_url, "--json")
    assert json.loads(status.out)["progress"]["batch_id"] == ran.out.strip()


def test_a_completion_window_is_a_deadline_of_every_row(kvq: Kvq, store_url: str, store: Store, jobs_file: str) -> None:
    ran = kvq("submit", jobs_file, "--db", store_url, "--completion-window", "24h")
    assert ran.code == 0, ran.err
    worker_id = new_worker(store)
    left = [job.deadline - datetime.now(UTC) for job in claim_all(store, worker_id) if job.deadline is not None]
    assert len(left) == 3
    assert all(timedelta(hours=23) < one <= timedelta(hours=24) for one in left)
    for wrong in ("0h", "soon"):
        ran = kvq("submit", jobs_file, "--db", store_url, "--completion-window", wrong)
        assert ran.code == 2
        assert "completion" in ran.err


def test_each_file_is_a_batch_and_its_id_a_line(kvq: Kvq, jobs_file: str) -> None:
    Path("b.jsonl").write_text(ROW, encoding="utf-8")
    ids = kvq("submit", jobs_file, "b.jsonl").out.split()
    with Store.open("kvq.db") as store:
        assert [store.batch_progress(batch_id).total for batch_id in ids] == [3, 1]


def test_bad_lines_of_all_files_are_reported_and_no_file_is_enqueued(kvq: Kvq, jobs_file: str) -> None:
    Path("b.jsonl").write_text(ROW + "null\n", encoding="utf-8")
    Path("c.jsonl").write_text("{bad\n", encoding="utf-8")
    ran = kvq("submit", jobs_file, "b.jsonl", "c.jsonl")
    assert ran.code == 2
    assert ran.out == ""
    assert "b.jsonl: 1 of 2 rows" in ran.err
    assert "line 2: is null" in ran.err
    assert "c.jsonl: 1 of 1 row" in ran.err
    with Store.open("kvq.db") as store:
        assert store.list_batches() == []


def test_skip_invalid_enqueues_the_good_rows(kvq: Kvq) -> None:
    Path("b.jsonl").write_text(ROW + "null\n", encoding="utf-8")
    ran = kvq("submit", "b.jsonl", "--skip-invalid")
    assert ran.code == 0
    assert "1 job enqueued on queue kvq, 1 bad row recorded as failed" in ran.err
    with Store.open("kvq.db") as store:
        progress = store.batch_progress(ran.out.strip())
    assert (progress.queued, progress.failed) == (1, 1)


def test_the_same_key_is_the_same_batch(kvq: Kvq, jobs_file: str) -> None:
    first = kvq("submit", jobs_file, "--idempotency-key", "k")
    again = kvq("submit", jobs_file, "--idempotency-key", "k")
    assert first.out == again.out
    assert "0 jobs enqueued" in again.err


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 3)])
def test_wait_ends_with_the_batch_and_tells_how_it_went(
    kvq: Kvq, store: Store, store_url: str, jobs_file: str, fails: bool, code: int
) -> None:
    def serve() -> None:
        wait_until(lambda: store.peek("kvq", limit=9), what="the jobs")
        worker_id = new_worker(store)
        jobs = claim_all(store, worker_id)
        outcomes = [outcome_of(job) for job in jobs[1:]]
        store.finish(worker_id, [*outcomes, failure_of(jobs[0]) if fails else outcome_of(jobs[0])])

    server = threading.Thread(target=serve)
    server.start()
    ran = kvq("submit", jobs_file, "--db", store_url, "--wait")
    server.join(30)
    assert ran.code == code
    assert ran.out.count("\n") == 1
    assert ("1 failed" in ran.err) == fails


def test_an_interrupted_wait_leaves_the_batch_alone(tmp_path: Path, jobs_file: str) -> None:
    process = start("submit", jobs_file, "--wait", folder=tmp_path)
    assert process.stdout is not None
    batch_id = process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the batches go on" in err or "interrupted" in err
    with Store.open(str(tmp_path / "kvq.db")) as store:
        assert store.batch_progress(batch_id).queued == 3


def test_an_old_postgresql_database_is_refused_with_the_command_to_run(
    kvq: Kvq, pg_empty_url: str, jobs_file: str
) -> None:
    ran = kvq("submit", jobs_file, "--db", pg_empty_url)
    assert ran.code == 2
    assert "kvq db upgrade" in ran.err
    assert kvq("db", "upgrade", "--db", pg_empty_url).code == 0
    assert kvq("submit", jobs_file, "--db", pg_empty_url).code == 0


def test_standard_input_is_a_file_too(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "kvq.cli", "submit", "-"],
        input=ROW * 2,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with Store.open(str(tmp_path / "kvq.db")) as store:
        assert store.batch_progress(done.stdout.strip()).queued == 2


def test_a_batch_with_a_webhook_shows_how_far_its_announcement_is(kvq: Kvq, jobs_file: str) -> None:
    batch_id = kvq("submit", jobs_file, "--webhook", "https://host.test/hook?token=hidden").out.strip()
    shown = kvq("status", batch_id).out
    assert "webhook" in shown
    assert "https://host.test/hook?***  waiting for the end of the batch" in shown
    assert "hidden" not in shown
    told = json.loads(kvq("status", batch_id, "--json").out)["webhook"]
    assert (told["state"], told["tries"], told["last_error"]) == ("waiting", 0, None)
    with Store.open("kvq.db") as store:
        store.cancel_batch(batch_id)
        worker_id = new_worker(store)
        store.write_events(event_of)
        delivery = store.claim_webhook(worker_id, hold_s=60)
        assert delivery is not None
        store.webhook_failed(delivery, "the receiver answered 500")
    shown = kvq("status", batch_id).out
    assert "to be delivered after 1 attempt, next at " in shown
    assert "the receiver answered 500" in shown


def test_a_webhook_that_cannot_be_called_is_bad_usage(kvq: Kvq, jobs_file: str) -> None:
    ran = kvq("submit", jobs_file, "--webhook", "ftp://host/")
    assert ran.code == 2
    assert "webhook: the URL must begin with https:// or http://" in ran.err
    with Store.open("kvq.db") as store:
        assert store.list_batches() == []
