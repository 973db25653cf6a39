"""Scaling: how cost grows with the number of sequences, with context, and with the window that is planned over.

``python -m bench.scaling`` measures and writes ``scaling.json``, ``scaling.md`` and ``scaling.png`` into a folder; the
cost of a long queue is ``bench.queue_bench``'s and is drawn beside these when its file is there. The planner's largest
window runs in a process of its own, since its peak memory is part of the result.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import peers
from bench.machine import Machine, load_average
from bench.process_tree import peak_rss_bytes
from bench.shapes import TINY, random_prompts
from kvq.engine.planner import PrefixPlanner
from kvq.engine.threads import prefer_short_spins

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8000)
WINDOWS = (100, 1000, 4096, 10_000, 100_000)
_WINDOW_PROMPT_TOKENS = 300
TREE_PROMPTS, TREE_TOKENS = 100_000, 1000
PARTS = ("planner", "engine")


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


def planner_points(windows: tuple[int, ...], tree: tuple[int, int]) -> dict[str, Any]:
    points = [
        _best_planner_point(size, _WINDOW_PROMPT_TOKENS, num_groups=groups)
        for size in windows
        for groups in (max(1, size // 50), size)
    ]
    return {"windows": points, "tree": [_in_own_process(*tree, num_groups=groups) for groups in (1, 1000, tree[0])]}


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


def engine_points(
    settings: dict[str, Any], vocab: int, concurrencies: tuple[int, ...], contexts: tuple[int, ...]
) -> dict[str, Any]:
    """Throughput against concurrency, and time per token against context."""
    from kvq.engine.config import EngineConfig
    from kvq.engine.engine import Engine

    prompt_tokens, output_tokens, alone_tokens = 64, 32, 24
    by_concurrency = []
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
        by_concurrency.append(
            {
                "concurrency": number,
                "output_tokens_per_s": number * output_tokens / wall_s,
                "decode_step_ms": 1e3 * decode_s,
                "peak_rss_bytes": peak_rss_bytes(),
            }
        )
    engine = Engine.load(EngineConfig(**settings, max_num_seqs=1, max_model_len=contexts[-1] + alone_tokens + 1))
    _generate(engine, random_prompts([8], vocab=vocab), 2)
    by_context = []
    for context in contexts:
        _, step_s = _generate(engine, random_prompts([context], vocab=vocab, seed=context), alone_tokens)
        decodes = sorted(step_s[-(alone_tokens - 1) :])
        by_context.append({"context": context, "tpot_ms": 1e3 * decodes[len(decodes) // 2]})
    return {"by_concurrency": by_concurrency, "by_context": by_context}


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


def markdown(result: dict[str, Any]) -> str:
    """The figures, for people."""
    lines: list[str] = []
    if "planner" in result:
        lines += ["| waiting prompts | tokens each | groups | add, s | take, s | ms per 100 jobs | peak memory, GB |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for point in result["planner"]["windows"] + result["planner"]["tree"]:
            memory = f"{point['peak_rss_bytes'] / 1e9:.2f}" if point in result["planner"]["tree"] else ""
            lines.append(
                f"| {point['prompts']:,} | {point['prompt_tokens']:,} | {point['groups']:,} | {point['add_s']:.2f} | "
                f"{point['take_s']:.2f} | {point['ms_per_100_jobs']:.2f} | {memory} |"
            )
    if "engine" in result:
        lines += ["", "| sequences at a time | output tokens/s | decode step, ms |", "|---|---|---|"]
        for point in result["engine"]["by_concurrency"]:
            lines.append(
                f"| {point['concurrency']} | {point['output_tokens_per_s']:.0f} | {point['decode_step_ms']:.1f} |"
            )
        lines += ["", "| context | ms a token, alone |", "|---|---|"]
        lines += [f"| {point['context']:,} | {point['tpot_ms']:.1f} |" for point in result["engine"]["by_context"]]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], queue: dict[str, Any] | None, path: Path) -> None:
    """A panel for each kind of growth that was measured."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, str, str, list[tuple[str, list[float], list[float]]]]] = []
    if "engine" in result:
        points = result["engine"]["by_concurrency"]
        x = [point["concurrency"] for point in points]
        rates = [point["output_tokens_per_s"] for point in points]
        panels.append(("throughput against concurrency", "sequences at a time", "output tokens/s", [("", x, rates)]))
        points = result["engine"]["by_context"]
        series = [("", [point["context"] for point in points], [point["tpot_ms"] for point in points])]
        panels.append(("time per token against context", "tokens before", "ms a token", series))
    if "planner" in result:
        by_kind: dict[str, list[dict[str, float]]] = {}
        for point in result["planner"]["windows"]:
            kind = "all different" if point["groups"] == point["prompts"] else "50 share a prefix"
            by_kind.setdefault(kind, []).append(point)
        series = [
            (kind, [point["prompts"] for point in points], [point["ms_per_100_jobs"] for point in points])
            for kind, points in by_kind.items()
        ]
        panels.append(("planning against window", "waiting prompts", "ms per 100 jobs", series))
    for title, unit, key in (("submit", "rows/s", "submit_rows_per_s"), ("claim and finish", "rows/s", "rows_per_s")):
        if queue is not None:
            series = [
                (name, [p["rows"] for p in points if key in p], [p[key] for p in points if key in p])
                for name, points in queue["databases"].items()
            ]
            panels.append((f"{title} against queue length", "queued rows", unit, series))
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, x_name, y_name, series) in zip(axes, panels, strict=True):
        for label, x, y in series:
            ax.plot(x, y, marker="o", label=label or None)
        ax.set(title=title, xlabel=x_name, ylabel=y_name, xscale="log")
        ax.set_ylim(0, 1.1 * max(value for _, _, y in series for value in y))
        places = sorted({value for _, x, _ in series for value in x})
        ax.set_xticks(places, [_short(value) for value in places], fontsize=7)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        if any(label for label, _, _ in series):
            ax.legend(frameon=False)
    figure.savefig(path, dpi=130)


def _short(number: float) -> str:
    """1000 -> 1k, 1000000 -> 1M."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:g}{unit}" if number % (size // 10) == 0 else f"{number / size:.1f}{unit}"
    return f"{number:g}"


def write(result: dict[str, Any], folder: Path) -> str:
    """Write the files; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = markdown(result)
    (folder / "scaling.md").write_text(text, encoding="utf-8")
    queue_file = folder / "queue.json"
    queue = json.loads(queue_file.read_text(encoding="utf-8")) if queue_file.exists() else None
    plot(result, queue, folder / "scaling.png")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
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
    result: dict[str, Any] = {
        "kind": "scaling",
        "machine": asdict(Machine.this()),
        "load_average": load_average(),
    }
    if "planner" in arguments.parts:
        windows, tree = ((100, 500), (1000, 100)) if toy else (WINDOWS, (TREE_PROMPTS, TREE_TOKENS))
        result["planner"] = planner_points(windows, tree)
    if "engine" in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            model, vocab = peers.KVQ.model("float32") if not toy else TINY.write(Path(folder)), 512 if toy else 49_152
            settings = {"model": str(model), "device": "cpu", "dtype": "float32"}
            settings |= {"load_format": "dummy"} if toy else {}
            result["engine"] = engine_points(
                settings, vocab, (1, 4) if toy else CONCURRENCIES, (32, 64) if toy else CONTEXTS
            )
    print(write(result, arguments.output))


if __name__ == "__main__":
    main()
