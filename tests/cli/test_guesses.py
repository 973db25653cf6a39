"""Tokens guessed ahead are counted from the engine to the summary, to SQL, and to what doctor says."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import Kvq


def test_what_was_guessed_is_shown_stored_and_changes_no_answer(
    kvq: Kvq, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": f"r{i}", "prompt": "a b a b a b a b" + str(i), "max_tokens": 40, "temperature": 0} for i in range(4)]
    Path("jobs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = ("--model", tiny_model_folder, "--kv-cache-memory", "32MiB", "--device", "cpu")
    monkeypatch.setenv("KVQ_SPECULATIVE_METHOD", "none")
    plain = kvq("run", "jobs.jsonl", "--output", "plain.jsonl", "--db", "plain.db", *settings)
    assert plain.code == 0, plain.err
    assert "guessed ahead" not in plain.out
    monkeypatch.setenv("KVQ_SPECULATIVE_METHOD", "ngram")
    monkeypatch.setenv("KVQ_SPECULATIVE_ALWAYS", "true")
    guessed = kvq("run", "jobs.jsonl", "--output", "guessed.jsonl", *settings)
    assert guessed.code == 0, guessed.err
    (line,) = [line for line in guessed.out.splitlines() if "guessed ahead" in line]
    assert "of them rightly" in line
    with closing(sqlite3.connect("kvq.db")) as db:
        ((drafts, accepted),) = db.execute("SELECT sum(num_draft_tokens), sum(num_accepted_tokens) FROM results")
        ((sampled,),) = db.execute("SELECT sum(num_draft_tokens) FROM worker_stats")
    assert 0 <= accepted <= drafts
    assert drafts > 0
    assert f"{drafts:,}" in line
    if sampled:  # a run shorter than its first sample has none
        assert "were guessed ahead" in kvq("doctor").out
    texts = [
        {
            row["custom_id"]: row["response"]["body"]["choices"]
            for row in map(json.loads, Path(name).read_text(encoding="utf-8").splitlines())
        }
        for name in ("plain.jsonl", "guessed.jsonl")
    ]
    assert texts[0] == texts[1]
