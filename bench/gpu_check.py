"""GPU check: everything that needs a card, in one command of under six minutes.

``PYTHONPATH=src:. python -m bench.gpu_check`` on the card; with ``--toy`` every part runs at small sizes, on a CPU too,
to see that it works. Needs torch, triton, transformers and numpy; neither Celery, Redis nor SQLAlchemy.
Parts run in order of importance, each within what is left of the time; the JSON is written after each, so that
nothing measured is lost. Goals that can be judged are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvq.engine.threads import prefer_short_spins

_TIME_LIMIT_S = 345.0
Part = tuple[str, float, Callable[[], Any]]  # name, seconds it is expected to take on an H200, what to run


def parts(device: Any, folder: Path) -> list[Part]:
    """All parts; ``rates`` must be run first, the others need its result."""
    from bench.gpu import attention_rates, engine_rates, kernel_check, rates

    measured: list[rates.Rates] = []

    def measure_rates() -> dict[str, float]:
        measured.append(rates.measure(device))
        return asdict(measured[0])

    return [
        ("rates", 5, measure_rates),
        ("kernels", 60, lambda: kernel_check.check(device)),
        ("against_transformers", 40, lambda: engine_rates.against_transformers(device, folder)),
        ("decode_attention", 15, lambda: attention_rates.decode(device, measured[0])),
        ("grouped_prefix", 15, lambda: attention_rates.grouped(device)),
        ("prefill_attention", 10, lambda: attention_rates.prefill(device, measured[0])),
        ("throughput_8b", 50, lambda: engine_rates.throughput(device, folder, measured[0], "llama-8b")),
        ("beside_transformers", 40, lambda: engine_rates.beside_transformers(device, folder)),
        ("offline", 40, lambda: engine_rates.offline(device, folder)),
        ("throughput_1b", 20, lambda: engine_rates.throughput(device, folder, measured[0], "llama-1b")),
        ("strategies_7b", 60, lambda: _strategies(device, folder)),
    ]


def _strategies(device: Any, folder: Path) -> Any:
    """The five strategies with 8 at a time and about 2K of context."""
    from bench.shapes import SHAPES, TINY
    from bench.strategies import TOY, USUAL
    from bench.strategy_runs import strategies

    shape = TINY if device.toy else SHAPES["llama-7b"]
    plan = TOY if device.toy else replace(USUAL, num_requests=16, shared_tokens=1600, output_tokens=(15, 200))
    settings = {
        "model": str(shape.write(folder)),
        "load_format": "dummy",
        "device": device.device.type,
        "dtype": device.dtype_name,
    }
    return [asdict(row) for row in strategies(settings, plan, shape.vocab)]


def run(chosen: list[Part], *, limit_s: float, result: dict[str, Any], output: Path, free: Callable[[], None]) -> None:
    """Run parts one after the other; a part that fails is kept with its traceback and the next begins."""
    begin = time.perf_counter()
    for name, expected_s, call in chosen:
        left_s = limit_s - (time.perf_counter() - begin)
        if left_s < expected_s:
            result["parts"][name] = {"skipped": f"{left_s:.0f} s left, about {expected_s:.0f} s needed"}
            print(f"{name}: skipped, {left_s:.0f} s left")
            continue
        part_begin = time.perf_counter()
        try:
            value = call()
        except Exception:  # noqa: BLE001 (the card is lent for minutes: one part must not cost the others)
            value = {"error": traceback.format_exc()}
        seconds = time.perf_counter() - part_begin
        result["parts"][name] = {"seconds": seconds, "result": value}
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"{name}: {seconds:.1f} s\n{_shown(value)}", flush=True)
        free()
    result["seconds"] = time.perf_counter() - begin
    result["goals"] = goals(result["parts"])
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def goals(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was wanted and what was measured; a part that did not run is left out."""

    def part(name: str) -> Any:
        value = results.get(name, {}).get("result")
        return None if isinstance(value, dict) and "error" in value else value

    found: dict[str, dict[str, Any]] = {}

    def judge(goal: str, measured: float | bool | None, wanted: float | bool, *, at_most: bool = False) -> None:
        if measured is not None:
            met = measured <= wanted if at_most else measured >= wanted
            found[goal] = {"measured": measured, "wanted": wanted, "met": bool(met)}

    if (kernels := part("kernels")) is not None:
        judge("every kernel agrees with its reference", kernels["ok"], wanted=True)
    if (judged := part("against_transformers")) is not None:
        judge("greedy answers are transformers'", judged["ok"], wanted=True)
    if decode := part("decode_attention"):
        large = [point["of_copy"] for point in decode if point["batch"] >= 32]
        judge("decode attention, share of copy bandwidth from 32 sequences on (least)", min(large, default=None), 0.8)
    for point in part("grouped_prefix") or []:
        if (point["prefix"], point["group"]) == (4096, 64):
            judge("grouped prefix against plain, prefix 4,096, 64 sequences", point["speedup"], 4.0)
    if prefill := part("prefill_attention"):
        judge("prefill attention, share of matmul rate (best)", max(point["of_matmul"] for point in prefill), 0.55)
    for point in part("throughput_8b") or []:
        if point["sequences"] == 64:
            judge("decode step of 64 sequences, 8B shape, share of bandwidth floor", point["of_floor"], 0.7)
            judge("GPU idle in decode steps, 8B shape, 64 sequences", point.get("host_gap"), 0.03, at_most=True)
    if beside := part("beside_transformers"):
        judge("times as fast as generate_batch", beside["times_generate_batch"], 1.5)
    return found


def _shown(value: Any) -> str:
    """A result for people: a list of points as lines, a failure as its traceback."""
    if isinstance(value, dict) and "error" in value:
        return str(value["error"])
    if isinstance(value, list):
        return "\n".join("  " + "  ".join(f"{k} {_number(v)}" for k, v in point.items()) for point in value)
    if isinstance(value, dict) and "cases" in value:
        return f"  {value['num_cases']} cases, failed: {value['failed'] or 'none'}"
    return "  " + json.dumps(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    names = "rates kernels against_transformers decode_attention grouped_prefix prefill_attention throughput_8b"
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="small sizes, on a CPU too")
    parser.add_argument("--parts", nargs="+", help=f"only these ({names} ...); rates is always run")
    parser.add_argument("--limit-s", type=float, default=_TIME_LIMIT_S)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu_check.json")
    arguments = parser.parse_args()
    prefer_short_spins()
    from bench.gpu.device import Device

    device = Device.choose(toy=arguments.toy)
    if device.toy and not arguments.toy:
        raise SystemExit("there is no GPU here; --toy runs every part at small sizes on a CPU")
    result: dict[str, Any] = {"kind": "gpu_check", "toy": device.toy, "device": device.describe(), "parts": {}}
    print(json.dumps(result["device"]))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = [
            part
            for part in parts(device, Path(folder))
            if arguments.parts is None or part[0] in (*arguments.parts, "rates")
        ]
        run(wanted, limit_s=arguments.limit_s, result=result, output=arguments.output, free=device.free)
    if device.toy:
        print("toy sizes: that every part runs is the result, its figures say nothing about the goals")
    for goal, verdict in result["goals"].items():
        mark = "met" if verdict["met"] else "MISSED"
        print(f"{mark}: {goal}: {_number(verdict['measured'])} (wanted {_number(verdict['wanted'])})")


if __name__ == "__main__":
    main()
