"""A short soak: whatever is killed, each job ends once, with the answer it would have had in peace."""

from __future__ import annotations

from pathlib import Path

from tests.system.soak import Plan, Soak


def test_whatever_is_killed_each_job_ends_once_with_the_answer_of_a_calm_run(tmp_path: Path) -> None:
    plan = Plan(minutes=0.75, kills=10, jobs=600, num_bodies=100, settle_s=240)
    report = Soak(plan, tmp_path).run()
    assert report.broken == [], report
    assert report.jobs == plan.jobs
    assert report.answers_compared_with_a_calm_run == plan.jobs
    assert all(report.audit.values())
    assert report.disturbances["worker killed"] >= 3, report
    assert report.disturbances["worker frozen past its lease"] >= 1, report
    assert report.leases_lost >= 1, "the frozen worker must notice that others run its jobs"
