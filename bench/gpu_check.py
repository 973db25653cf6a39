"""GPU check: everything that needs a card, in one command of under six minutes.

``PYTHONPATH=src:. python -m bench.gpu_check`` on the card; with ``--toy`` every part runs at small sizes, on a CPU too,
to see that it works. Needs torch, triton, transformers and numpy; neither Celery, Redis nor SQLAlchemy.
Parts run in order of importance, in a process of their own. The JSON is written after every point, so that nothing
measured is lost; a part that fails, or takes far too long, is kept with its traceback, and where it took the process or
the card's context with it, a new process goes on with the next. Goals that can be judged are printed at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvq.engine.threads import prefer_short_spins

_TIME_LIMIT_S = 345.0
_NAMES = (
    "rates",
    "compiling",
    "kernels",
    "against_transformers",
    "decode_attention",
    "grouped_prefix",
    "prefill_attention",
    "throughput_8b",
    "beside_transformers",
    "offline",
    "throughput_1b",
    "tiles",
    "strategies_7b",
)
_CONTEXT_LOST = 3  # exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``call`` gives a result, or points one after the other; ``expected_s`` is what it should take on an H200."""

    name: str
    expected_s: float
    call: Callable[[], Any]


class Report:
    """The JSON file: what was measured so far, and which part is running."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"kind": "gpu_check", "parts": {}, "log": []}
        if path.exists():
            self.content = json.loads(path.read_text(encoding="utf-8"))

    @property
    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content["parts"]
        return found

    def write(self) -> None:
        self.path.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")


def parts(device: Any, folder: Path, report: Report) -> list[Part]:
    """All parts; ``rates`` must be run first, the others need what it leaves in the report."""
    from bench.gpu import ahead, attention_rates, engine_rates, kernel_check, rates, tile_sweep

    is_compiled = not device.is_gpu or "compiling" in report.parts
    compiled = dict if is_compiled else ahead.start(device)

    def known() -> rates.Rates:
        return rates.Rates(**report.parts["rates"]["result"])

    calls: dict[str, tuple[float, Callable[[], Any]]] = {
        "rates": (5, lambda: asdict(rates.measure(device))),
        "compiling": (45, compiled),
        "kernels": (25, lambda: kernel_check.check(device)),
        "against_transformers": (30, lambda: engine_rates.against_transformers(device, folder)),
        "decode_attention": (15, lambda: attention_rates.decode(device, known())),
        "grouped_prefix": (15, lambda: attention_rates.grouped(device)),
        "prefill_attention": (10, lambda: attention_rates.prefill(device, known())),
        "throughput_8b": (45, lambda: engine_rates.throughput(device, folder, known(), "llama-8b")),
        "beside_transformers": (30, lambda: engine_rates.beside_transformers(device, folder)),
        "offline": (30, lambda: engine_rates.offline(device, folder)),
        "throughput_1b": (20, lambda: engine_rates.throughput(device, folder, known(), "llama-1b")),
        "tiles": (10, lambda: tile_sweep.sweep(device, known())),
        "strategies_7b": (50, lambda: _strategies(device, folder)),
    }
    return [Part(name=name, expected_s=calls[name][0], call=calls[name][1]) for name in _NAMES]


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


def run(chosen: list[Part], report: Report, *, deadline: float, recover: Callable[[], bool]) -> bool:
    """Run those parts that the report does not hold yet; False where a part left the card unusable.

    A part that takes three times what it should ends the process, and says on stderr where it stood.
    """
    for part in chosen:
        if part.name in report.parts:
            continue
        left_s = deadline - time.time()
        if left_s < part.expected_s:
            report.parts[part.name] = {"skipped": f"{left_s:.0f} s left, about {part.expected_s:.0f} s needed"}
            print(f"{part.name}: skipped, {left_s:.0f} s left")
            continue
        found = report.parts[part.name] = {"running": True}
        report.write()
        faulthandler.dump_traceback_later(min(left_s + 5, 20 + 3 * part.expected_s), exit=True)
        begin = time.perf_counter()
        try:
            for result in _results(part.call()):
                found |= {"seconds": time.perf_counter() - begin, "result": result}
                report.write()
        except Exception:  # noqa: BLE001 (the card is lent for minutes: one part must not cost the others)
            found["error"] = traceback.format_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
        found |= {"seconds": time.perf_counter() - begin}
        del found["running"]
        report.write()
        print(f"{part.name}: {found['seconds']:.1f} s\n{_shown(found)}", flush=True)
        if not recover():
            return False
    return True


def _results(value: Any) -> Iterator[Any]:
    """What is known after each point, where there are points."""
    if not isinstance(value, Iterator):
        yield value
        return
    points: list[Any] = []
    for point in value:
        points.append(point)
        yield points


def goals(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was wanted and what was measured; what did not run is left out."""

    def points(name: str) -> Any:
        return results.get(name, {}).get("result") or []

    found: dict[str, dict[str, Any]] = {}

    def judge(goal: str, measured: float | bool | None, wanted: float | bool, *, at_most: bool = False) -> None:
        if measured is not None:
            met = measured <= wanted if at_most else measured >= wanted
            found[goal] = {"measured": measured, "wanted": wanted, "met": bool(met)}

    if kernels := points("kernels"):
        judge("every kernel agrees with its reference", kernels["ok"], wanted=True)
    if judged := points("against_transformers"):
        judge("greedy answers are transformers'", judged["ok"], wanted=True)
    large = [point["of_copy"] for point in points("decode_attention") if point["batch"] >= 32]
    judge("decode attention, share of copy bandwidth from 32 sequences on (least)", min(large, default=None), 0.8)
    for point in points("grouped_prefix"):
        if (point["prefix"], point["group"]) == (4096, 64):
            judge("grouped prefix against plain, prefix 4,096, 64 sequences", point["speedup"], 4.0)
    shares = [point["of_matmul"] for point in points("prefill_attention")]
    judge("prefill attention, share of matmul rate (best)", max(shares, default=None), 0.55)
    for point in points("throughput_8b"):
        if point["sequences"] == 64:
            judge("decode step of 64 sequences, 8B shape, share of bandwidth floor", point.get("of_floor"), 0.7)
            judge("GPU waits in decode steps, 8B shape, 64 sequences", point.get("host_gap"), 0.03, at_most=True)
    if beside := points("beside_transformers"):
        judge("times as fast as generate_batch", beside["times_generate_batch"], 1.5)
    return found


