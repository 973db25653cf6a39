"""The whole worker without a broker, on both databases: jobs in SQL in, results in SQL out."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvq.engine.engine import Engine
from kvq.engine.errors import EngineError, ModelError, StepFailed
from kvq.worker.config import Settings
from kvq.worker.inference import Inference
from kvq.worker.jobs import ClaimedJob, Endpoint, JobOutcome, JobState
from kvq.worker.service import WorkerService
from kvq.worker.service_options import ServiceOptions, ServiceProgress
from kvq.worker.store import Store
from kvq.worker.store_records import BatchProgress
from tests.factories import new_batch, new_job
from tests.waiting import wait_until
from tests.worker.conftest import ServiceMaker
from tests.worker.crowds import claimed

LONG = {"max_tokens": 1500, "ignore_eos": True}


def completion(number: int, prompt: str, **body: Any) -> Any:
    return new_job(number, endpoint=Endpoint.COMPLETIONS, body={"prompt": prompt, "max_tokens": 4, **body})


def test_every_job_of_a_batch_ends_with_an_openai_answer_and_its_cost(store: Store, make_service: ServiceMaker) -> None:
    chat = new_job(1, body={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "n": 2})
    batch_id = new_batch(store, [chat, *(completion(i, f"tell me about {i}") for i in range(2, 30))])
    service = make_service()
    service.start()
    progress = service.run_until_idle(batch_id)
    assert (progress.succeeded, progress.total) == (29, 29)
    row = store.job(chat.job_id)
    assert row is not None
    assert row.response is not None
    assert row.response["object"] == "chat.completion"
    assert [choice["index"] for choice in row.response["choices"]] == [0, 1]
    assert row.text == row.response["choices"][0]["message"]["content"]
    assert row.response["usage"]["completion_tokens"] == row.metrics.completion_tokens == 6
    for cost in (row.metrics.queue_ms, row.metrics.ttft_ms, row.metrics.tpot_ms, row.metrics.e2e_ms):
        assert cost is not None
        assert cost >= 0
    assert row.worker_id == service.lease.worker_id


def test_a_job_without_a_seed_gives_the_same_answer_in_every_run(engine: Engine) -> None:
    outcomes: list[JobOutcome] = []
    inference = Inference(lambda: engine, on_outcome=outcomes.append, on_change=lambda: None)
    inference.start()
    assert inference.wait_ready(60)
    body = {"prompt": "once upon a time", "temperature": 1.5, "max_tokens": 12}
    prepared = inference.prepare(Endpoint.COMPLETIONS, body)
    for seq, job_id in enumerate(["one", "one", "other"], start=1):
        job = ClaimedJob(
            seq=seq,
            job_id=job_id,
            batch_id=None,
            custom_id="",
            endpoint=Endpoint.COMPLETIONS,
            body=body,
            priority=0,
            attempt=1,
            claim_id=seq,
            crashes=0,
            queue_ms=0,
        )
        inference.submit(job, prepared)
        wait_until(lambda seq=seq: len(outcomes) == seq)  # type: ignore[misc]
    inference.stop()
    texts = [outcome.text for outcome in outcomes]
    assert texts[0] == texts[1] != texts[2]
    assert outcomes[0].metrics.seed == outcomes[1].metrics.seed != outcomes[2].metrics.seed


def test_equal_jobs_are_computed_together_but_not_all_claimed_at_once(store: Store, make_service: ServiceMaker) -> None:
    batch_id = new_batch(store, [completion(i, "the same", temperature=0, max_tokens=40) for i in range(60)])
    service = make_service(max_claimed=20)
    most_claimed = 0

    def watch(_batch: Any, state: ServiceProgress) -> None:
        nonlocal most_claimed
        most_claimed = max(most_claimed, state.claimed)

    service.start()
    assert service.run_until_idle(batch_id, on_progress=watch, interval_s=0.01).succeeded == 60
    assert 0 < most_claimed <= 20
    assert len({row.text for row in store.iter_results(batch_id)}) == 1


def test_a_batch_that_takes_long_to_count_is_counted_seldom_and_still_seen_to_move_and_to_end(
    store: Store, make_service: ServiceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [completion(i, f"question {i}", max_tokens=40 * i, ignore_eos=True) for i in range(1, 31)]
    batch_id = new_batch(store, jobs)
    count, counts, seen = store.batch_progress, [], []

    def count_slowly(batch: str) -> BatchProgress:
        time.sleep(1.0)
        counts.append(count(batch).done)
        return count(batch)

    monkeypatch.setattr(store, "batch_progress", count_slowly)
    service = make_service()
    service.start()
    progress = service.run_until_idle(
        batch_id, on_progress=lambda batch, _: seen.append((batch.done, batch.finished)), interval_s=0.01
    )
    assert progress.succeeded == 30
    assert (counts[0], counts[-1], len(counts)) == (0, 30, 2)
    assert len({done for done, _ in seen}) > 2
    assert seen == sorted(seen)
    assert [finished for _, finished in seen].index(True) == len(seen) - 1


def test_bad_rows_fail_with_a_reason_and_good_ones_succeed(store: Store, make_service: ServiceMaker) -> None:
    too_long = completion(1, "word " * 5000)
    bad = completion(2, "x", temperature=-3)
    batch_id = new_batch(store, [too_long, bad, *(completion(i, f"q {i}") for i in range(3, 12))])
    service = make_service()
    service.start()
    progress = service.run_until_idle(batch_id)
    assert (progress.succeeded, progress.failed) == (9, 2)
    row = store.job(too_long.job_id)
    assert row is not None
    assert row.error is not None
    assert row.error.code == "context_length_exceeded"
    assert "5001" in row.error.message
    assert "2048" in row.error.message


def test_jobs_enter_the_engine_in_the_order_of_the_worker_whatever_they_share_or_decode(
    sqlite_url: str, tiny_model_folder: Path
) -> None:
    engine = {"model": str(tiny_model_folder), "device": "cpu", "kv_cache_memory": 8 << 20, "max_num_seqs": 1}
    bodies = [{"prompt": "word " * (60 - 10 * i), "max_tokens": 2 + i, "ignore_eos": True} for i in range(5)]
    with Store.open(sqlite_url) as store:
        service = WorkerService.from_settings(Settings(db=sqlite_url, engine=engine), store)
        service.inference.start()
        assert service.inference.wait_ready(60)
        jobs = [claimed(Endpoint.COMPLETIONS, body) for body in bodies]
        for job in jobs:
            service.inference.submit(job, service.inference.prepare(job.endpoint, job.body))
        wait_until(lambda: service.finisher.num_pending == len(jobs))
        service.inference.stop()
    assert [outcome.job_id for outcome in service.finisher._pending] == [job.job_id for job in jobs]


def test_draining_finishes_what_runs_when_there_is_time(store: Store, make_service: ServiceMaker) -> None:
    batch_id = new_batch(store, [completion(i, f"q {i}", max_tokens=30, ignore_eos=True) for i in range(4)])
    service = make_service()
    service.start()
    wait_until(lambda: service.inference.num_jobs == 4)
    report = service.drain(60)
    assert report.released == 0
    assert report.flushed
    assert store.batch_progress(batch_id).succeeded == 4
    assert store.live_workers() == []


def test_draining_releases_what_does_not_finish_in_time_without_charging_it(
    store: Store, make_service: ServiceMaker
) -> None:
    jobs = [completion(i, f"q {i}", **LONG) for i in range(4)]
    batch_id = new_batch(store, jobs)
    service = make_service()
    service.start()
    wait_until(lambda: service.inference.num_jobs == 4)
    assert service.drain(0).released == 4
    progress = store.batch_progress(batch_id)
    assert (progress.queued, progress.running) == (4, 0)
    for job in jobs:
        row = store.job(job.job_id)
        assert row is not None
        assert (row.attempts, row.crashes) == (0, 0)


def test_a_drain_in_a_hurry_releases_at_once(store: Store, make_service: ServiceMaker) -> None:
    batch_id = new_batch(store, [completion(1, "q", **LONG)])
    service = make_service()
    service.start()
    wait_until(lambda: service.inference.num_jobs == 1)
    draining = threading.Thread(target=service.drain, args=(600,))
    draining.start()
    service.hurry_drain()
    draining.join(30)
    assert not draining.is_alive()
    assert store.batch_progress(batch_id).queued == 1


def test_an_engine_that_cannot_be_loaded_is_a_fault_and_its_jobs_stay_queued(store: Store) -> None:
    def load() -> Engine:
        raise ModelError("there is no such model")

    batch_id = new_batch(store, [completion(1, "q")])
    service = WorkerService(store, load, options=ServiceOptions(model="tiny"))
    service.start()
    with pytest.raises(ModelError, match="no such model"):
        service.run_until_idle(batch_id)
    service.drain()
    assert store.batch_progress(batch_id).queued == 1


def test_draining_does_not_wait_for_an_engine_that_is_still_loading(store: Store, engine: Engine) -> None:
    loaded = threading.Event()

    def load() -> Engine:
        assert loaded.wait(60)
        return engine

    batch_id = new_batch(store, [completion(1, "q")])
    service = WorkerService(store, load, options=ServiceOptions(model="tiny"))
    service.start()
    assert service.drain(60).flushed
    assert not loaded.is_set()
    assert store.batch_progress(batch_id).queued == 1
    loaded.set()
    wait_until(lambda: not service.inference._thread.is_alive())


class Trap:
    """Makes the engine's step raise while certain requests are in it."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, poison: set[str], error: Exception) -> None:
        self.inside: set[str] = set()
        self.most_inside_when_failing: list[int] = []
        step, add, abort = engine.step, engine.add_request, engine.abort_request

        def add_request(request_id: str, *args: Any, **kwargs: Any) -> None:
            add(request_id, *args, **kwargs)
            self.inside.add(request_id)

        def abort_request(request_id: str) -> Any:
            self.inside.discard(request_id)
            return abort(request_id)

        def trapped() -> Any:
            if self.inside & poison:
                self.most_inside_when_failing.append(len(self.inside))
                raise StepFailed("a step failed") from error
            outputs = step()
            self.inside -= {output.request_id for output in outputs}
            return outputs

        monkeypatch.setattr(engine, "step", trapped)
        monkeypatch.setattr(engine, "add_request", add_request)
        monkeypatch.setattr(engine, "abort_request", abort_request)


