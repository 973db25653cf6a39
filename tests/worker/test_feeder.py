"""The feeder on both databases, with a real tokenizer: what is claimed, in which order, in which company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvq.engine.engine import Engine
from kvq.worker.feeder import Feeder
from kvq.worker.feeder_options import FeederOptions
from kvq.worker.inference import Inference, Prepared
from kvq.worker.jobs import ClaimedJob, Endpoint, JobMetrics, JobOutcome, JobState
from kvq.worker.store import Store
from tests.factories import claim_all, new_batch, new_job, new_worker, outcome_of
from tests.waiting import wait_until


def completion(number: int, prompt: str, **changes: Any) -> Any:
    return new_job(number, endpoint=Endpoint.COMPLETIONS, body={"prompt": prompt, "max_tokens": 4}, **changes)


class Sink:
    """Where claimed jobs go instead of an engine; ``run`` lets them count as running there."""

    def __init__(self, store: Store, inference: Inference, **options: Any) -> None:
        self.jobs: list[ClaimedJob] = []
        self.refused: list[JobOutcome] = []
        self.lease_lost = 0
        self.firm = True
        self.more_is_coming = False
        self.worker_id = new_worker(store)
        self.feeder = Feeder(
            store,
            inference,
            identity=lambda: self.worker_id,
            deliver=self._deliver,
            refuse=self.refused.append,
            may_admit=lambda: self.firm,
            more_is_coming=lambda: self.more_is_coming,
            on_lease_lost=self._lose,
            on_fault=self._fail,
            options=FeederOptions(queue="kvq", poll_s=0.05, **options),
        )
        self.faults: list[Exception] = []

    def _deliver(self, job: ClaimedJob, _prepared: Prepared) -> None:
        self.jobs.append(job)

    def _lose(self) -> None:
        self.lease_lost += 1

    def _fail(self, fault: Exception) -> None:
        self.faults.append(fault)

    @property
    def custom_ids(self) -> list[str]:
        return [job.custom_id for job in self.jobs]


@pytest.fixture
def inference(engine: Engine) -> Iterator[Inference]:
    made = Inference(lambda: engine, on_outcome=lambda _: None, on_change=lambda: None)
    made.start()
    assert made.wait_ready(30)
    yield made
    made.stop()


@pytest.fixture
def make_sink(store: Store, inference: Inference) -> Iterator[Callable[..., Sink]]:
    sinks: list[Sink] = []

    def make(**options: Any) -> Sink:
        sinks.append(Sink(store, inference, **options))
        return sinks[-1]

    yield make
    for made in sinks:
        made.feeder.stop_admission()
        assert not made.faults


@pytest.fixture
def sink(make_sink: Callable[..., Sink]) -> Sink:
    return make_sink()


def test_jobs_that_share_a_prefix_are_claimed_next_to_each_other(store: Store, make_sink: Callable[..., Sink]) -> None:
    topics = ["the sea " * 40, "the sun " * 40, "the moon " * 40]
    new_batch(store, [completion(i, topics[i % 3] + f"question {i}", custom_id=f"{i % 3}") for i in range(12)])
    sink = make_sink(claim_ahead=12)
    sink.feeder.start()
    wait_until(lambda: len(sink.jobs) == 12)
    sink.feeder.stop_admission()
    changes = sum(a != b for a, b in zip(sink.custom_ids, sink.custom_ids[1:], strict=False))
    assert changes == 2, sink.custom_ids


def test_while_more_is_coming_rows_are_read_and_few_are_claimed(store: Store, sink: Sink) -> None:
    sink.more_is_coming = True
    sink.feeder.start()
    new_batch(store, [completion(i, f"question {i}") for i in range(12)])
    wait_until(lambda: len(sink.jobs) == 4 and sink.feeder.num_window == 8)
    with pytest.raises(AssertionError):
        wait_until(lambda: len(sink.jobs) > 4, timeout_s=0.5)
    sink.more_is_coming = False
    wait_until(lambda: len(sink.jobs) == 12)


def test_when_all_that_came_is_known_the_longest_answers_go_before_the_rest_of_what_was_begun(
    store: Store, sink: Sink
) -> None:
    sink.more_is_coming = True
    sink.feeder.start()
    topic = "a topic that many ask about " * 20
    store.insert_jobs([completion(i, topic + f"{i}") for i in range(8)])
    wait_until(lambda: len(sink.jobs) == 4 and sink.feeder.num_window == 4)
    long_answer = {"prompt": "tell a long story", "max_tokens": 60}
    store.insert_jobs([new_job(9, endpoint=Endpoint.COMPLETIONS, body=long_answer, custom_id="long")])
    wait_until(lambda: sink.feeder.num_window == 5)
    sink.more_is_coming = False
    wait_until(lambda: len(sink.jobs) == 9)
    assert sink.custom_ids[4] == "long", sink.custom_ids


def test_only_as_many_jobs_are_claimed_as_may_wait_for_admission(store: Store, make_sink: Callable[..., Sink]) -> None:
    new_batch(store, [completion(i, f"question {i}") for i in range(20)])
    sink = make_sink(claim_ahead=3)
    sink.feeder.start()
    wait_until(lambda: len(sink.jobs) == 3)
    sink.feeder.ended(sink.jobs[0].seq)
    wait_until(lambda: len(sink.jobs) == 4)
    sink.feeder.stop_admission()
    assert len(sink.jobs) == 4
    assert sink.feeder.num_claimed == 3
    assert len(store.peek("kvq", limit=100)) == 16


def test_smaller_priorities_are_claimed_first(store: Store, sink: Sink) -> None:
    new_batch(store, [completion(i, f"question {i}", priority=9 - i, custom_id=f"p{9 - i}") for i in range(5)])
    sink.feeder.start()
    wait_until(lambda: len(sink.jobs) == 5)
    assert sink.custom_ids == ["p5", "p6", "p7", "p8", "p9"]


def test_a_more_urgent_job_gets_ahead_of_a_full_window(store: Store, make_sink: Callable[..., Sink]) -> None:
    new_batch(store, [completion(i, f"question {i}") for i in range(30)])
    sink = make_sink(claim_ahead=1, window=8)
    sink.feeder.start()
    wait_until(lambda: len(sink.jobs) == 1 and sink.feeder.num_window == 8)
    new_batch(store, [completion(99, "urgent", priority=-1, custom_id="urgent")])
    sink.feeder.ring()
    wait_until(lambda: sink.feeder.num_window == 9)
    sink.feeder.ended(sink.jobs[0].seq)
    wait_until(lambda: len(sink.jobs) == 2)
    sink.feeder.stop_admission()
    assert sink.custom_ids[1] == "urgent"


def test_a_row_that_cannot_be_run_is_claimed_and_fails_while_its_neighbours_go_on(store: Store, sink: Sink) -> None:
    jobs = [
        completion(1, "fine"),
        new_job(2, endpoint=Endpoint.COMPLETIONS, body={"prompt": "x", "max_tokens": "many"}),
        completion(3, "word " * 5000),
        completion(4, "fine too"),
    ]
    new_batch(store, jobs)
    sink.feeder.start()
    wait_until(lambda: len(sink.jobs) == 2 and len(sink.refused) == 2)
    assert sorted(sink.custom_ids) == ["row-1", "row-4"]
    errors = {outcome.job_id: outcome.error for outcome in sink.refused}
    assert errors[jobs[1].job_id].code == "invalid_type"
    too_long = errors[jobs[2].job_id]
    assert too_long.code == "context_length_exceeded"
    assert "2048" in too_long.message
    assert all(outcome.state is JobState.FAILED and outcome.attempt == 1 for outcome in sink.refused)
    wait_until(lambda: sink.feeder.num_claimed == 2)


def test_rows_that_another_worker_took_leave_the_window(store: Store, sink: Sink) -> None:
    new_batch(store, [completion(i, f"question {i}") for i in range(5)])
    sink.firm = False
    sink.feeder.start()
    other = new_worker(store)
    taken = claim_all(store, other)
    sink.firm = True
    new_batch(store, [completion(9, "question 9")])
    sink.feeder.ring()
    wait_until(lambda: sink.custom_ids == ["row-9"])
    assert len(taken) == 5
    wait_until(lambda: sink.feeder.num_window == 0)


def test_nothing_is_claimed_while_the_lease_is_in_doubt(store: Store, sink: Sink) -> None:
    sink.firm = False
    new_batch(store, [completion(1, "question")])
    sink.feeder.start()
    sink.feeder.ring()
    sink.feeder.stop_admission()
    assert sink.jobs == []


def test_nothing_is_claimed_after_admission_was_stopped(store: Store, sink: Sink) -> None:
    sink.feeder.start()
    sink.feeder.stop_admission()
    new_batch(store, [completion(1, "question")])
    sink.feeder.ring()
    assert len(store.peek("kvq", limit=10)) == 1


def test_a_lost_lease_is_reported_and_claims_under_a_new_one_go_on(store: Store, sink: Sink) -> None:
    store.bury_worker(sink.worker_id)
    new_batch(store, [completion(1, "question")])
    sink.feeder.start()
    wait_until(lambda: sink.lease_lost)
    sink.worker_id = new_worker(store)
    wait_until(lambda: len(sink.jobs) == 1)


def test_disowned_jobs_return_to_the_queue_and_are_claimed_again_uncharged(store: Store, sink: Sink) -> None:
    new_batch(store, [completion(1, "question")])
    sink.feeder.start()
    wait_until(lambda: len(sink.jobs) == 1)
    sink.feeder.disown([sink.jobs[0].seq])
    wait_until(lambda: len(sink.jobs) == 2)
    assert [job.attempt for job in sink.jobs] == [1, 1]


def crash(store: Store, times: int) -> None:
    """Everything that is queued is claimed by workers that die."""
    for _ in range(times):
        worker_id = new_worker(store)
        assert claim_all(store, worker_id)
        store.bury_worker(worker_id)
        store.reap(lease_s=60)


def finish(store: Store, sink: Sink, job: ClaimedJob) -> None:
    outcome = outcome_of(job)
    store.finish(sink.worker_id, [outcome])
    sink.feeder.ended(job.seq, outcome.metrics)


def test_suspects_wait_for_fresh_jobs_then_run_four_at_a_time(store: Store, sink: Sink) -> None:
    new_batch(store, [completion(i, f"suspect {i}", custom_id="suspect") for i in range(6)])
    crash(store, 1)
    new_batch(store, [completion(9, "fresh", custom_id="fresh", priority=5)])
    sink.feeder.start()
    wait_until(lambda: sink.custom_ids == ["fresh"])
    finish(store, sink, sink.jobs[0])
    wait_until(lambda: len(sink.jobs) == 5)
    finish(store, sink, sink.jobs[1])
    wait_until(lambda: len(sink.jobs) == 6)
    assert sink.feeder.num_claimed == 4


def test_second_offenders_run_alone(store: Store, sink: Sink) -> None:
    new_batch(store, [completion(i, f"suspect {i}") for i in range(3)])
    crash(store, 2)
    sink.feeder.start()
    for count in (1, 2, 3):
        wait_until(lambda count=count: len(sink.jobs) == count)  # type: ignore[misc]
        assert sink.feeder.num_claimed == 1
        assert sink.jobs[-1].crashes == 2
        finish(store, sink, sink.jobs[-1])


def test_suspects_in_a_queue_longer_than_the_window_run_once_their_patience_is_over(
    store: Store, make_sink: Callable[..., Sink]
) -> None:
    new_batch(store, [completion(1, "suspect", custom_id="suspect")])
    crash(store, 1)
    new_batch(store, [completion(i, f"fresh {i}", custom_id="fresh") for i in range(40)])
    sink = make_sink(window=8, claim_ahead=1, suspect_patience_s=0.0)
    sink.feeder.start()
    wait_until(lambda: len(sink.jobs) == 1)
    if sink.custom_ids == ["fresh"]:  # admitted before the suspect was read
        finish(store, sink, sink.jobs[0])
        wait_until(lambda: len(sink.jobs) == 2)
    assert sink.custom_ids[-1] == "suspect"


def test_a_small_batch_behind_a_long_one_is_served_beside_it(store: Store, make_sink: Callable[..., Sink]) -> None:
    new_batch(store, [completion(i, f"row {i}", custom_id="long") for i in range(150)])
    new_batch(store, [completion(i, f"other {i}", custom_id="short") for i in range(10)])
    sink = make_sink(window=64, claim_ahead=8, quantum=50)
    sink.feeder.start()
    done = 0
    while sink.custom_ids.count("short") < 10:
        wait_until(lambda done=done: len(sink.jobs) > done)  # type: ignore[misc]
        finish(store, sink, sink.jobs[done])
        done += 1
    # The bound of fair_share.py for two batches, 11 tokens a job by outcome_of; and those claimed ahead.
    assert len(sink.jobs) <= 2 * (10 * 11 + 2 * 50 + 11) / 11 + 8, len(sink.jobs)


def test_without_fair_share_batches_are_served_in_order_of_arrival(
    store: Store, make_sink: Callable[..., Sink]
) -> None:
    new_batch(store, [completion(i, f"row {i}", custom_id="first") for i in range(20)])
    new_batch(store, [completion(i, f"row {i}", custom_id="second") for i in range(20)])
    sink = make_sink(window=8, claim_ahead=1, fair_share=False)
    sink.feeder.start()
    for number in range(12):
        wait_until(lambda number=number: len(sink.jobs) > number)  # type: ignore[misc]
        finish(store, sink, sink.jobs[number])
    assert set(sink.custom_ids[:12]) == {"first"}


def test_a_tenant_over_its_budget_waits_while_others_go_on_and_goes_on_once_it_has_more(
    store: Store, make_sink: Callable[..., Sink]
) -> None:
    store.change_tenant("acme", tokens_per_day=30)
    new_batch(store, [completion(i, f"row {i}", custom_id="acme", tenant="acme") for i in range(10)])
    new_batch(store, [completion(i, f"row {i}", custom_id="other") for i in range(10)])
    sink = make_sink(claim_ahead=32)
    sink.feeder.start()
    wait_until(lambda: sink.custom_ids.count("other") == 10)
    cost = JobMetrics(prompt_tokens=3, computed_tokens=3, completion_tokens=4)  # no more than its prompt and max_tokens
    done = 0
    while (used := used_by(store, "acme")) < 30:
        wait_until(lambda done=done: sink.custom_ids.count("acme") > done)  # type: ignore[misc]
        jobs = [job for job in sink.jobs if job.custom_id == "acme"][done:]
        outcomes = [outcome_of(job, metrics=cost) for job in jobs]
        store.finish(sink.worker_id, outcomes)
        for outcome in outcomes:
            sink.feeder.ended(outcome.seq, outcome.metrics)
        sink.feeder.note_written(outcomes)
        done += len(jobs)
    assert used <= 30 + 7
    assert sink.custom_ids.count("acme") == done < 10
    (row,) = (row for row in store.tenants() if row.tenant == "acme")
    assert row.over_budget
    assert row.waiting
    store.change_tenant("acme", without_budget=True)
    wait_until(lambda: sink.custom_ids.count("acme") == 10)


def used_by(store: Store, tenant: str) -> int:
    return next(row.used_tokens for row in store.tenants() if row.tenant == tenant)