def _shown(part: dict[str, Any]) -> str:
    """A part for people: a list of points as lines, a failure as its traceback."""
    value, lines = part.get("result"), []
    if isinstance(value, list):
        lines = ["  " + "  ".join(f"{k} {_number(v)}" for k, v in point.items()) for point in value]
    elif isinstance(value, dict) and "cases" in value:
        lines = [f"  {value['num_cases']} cases, failed: {value['failed'] or 'none'}"]
    elif value is not None:
        lines = ["  " + json.dumps(value)]
    return "\n".join([*lines, part["error"]] if "error" in part else lines)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Log(logging.Handler):
    """Keeps what the engine says of itself (captured graphs, fused layers, memory) with the figures."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.INFO)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.content["log"].append(f"{record.levelname} {record.getMessage()}")
        print(record.getMessage(), flush=True)


def _run_parts(arguments: argparse.Namespace) -> int:
    """In the process that uses the card."""
    prefer_short_spins()
    from bench.gpu.device import Device

    report = Report(arguments.output)
    logging.getLogger("kvq").setLevel(logging.INFO)
    logging.getLogger("kvq").addHandler(_Log(report))
    device = Device.choose(toy=arguments.toy)
    if device.toy and not arguments.toy:
        raise SystemExit("there is no GPU here; --toy runs every part at small sizes on a CPU")
    report.content |= {"toy": device.toy, "device": device.describe()}
    print(json.dumps(report.content["device"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = [part for part in parts(device, Path(folder), report) if _is_wanted(part.name, arguments.only)]
        is_usable = run(wanted, report, deadline=arguments.deadline, recover=device.recover)
    report.write()
    return 0 if is_usable else _CONTEXT_LOST


def _is_wanted(name: str, only: list[str] | None) -> bool:
    return only is None or name in (*only, "rates", "compiling")


def _last_words(report: Report, code: int) -> bool:
    """Whether a part ended the process; the report then says so."""
    for part in report.parts.values():
        if part.pop("running", False):
            part["error"] = f"the process ended with code {code} in it; stderr says where it stood"
            return True
    return code == _CONTEXT_LOST


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="small sizes, on a CPU too")
    parser.add_argument("--only", nargs="+", choices=_NAMES, metavar="PART", help=f"of {' '.join(_NAMES)}")
    parser.add_argument("--limit-s", type=float, default=_TIME_LIMIT_S)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu_check.json")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.deadline is not None:
        raise SystemExit(_run_parts(arguments))
    begin = time.time()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu_check", *sys.argv[1:], "--deadline", str(begin + arguments.limit_s)]
    while True:
        code = subprocess.run(command, check=False).returncode
        report = Report(arguments.output)
        goes_on = _last_words(report, code)
        report.content |= {"seconds": time.time() - begin, "goals": goals(report.parts)}
        report.write()
        if not goes_on:
            break
    if report.content.get("toy"):
        print("toy sizes: that every part runs is the result, its figures say nothing about the goals")
    for goal, verdict in report.content["goals"].items():
        mark = "met" if verdict["met"] else "MISSED"
        print(f"{mark}: {goal}: {_number(verdict['measured'])} (wanted {_number(verdict['wanted'])})")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
