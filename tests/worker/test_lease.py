"""The lease: signs of life, dead neighbours, cancel requests and deadlines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvq.engine.stats import EngineStats
from kvq.worker.jobs import Endpoint, JobState
from kvq.worker.lease import Lease, LeaseOptions, Meter, bury_local_dead, describe, is_gone, process_birth
from kvq.worker.store import Store
from tests.factories import claim_all, new_batch, new_job, new_worker
from tests.waiting import wait_until
from tests.worker.conftest import ServiceMaker

Sql = Callable[..., list[Any]]
LONG = {"max_tokens": 1900, "ignore_eos": True, "n": 16}


def completion(number: int, prompt: str, *, body: dict[str, Any] | None = None, **changes: Any) -> Any:
    given = {"prompt": prompt, "max_tokens": 4, **(body or {})}
    return new_job(number, endpoint=Endpoint.COMPLETIONS, body=given, **changes)


def ended_process() -> tuple[int, str]:
    """Number and birth of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    birth = process_birth(child.pid)
    child.communicate(b"\n")
    assert birth is not None
    return child.pid, birth


def test_a_running_process_is_not_taken_for_gone() -> None:
    assert not is_gone(os.getpid(), process_birth(os.getpid()))


def test_an_ended_process_is_gone_even_if_its_number_is_used_again() -> None:
    pid, birth = ended_process()
    assert is_gone(pid, birth)
    assert is_gone(os.getpid(), birth)


def test_a_process_of_another_boot_or_container_is_left_to_its_lease() -> None:
    assert not is_gone(1, "another-boot/pid:[4026531836]/77")
    assert not is_gone(1, None)


def test_jobs_of_a_killed_worker_of_this_machine_are_requeued_at_the_next_start(
    store: Store, make_service: ServiceMaker
) -> None:
    pid, birth = ended_process()
    dead = new_worker(store, hostname=socket.gethostname(), pid=pid, pid_started=birth)
    alive = new_worker(store, hostname=socket.gethostname(), pid=os.getpid(), pid_started=process_birth(os.getpid()))
    elsewhere = new_worker(store, hostname="another", pid=pid, pid_started=birth)
    batch_id = new_batch(store, [completion(1, "q")])
    claim_all(store, dead)
    service = make_service()
    service.start()
    assert service.run_until_idle(batch_id).succeeded == 1
    assert {worker.worker_id for worker in store.live_workers()} == {alive, elsewhere, service.lease.worker_id}
    assert bury_local_dead(store) == 0


def test_a_cancelled_running_job_ends_soon_and_keeps_the_text_it_has(store: Store, make_service: ServiceMaker) -> None:
    job = completion(1, "once upon a time", body=LONG)
    batch_id = new_batch(store, [job])
    service = make_service()
    service.start()
    wait_until(lambda: (stats := service.inference.stats()) is not None and stats.running)
    store.cancel_batch(batch_id)
    service.run_until_idle(batch_id)
    row = store.job(job.job_id)
    assert row is not None
    assert row.state is JobState.CANCELLED
    assert row.error is not None
    assert row.error.code == "cancelled"
    assert 0 < row.metrics.completion_tokens < 16 * 1900
    assert row.text


def test_a_job_whose_deadline_passes_while_it_runs_expires_and_its_neighbours_go_on(
    store: Store, make_service: ServiceMaker
) -> None:
    service = make_service()
    service.start()
    assert service.wait_ready(60)
    late = completion(1, "once", body=LONG, deadline=datetime.now(UTC) + timedelta(seconds=1.5))
    never_run = completion(2, "twice", deadline=datetime.now(UTC) - timedelta(seconds=1))
    batch_id = new_batch(store, [late, never_run, completion(3, "thrice")])
    progress = service.run_until_idle(batch_id)
    assert (progress.expired, progress.succeeded) == (2, 1)
    row = store.job(late.job_id)
    assert row is not None
    assert row.error is not None
    assert row.error.code == "expired"


