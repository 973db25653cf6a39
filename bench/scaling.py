"""Scaling: how cost grows with the number of sequences, with context, and with the window that is planned over.

``python -m bench.scaling`` takes about five minutes on two quiet cores; ``--only`` measures some of the parts,
``--toy`` tries it out. Each part leaves ``scaling-PART.json`` in a folder; the table ``scaling.md`` and the plots are
made from all that lie there. Parts: ``concurrency`` (throughput), ``context`` (time per token), ``window`` (planning)
and ``tree`` (planning and memory of one very large window, each in a process of its own). Cost against the length of
the queue, and memory against rows, are the parts ``length`` and ``submit`` of ``bench.queue_bench``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import peers
from bench.goals import Goal, goals_table
from bench.limits import Limits, ModelCost
from bench.machine import Machine, load_average, num_cores
from bench.plots import draw, scaling_plots
from bench.process_tree import peak_rss_bytes
from bench.shapes import TINY, random_prompts
from kvq.engine.planner import PrefixPlanner
from kvq.engine.threads import prefer_short_spins

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8000)
WINDOWS = (100, 1000, 4096, 10_000, 100_000)
_WINDOW_PROMPT_TOKENS = 300
TREE_PROMPTS, TREE_TOKENS = 100_000, 1000
PARTS = ("concurrency", "context", "window", "tree")


# -- the planner ----------------------------------------------------------------------------------------------


def planner_point(num_prompts: int, num_tokens: int, *, num_groups: int) -> dict[str, float]:
    """Add ``num_prompts`` prompts of ``num_tokens`` tokens and take them out again, in admission order, 100 at a time.

    Two thirds of a prompt are its group's. Processor time; making the prompts is not counted.
    """
    source = random.Random(0)
    shared = num_tokens * 2 // 3
    planner = PrefixPlanner()
    add_s = 0.0
    for first in range(0, num_prompts, 100):  # looking at the clock costs more than adding a prompt
        prompts = {
            str(number): _tokens(random.Random(number * 7919 % num_groups), shared)
            + _tokens(source, num_tokens - shared)
            for number in range(first, min(first + 100, num_prompts))
        }
        begin = time.thread_time()
        for job_id, prompt in prompts.items():
            planner.add(job_id, prompt, max_tokens=32)
        add_s += time.thread_time() - begin
    begin = time.thread_time()
    while len(planner):
        planner.take(100)
    take_s = time.thread_time() - begin
    return {
        "prompts": num_prompts,
        "prompt_tokens": num_tokens,
        "groups": num_groups,
        "add_s": add_s,
        "take_s": take_s,
        "ms_per_100_jobs": (add_s + take_s) / num_prompts * 1e5,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _tokens(source: random.Random, number: int) -> list[int]:
    return [value % 49_152 for value in memoryview(source.randbytes(2 * number)).cast("H")]


def window_points(windows: tuple[int, ...]) -> list[dict[str, float]]:
    """Each window twice: 50 share a prefix, and all are different."""
    return [
        _best_planner_point(size, _WINDOW_PROMPT_TOKENS, num_groups=groups)
        for size in windows
        for groups in (max(1, size // 50), size)
    ]


def tree_points(num_prompts: int, num_tokens: int) -> list[dict[str, float]]:
    """All prompts of one group, of some, and all different."""
    groups = sorted({1, min(1000, num_prompts), num_prompts})
    return [_in_own_process(num_prompts, num_tokens, num_groups=number) for number in groups]


def _best_planner_point(num_prompts: int, num_tokens: int, *, num_groups: int) -> dict[str, float]:
    """The fastest of several for small windows, which a single interruption would spoil."""
    repeats = max(1, min(9, 20_000 // num_prompts))
    points = [planner_point(num_prompts, num_tokens, num_groups=num_groups) for _ in range(repeats)]
    return min(points, key=lambda point: point["ms_per_100_jobs"])


def _in_own_process(num_prompts: int, num_tokens: int, *, num_groups: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.scaling", "--planner-point", f"{num_prompts},{num_tokens},{num_groups}"]
    done = subprocess.run(command, cwd=peers.ROOT, capture_output=True, text=True, check=True)
    point: dict[str, float] = json.loads(done.stdout)
    return point


# -- the engine -----------------------------------------------------------------------------------------------


def concurrency_points(
    settings: dict[str, Any], vocab: int, concurrencies: tuple[int, ...], limits: Limits
) -> list[dict[str, float]]:
    """Throughput with so many sequences at a time, all begun together."""
    from kvq.engine.config import EngineConfig
    from kvq.engine.engine import Engine

    prompt_tokens, output_tokens = 64, 32
    config_file = Path(settings["model"]) / "config.json"
    cost = ModelCost.of_config(json.loads(config_file.read_text(encoding="utf-8")))
    points = []
    for number in concurrencies:
        config = EngineConfig(
            **settings,
            max_num_seqs=number,
            max_model_len=prompt_tokens + output_tokens,
            max_num_batched_tokens=max(512, number),
        )
        engine = Engine.load(config)
        _generate(engine, random_prompts([8], vocab=vocab), 2)
        prompts = random_prompts([prompt_tokens] * number, vocab=vocab, seed=number)
        wall_s, step_s = _generate(engine, prompts, output_tokens)
        decode_s = sorted(step_s)[len(step_s) // 2]  # most steps are pure decode steps
        points.append(
            {
                "concurrency": number,
                "output_tokens_per_s": number * output_tokens / wall_s,
                "decode_step_ms": 1e3 * decode_s,
                "floor_ms": 1e3 * cost.step_s(limits, num_sequences=number, context=prompt_tokens + output_tokens // 2),
                "gemm_gflop_per_s": limits.gemm_gflop_per_s,
                "read_gb_per_s": limits.read_gb_per_s,
                "peak_rss_bytes": peak_rss_bytes(),
            }
        )
    return points


def context_points(settings: dict[str, Any], vocab: int, contexts: tuple[int, ...]) -> list[dict[str, float]]:
    """Time per token of one sequence behind so many tokens."""
    from kvq.engine.config import EngineConfig
    from kvq.engine.engine import Engine

    output_tokens = 24
    engine = Engine.load(EngineConfig(**settings, max_num_seqs=1, max_model_len=contexts[-1] + output_tokens + 1))
    _generate(engine, random_prompts([8], vocab=vocab), 2)
    points = []
    for context in contexts:
        _, step_s = _generate(engine, random_prompts([context], vocab=vocab, seed=context), output_tokens)
        decodes = sorted(step_s[-(output_tokens - 1) :])
        points.append({"context": context, "tpot_ms": 1e3 * decodes[len(decodes) // 2]})
    return points


def _generate(engine: Any, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[float]]:
    """Wall seconds, and those of each step."""
    from kvq.engine.request import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    step_s = []
    while engine.has_unfinished_requests:
        step_begin = time.perf_counter()
        engine.step()
        step_s.append(time.perf_counter() - step_begin)
    return time.perf_counter() - begin, step_s


# -- the report -----------------------------------------------------------------------------------------------


def goals(result: dict[str, Any]) -> list[Goal]:
    """What was measured of the planner, against what is wanted of it; ``result``: the points by part."""
    found = []
    if "window" in result:
        slowest = max(result["window"], key=lambda point: point["ms_per_100_jobs"])
        found.append(
            Goal(
                what=f"planning, the slowest window ({slowest['prompts']:,} prompts)",
                value=slowest["ms_per_100_jobs"],
                unit="ms per 100 jobs",
                at_most=1.0,
            )
        )
    if "tree" in result:
        trees = result["tree"]
        tree = f"tree over {trees[0]['prompts']:,} prompts of {trees[0]['prompt_tokens']:,} tokens"
        memory = max(point["peak_rss_bytes"] for point in trees)
        found += [
            Goal(what=tree, value=max(point["add_s"] + point["take_s"] for point in trees), unit="s", at_most=20),
            Goal(what=f"{tree}: memory", value=memory / 1e9, unit="GB", at_most=1.0),
        ]
    return found


def markdown(result: dict[str, Any]) -> str:
    """The figures, for people."""
    found = goals(result)
    lines = [goals_table(found)] if found else []
    planned = [*result.get("window", ()), *result.get("tree", ())]
    if planned:
        lines += ["| waiting prompts | tokens each | groups | add, s | take, s | ms per 100 jobs | peak memory, GB |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for point in planned:
            memory = f"{point['peak_rss_bytes'] / 1e9:.2f}" if point in result.get("tree", ()) else ""
            lines.append(
                f"| {point['prompts']:,} | {point['prompt_tokens']:,} | {point['groups']:,} | {point['add_s']:.2f} | "
                f"{point['take_s']:.2f} | {point['ms_per_100_jobs']:.2f} | {memory} |"
            )
    if "concurrency" in result:
        first = result["concurrency"][0]
        lines += ["", f"Limits measured in the same sitting: GEMM {first['gemm_gflop_per_s']:.0f} GFLOP/s, read "]
        lines[-1] += (
            f"{first['read_gb_per_s']:.1f} GB/s; the floor of a step is the larger of its operations and bytes."
        )
        lines += ["", "| sequences at a time | output tokens/s | decode step, ms | floor, ms | of the floor |"]
        lines += ["|---|---|---|---|---|"]
        for point in result["concurrency"]:
            lines.append(
                f"| {point['concurrency']} | {point['output_tokens_per_s']:.0f} | {point['decode_step_ms']:.1f} | "
                f"{point['floor_ms']:.1f} | {point['floor_ms'] / point['decode_step_ms']:.0%} |"
            )
    if "context" in result:
        lines += ["", "| context | ms a token, alone |", "|---|---|"]
        lines += [f"| {point['context']:,} | {point['tpot_ms']:.1f} |" for point in result["context"]]
    return "\n".join(lines) + "\n"


def keep(part: str, points: list[dict[str, float]], folder: Path, *, load: float | None) -> None:
    """Write a part's file."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"kind": "scaling", "part": part, "machine": asdict(Machine.this()), "load_average": load}
    record |= {"goals": [goal.record() for goal in goals({part: points})], "points": points}
    (folder / f"scaling-{part}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def report(folder: Path) -> str:
    """Write the table and the plots of all parts in ``folder``; returns the Markdown."""
    files = [(part, folder / f"scaling-{part}.json") for part in PARTS]
    result = {part: json.loads(file.read_text(encoding="utf-8"))["points"] for part, file in files if file.exists()}
    text = markdown(result)
    (folder / "scaling.md").write_text(text, encoding="utf-8")
    draw(scaling_plots(result), folder)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--toy", action="store_true", help="small sizes on a tiny model, to try it out")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scaling", help="folder")
    parser.add_argument("--planner-point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.planner_point:
        prompts, tokens, groups = map(int, arguments.planner_point.split(","))
        print(json.dumps(planner_point(prompts, tokens, num_groups=groups)))
        return
    prefer_short_spins()
    toy = arguments.toy
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
        vocab = TINY.vocab if toy else 49_152
        if toy:
            settings |= {"model": str(TINY.write(Path(folder))), "load_format": "dummy"}
        elif {"concurrency", "context"} & set(arguments.only):
            settings["model"] = str(peers.KVQ.model("float32"))
        measure: dict[str, Callable[[], list[dict[str, float]]]] = {
            "concurrency": lambda: concurrency_points(
                settings,
                vocab,
                (1, 4) if toy else CONCURRENCIES,
                Limits.toy() if toy else Limits.measure(num_threads=num_cores()),
            ),
            "context": lambda: context_points(settings, vocab, (32, 64) if toy else CONTEXTS),
            "window": lambda: window_points((100, 500) if toy else WINDOWS),
            "tree": lambda: tree_points(*((1000, 100) if toy else (TREE_PROMPTS, TREE_TOKENS))),
        }
        for part in arguments.only:
            load = load_average()
            keep(part, measure[part](), arguments.output, load=load)
    print(report(arguments.output))


if __name__ == "__main__":
    main()
