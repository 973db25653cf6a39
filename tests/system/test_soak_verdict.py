"""The verdict of a soak finds what it is there to find, and shows the rows."""

from __future__ import annotations

from kvq.worker.config import Settings
from kvq.worker.store import Store
from tests.factories import claim_all, new_batch, new_worker, outcome_of
from tests.system.calm import job
from tests.system.soak_plan import Plan, Report, job_id
from tests.system.soak_verdict import judge


def test_a_lost_job_a_wrong_answer_and_an_orphan_are_found_and_their_rows_shown(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        new_batch(store, [job(job_id(number), number) for number in range(3)])
        worker_id = new_worker(store)
        right, wrong, orphan = claim_all(store, worker_id)
        store.finish(worker_id, [outcome_of(right, text="calm"), outcome_of(wrong, text="something else")])
        store.bury_worker(worker_id)
        report = Report()
        calm = dict.fromkeys(range(4), "calm")
        plan = Plan(minutes=0, kills=0, jobs=4, num_bodies=4)
        judge(report, plan, store, Settings(db=sqlite_url), calm)
    assert report.broken == [
        f"running without a live owner: jobs {orphan.seq}",
        "1 jobs were lost, such as soak-3",
        "1 jobs did not succeed, such as soak-2",
        "2 answers differ from a calm run's, such as soak-1",
    ]
    assert {row["custom_id"] for row in report.rows} == {"soak-1", "soak-2"}
    assert not all(report.audit.values())
