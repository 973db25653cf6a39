"""Workers that are killed and told to stop: every job ends once, and nothing that is finished runs again."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvq.worker.jobs import Endpoint, JobState, NewJob
from kvq.worker.store import Store
from tests.factories import new_batch, new_job
from tests.system.conftest import WorkerMaker
from tests.waiting import wait_until

TIMEOUT_S = 120.0


def body(number: int, max_tokens: int = 8) -> dict[str, Any]:
    prompt = f"a prefix shared by every fifth prompt {number % 5} " * 4 + f"and number {number}"
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


def job(number: int, max_tokens: int = 8) -> NewJob:
    return new_job(number, job_id=f"job-{number}", endpoint=Endpoint.COMPLETIONS, body=body(number, max_tokens))


def texts(store: Store, batch_id: str) -> dict[str, str | None]:
    return {row.custom_id: row.text for row in store.iter_results(batch_id)}


def test_three_kills_without_a_broker_change_no_answer_and_repeat_no_finished_job(
    sqlite_url: str, start_worker: WorkerMaker
) -> None:
    with Store.open(sqlite_url) as store:
        batch_id = new_batch(store, [job(number) for number in range(60)])
        finished: dict[str, Any] = {}
        for failpoint in ("mid_step:15", "before_commit:2", "during_drain"):
            worker = start_worker("--no-broker", db=sqlite_url, failpoints=failpoint)
            if failpoint == "during_drain":
                worker.wait_ready().send(signal.SIGTERM)
            worker.wait_killed()
            now = {row.job_id: row.finished_at for row in store.iter_results(batch_id) if row.finished}
            assert finished.items() <= now.items(), "a finished job was run again"
            finished = now
        assert finished
        worker = start_worker("--no-broker", db=sqlite_url)
        wait_until(lambda: store.batch_progress(batch_id).finished, timeout_s=TIMEOUT_S)
        assert store.batch_progress(batch_id).succeeded == 60
        disturbed = texts(store, batch_id)
        # The same jobs under the same ids, undisturbed.
        assert worker.stop() == 0
    calm_url = sqlite_url.replace("kvq.db", "calm.db")
    with Store.open(calm_url, create=True) as calm:
        calm_id = new_batch(calm, [job(number) for number in range(60)])
        start_worker("--no-broker", db=calm_url)
        wait_until(lambda: calm.batch_progress(calm_id).finished, timeout_s=TIMEOUT_S)
        assert texts(calm, calm_id) == disturbed


def test_two_workers_share_a_batch_and_each_job_runs_once(
    redis_url: str, pg_db_url: str, start_worker: WorkerMaker
) -> None:
    workers = [start_worker(db=pg_db_url, broker=redis_url) for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    with Store.open(pg_db_url) as store:
        batch_id = new_batch(store, [job(number, max_tokens=20) for number in range(300)])
        wait_until(lambda: store.batch_progress(batch_id).finished, timeout_s=TIMEOUT_S)
        rows = list(store.iter_results(batch_id))
        assert Counter(row.state for row in rows) == {JobState.SUCCEEDED: 300}
        assert {row.attempts for row in rows} == {1}
        shares = Counter(row.worker_id for row in rows)
        assert len(shares) == 2
        assert min(shares.values()) >= 30, shares
    for worker in workers:
        assert worker.stop() == 0


def test_sigterm_lets_running_jobs_finish_and_leaves_the_others_queued(
    redis_url: str, pg_db_url: str, start_worker: WorkerMaker
) -> None:
    worker = start_worker(db=pg_db_url, broker=redis_url, drain_timeout=120, max_num_seqs=4).wait_ready()
    with Store.open(pg_db_url) as store:
        batch_id = new_batch(store, [job(number, max_tokens=200) for number in range(100)])
        wait_until(lambda: store.batch_progress(batch_id).running >= 4)
        worker.send(signal.SIGTERM)
        assert worker.wait(TIMEOUT_S) == 0, worker.log
        progress = store.batch_progress(batch_id)
        assert progress.running == 0
        assert progress.succeeded >= 4
        assert progress.queued == 100 - progress.succeeded
        assert {row.attempts for row in store.iter_results(batch_id) if not row.finished} == {0}


@pytest.mark.parametrize("options", [[], ["--no-broker"]], ids=["celery", "embedded"])
def test_a_second_sigterm_releases_what_runs_at_once_and_charges_nobody(
    options: list[str], redis_url: str, sqlite_url: str, start_worker: WorkerMaker
) -> None:
    broker = {} if options else {"broker": redis_url}
    worker = start_worker(*options, db=sqlite_url, drain_timeout=600, **broker).wait_ready()
    with Store.open(sqlite_url) as store:
        batch_id = new_batch(store, [job(number, max_tokens=1900) for number in range(8)])
        wait_until(lambda: store.batch_progress(batch_id).running == 8)
        worker.send(signal.SIGTERM)
        worker.send(signal.SIGQUIT)
        began = time.monotonic()
        assert worker.wait(30) == 0, worker.log
        assert time.monotonic() - began < 20
        progress = store.batch_progress(batch_id)
        assert (progress.queued, progress.running) == (8, 0)
        assert {(row.attempts, row.crashes) for row in store.iter_results(batch_id)} == {(0, 0)}


def test_a_worker_that_cannot_load_its_model_exits_with_1_and_says_why(
    redis_url: str, sqlite_url: str, tmp_path: Path, start_worker: WorkerMaker
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    worker = start_worker(db=sqlite_url, broker=redis_url, model=str(tmp_path))
    assert worker.wait(TIMEOUT_S) == 1
    assert "cannot load a tokenizer" in worker.log
    assert "Traceback" not in worker.log
