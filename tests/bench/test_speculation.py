"""The measurement of guessing ahead runs, and says what it saw; whether it pays is for a quiet machine."""

from __future__ import annotations

import json
from pathlib import Path

from bench.speculation import Case, Run, run_all, table, verdicts, write

from tests.models import tiny_model


def test_every_mode_gives_the_same_answers_and_only_off_guesses_nothing(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "tiny"))
    runs = run_all([Case(workload="W2q", num_rows=2, max_num_seqs=2)], rounds=1, model=model, kv_cache_memory=64 << 20)
    assert [run.mode for run in runs] == ["off", "always", "gated"]
    assert all(run.same and run.output_tokens == runs[0].output_tokens for run in runs)
    assert runs[0].draft_tokens == 0


def test_the_runs_are_kept_and_tabled(tmp_path: Path) -> None:
    def run(mode: str, number: int, wall_s: float, **changes: int) -> Run:
        counts = {"output_tokens": 100, "steps": 50, "draft_tokens": 0, "accepted_tokens": 0, **changes}
        return Run(case="c", mode=mode, round=number, wall_s=wall_s, same=True, **counts)

    runs = [run("off", 0, 4.0), run("off", 1, 3.0)]
    runs += [run("always", n, 2.0, draft_tokens=40, accepted_tokens=10) for n in (0, 1)]
    (verdict,) = verdicts(runs)
    assert (verdict.speedups, verdict.speedup, verdict.acceptance) == ((2.0, 1.5), 1.75, 0.25)
    assert "| c | always | 1.750 (2.000, 1.500) | 25% | 0.40 | yes |" in table([verdict])
    write(runs, tmp_path / "out.json", model="tiny", draft_model=None)
    kept = json.loads((tmp_path / "out.json").read_text())
    assert (len(kept["runs"]), kept["verdicts"][0]["speedup"]) == (4, 1.75)
