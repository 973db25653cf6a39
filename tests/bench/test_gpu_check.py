"""The GPU check keeps what was measured, whatever becomes of a part."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.gpu.engine_rates import _waiting_share
from bench.gpu_check import Part, Report, _last_words, goals, run


def _points() -> Iterator[dict[str, int]]:
    yield {"batch": 1}
    raise RuntimeError("out of something")


def test_a_part_that_fails_keeps_its_points_and_the_next_part_runs(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    parts = [
        Part(name="fails", expected_s=1, call=_points),
        Part(name="runs", expected_s=1, call=lambda: {"ok": True}),
        Part(name="is too long", expected_s=1000, call=lambda: None),
    ]
    assert run(parts, report, deadline=time.time() + 60, recover=lambda: True)
    kept = json.loads(report.path.read_text(encoding="utf-8"))["parts"]
    assert kept["fails"]["result"] == [{"batch": 1}]
    assert "RuntimeError: out of something" in kept["fails"]["error"]
    assert kept["runs"]["result"] == {"ok": True}
    assert "s left" in report.parts["is too long"]["skipped"]


def test_a_new_process_goes_on_behind_the_part_that_ended_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    report = Report(path)

    def crash() -> None:
        raise KeyboardInterrupt

    parts = [Part(name="crashes", expected_s=1, call=crash), Part(name="runs", expected_s=1, call=lambda: 5)]
    with pytest.raises(KeyboardInterrupt):
        run(parts, report, deadline=time.time() + 60, recover=lambda: True)
    again = Report(path)
    assert _last_words(again, 1)
    assert run(parts, again, deadline=time.time() + 60, recover=lambda: True)
    assert "ended with code 1" in again.parts["crashes"]["error"]
    assert again.parts["runs"]["result"] == 5
    assert not _last_words(again, 0)


def test_no_part_is_run_on_a_card_that_answers_no_more(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    parts = [Part(name=name, expected_s=1, call=lambda: 5) for name in ("first", "second")]
    assert not run(parts, report, deadline=time.time() + 60, recover=lambda: False)
    assert list(report.parts) == ["first"]


def test_only_long_gaps_count_as_waiting() -> None:
    assert _waiting_share([(0, 10), (12, 20), (15, 18), (40, 100)]) == pytest.approx(0.2)
    assert _waiting_share([(0, 10), (11, 20)]) == 0


def test_goals_are_judged_by_what_was_measured_before_a_part_failed() -> None:
    points = [{"batch": 32, "of_copy": 0.9}, {"batch": 64, "of_copy": 0.7}, {"batch": 1, "of_copy": 0.1}]
    found = goals({"decode_attention": {"result": points, "error": "..."}, "rates": {"error": "..."}})
    assert [(verdict["measured"], verdict["met"]) for verdict in found.values()] == [(0.7, False)]