def test_a_worker_that_was_declared_dead_drops_its_jobs_and_goes_on_under_a_new_name(
    store: Store, make_service: ServiceMaker
) -> None:
    job = completion(1, "once upon a time", body={"max_tokens": 300, "ignore_eos": True})
    batch_id = new_batch(store, [job])
    service = make_service(heartbeat_s=0.2)
    service.start()
    wait_until(lambda: service.inference.num_jobs == 1)
    first = service.lease.worker_id
    store.bury_worker(first)
    store.reap(lease_s=60)
    assert service.run_until_idle(batch_id).succeeded == 1
    row = store.job(job.job_id)
    assert row is not None
    assert (row.attempts, row.crashes) == (2, 1)
    assert row.worker_id == service.lease.worker_id != first


def test_after_a_time_when_everybody_was_silent_neighbours_have_half_a_lease_to_be_heard(
    store: Store, make_service: ServiceMaker, sql: Sql
) -> None:
    neighbour, job = new_worker(store), completion(1, "q")
    new_batch(store, [job])
    claim_all(store, neighbour)
    clock, ticks = [0.0], [0]
    lease = Lease(
        store,
        make_service().inference,
        options=LeaseOptions(queue="kvq", model="tiny", lease_s=60.0),
        on_lost=lambda: None,
        on_tick=lambda: ticks.__setitem__(0, ticks[0] + 1),
        on_fault=pytest.fail,
        clock=lambda: clock[0],
    )

    def live_after(seconds: float) -> bool:
        clock[0] += seconds
        before = ticks[0]
        lease.check_now()
        wait_until(lambda: ticks[0] >= before + 2)
        return neighbour in {worker.worker_id for worker in store.live_workers()}

    lease.start()
    try:
        assert live_after(0)
        sql("UPDATE workers SET heartbeat_at = '2020-01-01 00:00:00.000' WHERE worker_id = :worker", worker=neighbour)
        assert live_after(100)  # this worker was silent as well: an outage, or a machine that slept
        assert live_after(20)
        assert not live_after(20)
    finally:
        lease.stop()
    row = store.job(job.job_id)
    assert row is not None
    assert (row.state, row.crashes) == (JobState.QUEUED, 1)


def stats(**changes: Any) -> EngineStats:
    values: dict[str, Any] = {
        "prompt_tokens": 0,
        "computed_prompt_tokens": 0,
        "cached_prompt_tokens": 0,
        "generated_tokens": 0,
        "preemptions": 0,
        "kv_usage": 0.0,
        "kv_usage_peak": 0.0,
        "steps": 0,
        "running": 0,
        "waiting": 0,
    }
    return EngineStats(**{**values, **changes})


def test_the_meter_turns_totals_into_rates_since_the_last_sample() -> None:
    now = [100.0]
    meter = Meter(lambda: now[0])
    assert meter.sample(stats(prompt_tokens=1000, steps=5)) is None
    now[0] += 10
    later = stats(
        prompt_tokens=3000,
        cached_prompt_tokens=500,
        generated_tokens=400,
        steps=25,
        running=3,
        waiting=2,
        kv_usage=0.25,
    )
    sample = meter.sample(later)
    assert sample is not None
    assert sample["prompt_tps"] == pytest.approx(200)
    assert sample["generation_tps"] == pytest.approx(40)
    assert sample["prefix_hit_rate"] == pytest.approx(0.25)
    assert describe(sample) == (
        "Avg prompt throughput: 200.0 tokens/s, Avg generation throughput: 40.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%, "
        "Swapped in/out: 0/0 blocks, Preemptions: 0"
    )


def test_an_idle_worker_has_nothing_to_report() -> None:
    meter = Meter()
    meter.sample(stats())
    assert meter.sample(stats()) is None


def test_the_last_sample_of_a_worker_shows_that_its_engine_holds_nothing_for_jobs_it_gave_back(
    store: Store, make_service: ServiceMaker
) -> None:
    new_batch(store, [completion(1, "once upon a time", body=LONG)])
    service = make_service()
    service.start()
    wait_until(lambda: (stats := service.inference.stats()) is not None and stats.running and stats.kv_usage > 0)
    service.drain(0)
    last = store.worker_samples(last_s=60)[-1]
    assert (last.worker_id, last.running, last.waiting, last.kv_usage) == (service.lease.worker_id, 0, 0, 0.0)
    assert store.check_blocks() == []