def test_a_job_that_fails_the_step_is_found_and_its_neighbours_succeed(
    store: Store, engine: Engine, make_service: ServiceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [completion(i, f"q {i}") for i in range(6)]
    trap = Trap(engine, monkeypatch, {jobs[3].job_id}, RuntimeError("numbers"))
    batch_id = new_batch(store, jobs)
    service = make_service()
    service.start()
    progress = service.run_until_idle(batch_id)
    assert (progress.succeeded, progress.failed) == (5, 1)
    row = store.job(jobs[3].job_id)
    assert row is not None
    assert row.error is not None
    assert row.error.code == "engine_error"
    assert trap.most_inside_when_failing[-1] == 1


def test_an_unusable_device_ends_the_worker_and_its_jobs_become_suspects(
    store: Store, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = completion(1, "q")
    Trap(engine, monkeypatch, {job.job_id}, RuntimeError("CUDA error: an illegal memory access was encountered"))
    batch_id = new_batch(store, [job])
    service = WorkerService(store, lambda: engine, options=ServiceOptions(model="tiny"))
    service.start()
    with pytest.raises(EngineError):
        service.run_until_idle(batch_id)
    service.drain()
    row = store.job(job.job_id)
    assert row is not None
    assert (row.state, row.crashes) == (JobState.QUEUED, 1)
    engine.abort_request(job.job_id)
    engine.check_integrity()


def test_a_step_that_does_not_end_is_a_fault_and_its_jobs_are_given_to_others(
    store: Store, engine: Engine, make_service: ServiceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = new_batch(store, [completion(1, "q", **LONG)])
    end = threading.Event()
    step = engine.step

    def stuck() -> Any:
        end.wait(60)
        return step()

    monkeypatch.setattr(engine, "step", stuck)
    service = make_service(step_timeout_s=0.05)
    service.start()
    try:
        fault = wait_until(lambda: service.fault)
        assert "longer than step_timeout_s" in str(fault)
        service.drain(60)
        (row,) = store.iter_results(batch_id)
        assert (row.state, row.crashes) == (JobState.QUEUED, 1), "it may be what the engine is stuck on"
        assert store.live_workers() == []
    finally:
        end.set()
    wait_until(lambda: not engine.has_unfinished_requests)
