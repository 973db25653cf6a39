"""Diagnosis: each sign is read as what it means, and a healthy worker is left alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from kvq.worker.diagnosis import Finding, Severity, diagnose
from kvq.worker.store_figures import QueueRow, WorkerSample
from kvq.worker.store_records import WorkerRow

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def sample(**changes: Any) -> WorkerSample:
    values: dict[str, Any] = {
        "worker_id": "w",
        "at": NOW,
        "age_s": 1.0,
        "prompt_tps": 100.0,
        "generation_tps": 500.0,
        "running": 16,
        "waiting": 0,
        "kv_usage": 0.6,
        "prefix_hit_rate": 0.5,
        "swapped_in": 0,
        "swapped_out": 0,
        "preemptions": 0,
        "steps": 100,
    }
    return WorkerSample(**(values | changes))


def queue(**changes: Any) -> QueueRow:
    values: dict[str, Any] = {
        "queue": "kvq",
        "queued": 5,
        "running": 0,
        "dead": 0,
        "oldest_age_s": 3.0,
        "paused": False,
        "num_workers": 1,
    }
    return QueueRow(**(values | changes))


def worker(heartbeat_age_s: float) -> WorkerRow:
    return WorkerRow(
        worker_id="w",
        hostname="host",
        pid=7,
        pid_started=None,
        model="m",
        queue="kvq",
        info={},
        state="live",
        started_at=NOW,
        heartbeat_at=NOW,
        heartbeat_age_s=heartbeat_age_s,
    )


def findings(*samples: WorkerSample) -> list[Finding]:
    return diagnose(samples, [], [], lease_s=60)


def codes(*samples: WorkerSample) -> list[str]:
    return [finding.code for finding in findings(*samples)]


def test_a_worker_that_does_well_is_left_alone() -> None:
    (only,) = findings(*[sample()] * 6)
    assert (only.severity, only.code) == (Severity.OK, "healthy")


def test_nothing_at_all_is_no_problem() -> None:
    assert codes() == ["idle"]


def test_usage_at_the_cap_and_flat_throughput_is_bound_by_memory() -> None:
    full = [sample(kv_usage=0.98, waiting=9, generation_tps=500 + i) for i in range(6)]
    (found,) = findings(*full)
    assert found.code == "memory_bound"
    assert "memory is the limit" in found.meaning
    assert found.advice is not None
    assert "gpu_memory_utilization" in found.advice


def test_usage_at_the_cap_with_growing_throughput_is_not() -> None:
    assert "memory_bound" not in codes(*[sample(kv_usage=0.98, generation_tps=100.0 * (i + 1)) for i in range(6)])


def test_growing_waiting_is_more_concurrency_than_the_budget_holds() -> None:
    (found,) = findings(*[sample(waiting=10 * i) for i in range(6)])
    assert found.code == "over_budget"
    assert found.advice is not None
    assert "max_num_seqs to about 16" in found.advice


def test_swapping_says_to_cut_concurrency_first_of_all() -> None:
    found = findings(*[sample(swapped_out=100, swapped_in=90, waiting=10 * i) for i in range(4)])
    assert [f.code for f in found] == ["swapping", "over_budget"]
    assert found[0].severity is Severity.PROBLEM
    assert found[0].advice is not None
    assert "max_num_seqs to about 12" in found[0].advice  # of 16


def test_preemption_again_and_again_is_named() -> None:
    assert codes(*[sample(preemptions=3)] * 4) == ["preempting"]


def test_waiting_beside_an_empty_cache_asks_for_more_concurrency() -> None:
    assert codes(*[sample(waiting=40, kv_usage=0.2)] * 4) == ["room_left"]


def test_prompts_that_share_nothing_are_pointed_to_the_plan() -> None:
    (found,) = findings(*[sample(prompt_tps=5000.0, prefix_hit_rate=0.01)] * 4)
    assert found.code == "little_sharing"
    assert found.advice is not None
    assert "kvq plan" in found.advice


def test_two_samples_are_a_moment_and_no_state() -> None:
    assert codes(*[sample(kv_usage=0.99, waiting=5)] * 2) == ["healthy"]


def test_a_queue_without_worker_is_a_problem_and_a_paused_one_a_warning() -> None:
    found = diagnose([], [queue(queue="a", paused=True), queue(queue="b", num_workers=0)], [], lease_s=60)
    assert [(f.code, f.subject) for f in found] == [("no_worker", "queue b"), ("queue_paused", "queue a")]


def test_dead_jobs_are_named() -> None:
    (found,) = diagnose([], [queue(queued=0, dead=2)], [], lease_s=60)
    assert found.code == "dead_jobs"


def test_a_worker_that_is_silent_for_half_its_lease_is_a_problem() -> None:
    assert [f.code for f in diagnose([], [], [worker(31)], lease_s=60)] == ["silent_worker"]
    assert [f.code for f in diagnose([], [], [worker(4)], lease_s=60)] == ["idle"]


def test_what_was_guessed_ahead_is_told_beside_good_health() -> None:
    samples = [sample(num_draft_tokens=200, num_accepted_tokens=150), sample(), sample()]
    found = {finding.code: finding for finding in diagnose(samples, [], [], lease_s=60)}
    assert set(found) == {"guessing", "healthy"}
    assert "200 tokens were guessed ahead, 75% of them rightly" in found["guessing"].meaning
