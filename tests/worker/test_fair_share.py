"""Fair share: who is served next, in tokens."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvq.worker.fair_share import FairShare, WaitingCost

QUANTUM = 100


def add(
    share: FairShare,
    flow: int,
    number: int,
    *,
    tenant: str = "default",
    tokens: int = 10,
    output: int = 10,
    group: int | None = None,
    priority: int = 0,
) -> str:
    """A job of ``flow`` that costs ``tokens`` + ``output``; those of one ``group`` share a prefix."""
    job_id = f"{flow}/{number}"
    first = 1_000 * flow + number if group is None else 1_000_000 + group
    cost = WaitingCost(flow=flow, tenant=tenant, num_prompt_tokens=tokens, max_tokens=output)
    share.add(job_id, [first] * 32 + [number], cost, priority=priority)
    return job_id


def serve(share: FairShare, job_id: str, *, tokens: int = 10, output: int = 10) -> int:
    """The job runs and takes what was expected; returns its flow."""
    share.settle(job_id, computed_tokens=tokens, output_tokens=output)
    return int(job_id.split("/")[0])


def flows_served(share: FairShare, k: int) -> list[int]:
    return [serve(share, job_id) for job_id in share.take(k)]


def test_flows_of_equal_weight_get_equal_shares() -> None:
    share = FairShare(quantum=QUANTUM)
    for flow in (1, 2, 3):
        for number in range(100):
            add(share, flow, number)
    served = Counter(flows_served(share, 90))
    assert all(abs(served[flow] - 30) <= QUANTUM // 20 for flow in (1, 2, 3)), served


def test_a_small_batch_behind_a_large_one_is_served_within_the_stated_bound() -> None:
    share = FairShare(quantum=QUANTUM)
    for number in range(3_000):
        add(share, 1, number, group=number // 50)
    flows_served(share, 500)
    for number in range(100):
        add(share, 2, number)
    served = flows_served(share, 2_500)
    last = max(place for place, flow in enumerate(served) if flow == 2)
    # n * (S + 2 * quantum + the largest job), in jobs of 20 tokens
    assert last < 2 * (100 * 20 + 2 * QUANTUM + 20) / 20, last
    assert served.count(2) == 100


def test_weights_of_tenants_divide_the_work_however_many_batches_each_has() -> None:
    share = FairShare(quantum=QUANTUM)
    for number in range(400):
        add(share, 1, number, tenant="heavy")
        for flow in (2, 3, 4):
            add(share, flow, number, tenant="light")
    served = Counter(serve(share, job_id) for job_id in share.take(400, weights={"heavy": 3.0}))
    assert abs(served[1] - 300) <= 20, served
    assert all(abs(served[flow] - 33) <= 10 for flow in (2, 3, 4)), served


def test_a_group_is_finished_before_the_next_flow_has_its_turn() -> None:
    share = FairShare(quantum=QUANTUM)
    for flow in (1, 2):
        for number in range(42):
            add(share, flow, number, group=10 * flow + number // 6)  # groups of 120 tokens, more than a quantum
    order = share.take(84)
    group_of = [(job_id.split("/")[0], int(job_id.split("/")[1]) // 6) for job_id in order]
    assert sum(a != b for a, b in pairwise(group_of)) == 13, group_of
    assert Counter(flow for flow, _ in group_of[:24]) == {"1": 12, "2": 12}


def test_what_was_begun_is_gone_on_with_unless_it_is_to_be_reconsidered() -> None:
    share = FairShare(quantum=1_000)
    for number in range(4):
        add(share, 1, number, group=1)
    begun = share.take(1)
    add(share, 1, 10, output=500)
    begun += share.take(1)
    share.reconsider()
    order = begun + share.take(3)
    assert order.index("1/10") == 2, order
    assert len(order) == 5


def test_jobs_of_two_flows_that_share_a_prefix_run_together_while_both_have_credit() -> None:
    share = FairShare(quantum=1_000)
    for number in range(4):
        add(share, 1, number, group=1)
        add(share, 2, number, group=1)
        add(share, 2, 10 + number, group=2)
    order = share.take(12)
    places = [place for place, job_id in enumerate(order) if int(job_id.split("/")[1]) < 10]
    assert max(places) - min(places) == 7, order


def test_what_a_job_really_took_is_what_its_flow_is_charged() -> None:
    share = FairShare(quantum=QUANTUM)
    for number in range(200):
        add(share, 1, number)
        add(share, 2, number)
    served: Counter[int] = Counter()
    for _ in range(120):
        (job_id,) = share.take(1)
        flow = int(job_id.split("/")[0])
        # Flow 1 reuses all of its prompts and stops early.
        served[serve(share, job_id, tokens=0 if flow == 1 else 10, output=5 if flow == 1 else 10)] += 1
    assert 3 <= served[1] / served[2] <= 5, served


def test_a_more_urgent_job_goes_first_whatever_its_flow_was_given() -> None:
    share = FairShare(quantum=QUANTUM)
    for number in range(20):
        add(share, 1, number)
        add(share, 2, number)
    flows_served(share, 7)
    urgent = [add(share, flow, 50 + flow, priority=-1) for flow in (1, 2)]
    assert sorted(share.take(2)) == urgent


def test_a_tenant_that_may_not_start_holds_up_nobody_else() -> None:
    share = FairShare(quantum=QUANTUM)
    for number in range(5):
        add(share, 1, number, tenant="broke")
        add(share, 2, number)
    taken = share.take(10, start=lambda _job, tenant, _tokens: tenant != "broke")
    assert {job_id.split("/")[0] for job_id in taken} == {"2"}
    assert len(taken) == 5
    assert len(share) == 5
    assert sorted(share.drop_tenants({"broke"})) == [f"1/{number}" for number in range(5)]
    assert share.take(10) == []


def test_a_flow_that_was_away_gets_no_more_than_its_share_when_it_comes_back() -> None:
    share = FairShare(quantum=QUANTUM)
    add(share, 2, 0)
    for number in range(400):
        add(share, 1, number)
    flows_served(share, 200)
    for number in range(1, 100):
        add(share, 2, number)
    served = Counter(flows_served(share, 40))
    assert abs(served[2] - 20) <= 2 * QUANTUM // 20, served


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(0, 60), st.integers(0, 5), st.integers(-1, 1)),
        max_size=80,
    ),
    sizes=st.lists(st.integers(1, 7)),
)
def test_every_job_is_handed_out_exactly_once(jobs: list[tuple[int, int, int, int, int]], sizes: list[int]) -> None:
    share = FairShare(quantum=QUANTUM)
    given_ids = [
        add(share, flow, number, tokens=tokens, output=output, group=group, priority=priority)
        for number, (flow, tokens, output, group, priority) in enumerate(jobs)
    ]
    taken: list[str] = []
    for k in [*sizes, len(jobs)]:
        for job_id in share.take(k):
            taken.append(job_id)
            serve(share, job_id, tokens=3, output=1)
    assert sorted(taken) == sorted(given_ids)
    assert len(share) == 0
