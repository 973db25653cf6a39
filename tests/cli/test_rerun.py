"""``kvq rerun``: the same answer again, or where it differs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Kvq


@pytest.fixture
def answered(kvq: Kvq, tmp_path: Path, tiny_model_folder: Path) -> dict[str, str]:
    """A batch that was run in a crowd; ids of its jobs by custom id."""
    rows = [{"prompt": f"tell me {i}", "max_tokens": 12, "temperature": 1.3, "n": 1 + i % 2} for i in range(8)]
    rows.append({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "temperature": 0})
    rows.append({"prompt": "x", "temperature": -1})
    rows.append({"prompt": "x", "temperature": 0, "max_tokens": 3, "logprobs": 1})
    lines = [json.dumps({"custom_id": f"c{i}", **row}) for i, row in enumerate(rows)]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines))
    assert kvq("run", "jobs.jsonl", "--model", tiny_model_folder, "--skip-invalid").code == 3
    shown = kvq("results", "latest", "--json").out.splitlines()
    return {row["custom_id"]: row["job_id"] for row in map(json.loads, shown)}


@contextmanager
def stored_choice(path: Path, job_id: str) -> Iterator[dict[str, Any]]:
    """The first choice of a stored answer, to be changed."""
    with closing(sqlite3.connect(path)) as db, db:
        seq, text = db.execute(
            "SELECT seq, response FROM results JOIN jobs USING (seq) WHERE job_id = ?", [job_id]
        ).fetchone()
        response = json.loads(text)
        yield response["choices"][0]
        db.execute("UPDATE results SET response = ? WHERE seq = ?", [json.dumps(response), seq])


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
    with stored_choice(tmp_path / "kvq.db", job_id) as choice:
        text = choice["text"]
        choice["text"] = text[:3] + "#" + text[4:]
    ran = kvq("rerun", job_id, "--model", tiny_model_folder, "--json")
    assert ran.code == 3
    (difference,) = json.loads(ran.out)["result"]["differences"]
    assert (difference["choice"], difference["position"]) == (0, 3)
    assert difference["before"].startswith("#")
    assert difference["after"] == text[3:43]
    assert "differs from character 3 on" in kvq("rerun", job_id, "--model", tiny_model_folder).out


def test_the_same_text_with_other_log_probabilities_is_another_answer(
    kvq: Kvq, answered: dict[str, str], tiny_model_folder: Path, tmp_path: Path
) -> None:
    job_id = answered["c10"]
    ran = kvq("rerun", job_id, "--model", tiny_model_folder)
    assert ran.out.splitlines()[1] == "log-probabilities: the same, to the bit"
    with stored_choice(tmp_path / "kvq.db", job_id) as choice:
        choice["logprobs"]["top_logprobs"][1] = {"a": -7.5, "b": -7.5}
    ran = kvq("rerun", job_id, "--model", tiny_model_folder)
    assert ran.code == 3
    assert ran.out.startswith("same text, other log-probabilities: 1 choice, 3 tokens")
    ran = kvq("rerun", job_id, "--model", tiny_model_folder, "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["verdict"], found["same"], found["result"]["differences"]) == (
        3,
        "other_logprobs",
        False,
        [],
    )
    assert found["result"]["logprob_difference"] > 0.01


def test_a_job_that_is_not_there_or_has_no_answer_is_refused(
    kvq: Kvq, answered: dict[str, str], tiny_model_folder: Path
) -> None:
    ran = kvq("rerun", "nobody", "--model", tiny_model_folder)
    assert (ran.code, "there is no job nobody" in ran.err) == (2, True)
    ran = kvq("rerun", answered["c9"], "--model", tiny_model_folder)
    assert (ran.code, "has no answer to compare with" in ran.err) == (2, True)


def test_vectors_are_called_vectors_and_dimensions(kvq: Kvq, tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text(json.dumps({"id": "e", "input": ["a", "b"]}))
    assert kvq("run", "e.jsonl", "--model", tiny_model_folder).code == 0
    job_id = json.loads(kvq("results", "latest", "--json").out)["job_id"]
    ran = kvq("rerun", job_id, "--model", tiny_model_folder)
    assert (ran.code, ran.out) == (0, "same: 2 vectors\nvectors: the same, to the bit\n")
    with closing(sqlite3.connect(tmp_path / "kvq.db")) as db, db:
        db.execute("UPDATE results SET response = json_set(response, '$.data[1].embedding[3]', 7.0)")
    ran = kvq("rerun", job_id, "--model", tiny_model_folder)
    assert ran.code == 3
    assert ran.out.startswith("choice 1 differs from dimension 3 on\n  was: '7.0'\n")
