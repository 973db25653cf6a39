"""A short soak: whatever is killed, each job ends once, with the answer it would have had in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.soak import LEGS, soak
from tests.system.soak_plan import Plan


@pytest.mark.parametrize("leg", list(LEGS))
def test_whatever_is_killed_each_job_ends_once_with_the_answer_of_a_calm_run(leg: str, tmp_path: Path) -> None:
    # Each kind of trouble once, in some ten seconds.
    plan = Plan(minutes=0.1, kills=5, jobs=400, num_bodies=50, settle_s=240)
    (report,) = soak(plan, tmp_path, (leg,)).values()
    assert report.broken == [], report
    assert report.answers_compared_with_a_calm_run == plan.jobs
    assert all(report.audit.values())
    assert report.disturbances["worker killed"] >= plan.kills
    assert report.dead_letters_dropped == 1
    assert report.dead_letters_retried >= 1
    assert report.killed_by_poison_jobs >= 1  # of three crashes; the killer of all others may have been first twice
