"""The reuse that planning promises, counted with a tiny network: tokens do not depend on the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.plan import CASES, Case, Reuse, measure, table, write

from tests.models import tiny_model

FULL = [case for case in CASES if case.cache == "room for all"]
(SMALL,) = [case for case in CASES if case.cache == "small"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def run(case: Case, policy: str, model: str) -> Reuse:
    return measure(case, policy, model=model, kv_cache_memory=64 << 20)


@pytest.mark.parametrize("case", FULL, ids=lambda case: case.workload)
def test_with_room_for_all_next_to_nothing_is_computed_twice(case: Case, model: str) -> None:
    reuse = run(case, "prefix", model)
    assert reuse.distinct_prompt_tokens == {"W1q": 9_219, "W2q": 6_293}[case.workload]
    assert reuse.reuse_efficiency >= 0.98


def test_with_a_cache_of_three_documents_planning_keeps_the_reuse_and_arrival_order_loses_it(model: str) -> None:
    planned, arrival = run(SMALL, "prefix", model), run(SMALL, "fcfs", model)
    assert planned.cache_tokens == 3_008
    assert planned.reuse_efficiency >= 0.95
    assert arrival.reuse_efficiency < 0.5
    assert planned.preemptions == 0


def test_the_runs_are_kept_and_tabled(tmp_path: Path) -> None:
    reuse = Reuse(
        workload="W2q",
        policy="prefix",
        cache="small",
        cache_tokens=3_008,
        num_jobs=72,
        prompt_tokens=64_831,
        distinct_prompt_tokens=6_293,
        computed_prompt_tokens=6_400,
        output_tokens=2_304,
        steps=90,
        preemptions=0,
    )
    write([reuse], tmp_path / "results" / "plan.json", model="some/model")
    kept = json.loads((tmp_path / "results" / "plan.json").read_text(encoding="utf-8"))
    assert kept["model"] == "model"
    assert kept["runs"][0]["reuse_efficiency"] == 0.9833
    assert "| W2q | 3,008 tokens (small) | prefix | 64,831 | 6,293 | 6,400 | 0.983 |" in table([reuse])
