"""The verdict on a leg of a soak: what ``kvq doctor --audit`` says, and what it cannot know: what was sent.

Changes nothing. Invariant: every sentence about jobs comes with the rows it is about.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from kvq.worker.audit import audit
from kvq.worker.config import Settings
from kvq.worker.store import Store
from tests.system.rows import query
from tests.system.soak_plan import Plan, Report, job_id
from tests.system.soak_poison import PREFIX

_SHOWN = 10


def judge(report: Report, plan: Plan, store: Store, settings: Settings, calm: Mapping[int, str | None]) -> None:
    """Write the verdict into ``report``."""
    suspects: list[str] = []

    def blame(sentence: str, ids: Iterable[str]) -> None:
        if found := sorted(ids):
            report.broken.append(f"{len(found)} {sentence}, such as {found[0]}")
            suspects.extend(found[:_SHOWN])

    for check in audit(store, settings):
        report.audit[check.invariant] = check.holds
        report.broken.extend(check.problems)
        if check.note:
            report.broken.append(check.note)
    if store.url.startswith("sqlite"):
        verdict = query(settings.db, "PRAGMA integrity_check")
        report.audit["SQLite finds its file in order"] = verdict == [("ok",)]
        report.broken.extend(str(row[0]) for row in verdict if row[0] != "ok")
    rows = query(
        settings.db,
        "SELECT j.custom_id, j.state, r.text FROM jobs j LEFT JOIN results r ON r.seq = j.seq"
        f" WHERE j.custom_id NOT LIKE '{PREFIX}%'",
    )
    report.jobs = len(rows)
    report.states = dict(Counter(row[1] for row in rows))
    report.answers_compared_with_a_calm_run = len(rows)
    found = Counter(row[0] for row in rows)
    wanted = {job_id(number): calm[number % plan.num_bodies] for number in range(plan.jobs)}
    blame("jobs were lost", wanted.keys() - found.keys())
    blame("jobs are nobody's", found.keys() - wanted.keys())
    blame("jobs have more than one row", (name for name, count in found.items() if count > 1))
    blame("jobs did not succeed", (row[0] for row in rows if row[1] != "succeeded"))
    blame("answers differ from a calm run's", (row[0] for row in rows if row[2] != wanted.get(row[0])))
    report.answers_computed = query(settings.db, "SELECT count(*) FROM results WHERE served_from IS NULL")[0][0]
    report.attempts_lost = query(settings.db, "SELECT count(*) FROM job_attempts WHERE outcome = 'lost'")[0][0]
    report.jobs_run_more_than_once = query(settings.db, "SELECT count(*) FROM jobs WHERE attempt > 1")[0][0]
    seqs = [seq for sentence in report.broken for seq in re.findall(r"\d+", sentence.partition(": jobs ")[2])]
    report.rows = [row for condition in _conditions(suspects, seqs) for row in _rows(settings.db, condition)]


def _conditions(suspects: list[str], seqs: list[str]) -> list[str]:
    quoted = ", ".join(f"'{name}'" for name in suspects)
    return [*([f"j.custom_id IN ({quoted})"] if suspects else []), *([f"j.seq IN ({', '.join(seqs)})"] if seqs else [])]


def _rows(url: str, condition: str) -> list[dict[str, object]]:
    names = ("seq", "custom_id", "state", "attempt", "crashes", "owner", "outcome", "by", "error", "text")
    rows = query(
        url,
        "SELECT j.seq, j.custom_id, j.state, j.attempt, j.crashes, j.owner, a.outcome, a.worker_id, r.error_message, "
        "r.text FROM jobs j LEFT JOIN results r ON r.seq = j.seq LEFT JOIN job_attempts a ON a.seq = j.seq "
        f"WHERE {condition} ORDER BY j.seq, a.id",
    )
    return [dict(zip(names, row, strict=True)) for row in rows]
