"""``kvq rerun``: the same answer again, or where it differs."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.cli.conftest import Kvq


@pytest.fixture
def answered(kvq: Kvq, tmp_path: Path, tiny_model_folder: Path) -> dict[str, str]:
    """A batch that was run in a crowd; ids of its jobs by custom id."""
    rows = [{"prompt": f"tell me {i}", "max_tokens": 12, "temperature": 1.3, "n": 1 + i % 2} for i in range(8)]
    rows.append({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "temperature": 0})
    rows.append({"prompt": "x", "temperature": -1})
    lines = [json.dumps({"custom_id": f"c{i}", **row}) for i, row in enumerate(rows)]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines))
    assert kvq("run", "jobs.jsonl", "--model", tiny_model_folder, "--skip-invalid").code == 3
    shown = kvq("results", "latest", "--json").out.splitlines()
    return {row["custom_id"]: row["job_id"] for row in map(json.loads, shown)}


def test_a_row_of_a_crowd_gives_the_same_answer_alone(
    kvq: Kvq, answered: dict[str, str], tiny_model_folder: Path
) -> None:
    for custom_id in ("c1", "c8"):
        ran = kvq("rerun", answered[custom_id], "--model", tiny_model_folder)
        assert ran.code == 0, ran.out + ran.err
        assert ran.out.startswith("same: ")


def test_another_answer_is_shown_from_where_it_differs(
    kvq: Kvq, answered: dict[str, str], tiny_model_folder: Path, tmp_path: Path
) -> None:
    job_id = answered["c0"]
    with sqlite3.connect(tmp_path / "kvq.db") as db:
        (response,) = db.execute(
            "SELECT response FROM results JOIN jobs USING (seq) WHERE job_id = ?", [job_id]
        ).fetchone()
        changed = json.loads(response)
        text = changed["choices"][0]["text"]
        changed["choices"][0]["text"] = text[:3] + "#" + text[4:]
        db.execute(
            "UPDATE results SET response = ? WHERE seq = (SELECT seq FROM jobs WHERE job_id = ?)",
            [json.dumps(changed), job_id],
        )
    db.close()
    ran = kvq("rerun", job_id, "--model", tiny_model_folder, "--json")
    assert ran.code == 3
    (difference,) = json.loads(ran.out)["result"]["differences"]
    assert (difference["choice"], difference["position"]) == (0, 3)
    assert difference["before"].startswith("#")
    assert difference["after"] == text[3:43]
    assert "differs from character 3 on" in kvq("rerun", job_id, "--model", tiny_model_folder).out


def test_a_job_that_is_not_there_or_has_no_answer_is_refused(
    kvq: Kvq, answered: dict[str, str], tiny_model_folder: Path
) -> None:
    ran = kvq("rerun", "nobody", "--model", tiny_model_folder)
    assert (ran.code, "there is no job nobody" in ran.err) == (2, True)
    ran = kvq("rerun", answered["c9"], "--model", tiny_model_folder)
    assert (ran.code, "has no answer to compare with" in ran.err) == (2, True)
