"""Engines side by side: the same files, alternating, in one sitting on one machine.

``python -m bench.compare``. Owns the order of the runs: a round is every workload by every engine in turn, after a
measurement of the machine's limits; rounds repeat, so that a slow minute of the machine hits all alike. Every run
is a record in the output folder, and the report is made from those files alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench import peers, report
from bench.engines.protocol import JobResult
from bench.limits import Floor, Limits, ModelCost
from bench.machine import num_cores
from bench.run import ENGINES, RunFailed, RunRequest, run, summary
from bench.workload import NAMES, Workload

DEFAULT_ENGINES = ("kvq", "vllm", "openvino+group")
# What shows why the order of jobs matters, and what int8 weights bring; run once, in the first round.
SPECIAL_CASES = ("openvino/W1q", "kvq@3008/W2q", "vllm@3008/W2q", "kvq:int8/W1q", "kvq:int8/W2q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the table."""

    request: RunRequest
    name: str  # as given, also the file's name

    @classmethod
    def parse(cls, text: str) -> Case:
        """``ENGINE[:DTYPE][+group][@KV_TOKENS]/WORKLOAD``."""
        engine, _, workload = text.partition("/")
        engine, _, tokens = engine.partition("@")
        engine, _, group = engine.partition("+")
        engine, _, dtype = engine.partition(":")
        if engine not in ENGINES or group not in ("", "group") or not workload:
            raise SystemExit(f"{text}: write ENGINE[:DTYPE][+group][@KV_TOKENS]; engines are {', '.join(ENGINES)}")
        request = RunRequest(
            engine=engine,
            workload=workload,
            dtype=dtype or "float32",
            grouped=bool(group),
            kv_cache_tokens=int(tokens) if tokens else None,
        )
        return cls(request=request, name=text)

    def file(self, folder: Path, round_no: int) -> Path:
        name = self.name.replace("/", "-").replace(":", "-").replace("@", "-")
        return folder / f"{name}-{round_no}.json"


def compare(
    engines: Sequence[str],
    workloads: Sequence[str],
    *,
    special_cases: Sequence[str],
    rounds: int,
    budget_s: float,
    folder: Path,
    max_rows: int | None = None,
) -> None:
    """Run all cases; another round is begun only where it is expected to end within ``budget_s``."""
    cases = [Case.parse(f"{engine}/{workload}") for workload in workloads for engine in engines]
    special = [Case.parse(text) for text in special_cases]
    begin = time.monotonic()
    for round_no in range(1, rounds + 1):
        round_begin = time.monotonic()
        limits = Limits.measure(num_threads=num_cores())
        limits.write(folder / f"limits-{round_no}.json")
        for case in cases:
            _run_case(case, round_no, folder, max_rows)
        round_s = time.monotonic() - round_begin
        if round_no == 1:
            for case in special:
                _run_case(case, round_no, folder, max_rows)
        if time.monotonic() - begin + round_s > budget_s:
            print(f"no time for a round more: {round_no} of {rounds} done")
            break


def _run_case(case: Case, round_no: int, folder: Path, max_rows: int | None) -> None:
    try:
        record, results = run(replace(case.request, max_rows=max_rows))
    except RunFailed as err:
        print(f"{case.name}: failed\n{err}")
        return
    record.write(case.file(folder, round_no))
    print(f"[{round_no}] {summary(record)}", flush=True)
    floor_file = folder / f"floor-{case.request.workload}.json"
    if case.request.engine == "kvq" and not floor_file.exists():
        _floor(record.workload, case.request, results, max_rows).write(floor_file)


def _floor(name: str, request: RunRequest, results: Sequence[JobResult], max_rows: int | None) -> Floor:
    """Counted with the lengths that these answers had."""
    from kvq.engine.config import EngineConfig
    from kvq.engine.tokenizer import Tokenizer

    model = peers.KVQ.model(request.dtype)
    tokenizer = Tokenizer.load(EngineConfig(model=str(model)))
    prompts = [
        tokenizer.apply_chat_template(job.messages) for job in Workload.load(request.workload, max_rows=max_rows).jobs
    ]
    outputs = [[len(ids) for ids in result.token_ids or []] for result in results]
    cost = ModelCost.of_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
    return Floor.count(name, cost, prompts, outputs)


def new_folder(results: Path) -> Path:
    """Of today, and of no other run: records of two machines in one folder would be one report's medians."""
    today = datetime.now(UTC).date().isoformat()
    names = itertools.chain((today,), (f"{today}-{number}" for number in itertools.count(2)))
    return next(folder for name in names if not (folder := results / name).exists())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=DEFAULT_ENGINES, metavar="ENGINE[:DTYPE][+group][@KV_TOKENS]")
    parser.add_argument("--workloads", nargs="+", default=NAMES)
    parser.add_argument("--special", nargs="*", default=SPECIAL_CASES, metavar="ENGINE.../WORKLOAD", help="run once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-minutes", type=float, default=30.0, help="begin no round that would end later")
    parser.add_argument("--rows", type=int, help="only the first rows of each file (to try things out)")
    parser.add_argument("--output", type=Path, help="folder; default: a new one, bench/results/DATE")
    arguments = parser.parse_args()
    folder = arguments.output or new_folder(Path(__file__).parent / "results")
    try:
        compare(
            arguments.engines,
            arguments.workloads,
            special_cases=arguments.special,
            rounds=arguments.rounds,
            budget_s=arguments.budget_minutes * 60,
            folder=folder,
            max_rows=arguments.rows,
        )
    except peers.PeerMissing as err:
        raise SystemExit(str(err)) from err
    print(report.write(folder))


if __name__ == "__main__":
    main()
