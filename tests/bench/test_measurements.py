"""Every measurement runs at toy size: what it prints then means nothing, that it ran does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.databases import sqlite_urls
from bench.queue_store import by_length, contend, fill_database
from bench.queue_worker import compare
from bench.scaling import planner_point

from kvq.worker.store import Store

_ROOT = Path(__file__).parent.parent.parent


def _run(*arguments: str, first_on_path: Path = _ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{first_on_path}:{_ROOT / 'src'}:{_ROOT}"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_strategies_table_has_its_shape(tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    text = _run("bench.strategies", "--toy", "--output", str(file))
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in result["strategies"]}
    assert list(rows)[:5] == ["recompute", "reserve", "static", "paged", "paged+prefix"]
    assert rows["recompute"]["kv_utilisation"] is None
    assert rows["reserve"]["kv_utilisation"] < rows["static"]["kv_utilisation"] < rows["paged"]["kv_utilisation"]
    alone, apart, shared = result["shared_prompt"]
    assert apart["computed_prompt_tokens"] == 8 * alone["computed_prompt_tokens"]
    assert shared["computed_prompt_tokens"] < apart["computed_prompt_tokens"] / 2
    assert shared["kv_tokens_peak"] < apart["kv_tokens_peak"] / 2
    assert "| paged+prefix |" in text
    assert result["limits"]["single_ms"] > 0
    assert "Limits measured in the same sitting: GEMM" in text


# Imports of these fail in the process that checks the GPU: the card's machine does not have them.
_BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            *("celery", "kombu", "redis", "sqlalchemy", "alembic", "psycopg"),
            "llguidance",
        }:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_the_gpu_check_runs_on_a_cpu_without_the_queues_packages(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    (tmp_path / "sitecustomize.py").write_text(_BLOCK, encoding="utf-8")
    chosen = ["kernels", "decode_attention", "grouped_prefix", "prefill_attention", "throughput_8b", "offline"]
    _run("bench.gpu_check", "--toy", "--only", *chosen, "--output", str(file), first_on_path=tmp_path)
    result = json.loads(file.read_text(encoding="utf-8"))
    assert {name: part["error"] for name, part in result["parts"].items() if "error" in part} == {}
    assert result["parts"].keys() == {"rates", "compiling", *chosen}
    assert result["parts"]["kernels"]["result"]["ok"]


def test_scaling_draws_what_it_measured(tmp_path: Path) -> None:
    text = _run("bench.scaling", "--toy", "--output", str(tmp_path))
    assert "| 4 |" in text
    assert "| floor, ms | of the floor |" in text
    for name in ("throughput-by-concurrency", "tpot-by-context", "planning-by-window", "planning-of-a-tree"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_a_part_of_scaling_runs_by_itself_and_joins_the_others(tmp_path: Path) -> None:
    _run("bench.scaling", "--toy", "--only", "window", "--output", str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"scaling-window.json", "scaling.md", "planning-by-window.png"}
    text = _run("bench.scaling", "--toy", "--only", "tree", "--output", str(tmp_path))
    assert "planning, the slowest window" in text
    assert "tree over 1,000 prompts" in text


@pytest.mark.parametrize("num_groups", [1, 10, 200])
def test_planning_hands_out_every_prompt(num_groups: int) -> None:
    point = planner_point(200, 60, num_groups=num_groups)
    assert point["prompts"] == 200
    assert point["ms_per_100_jobs"] > 0


def test_every_queued_row_is_taken_out_once() -> None:
    with sqlite_urls() as urls:
        url = next(urls)
        fill_database(url, 300)
        assert contend(url, 300, processes=2)["taken"] == 300


def test_a_queue_keeps_the_length_it_is_measured_at() -> None:
    with sqlite_urls() as urls:
        url = next(urls)
        points = by_length(url, (1, 70), seconds=0.01)
        with Store.open(url) as store:
            assert store.num_queued("bench", at_most=1000) == 70
    assert [point["rows"] for point in points] == [1, 70]


def test_rounds_are_added_to_those_of_the_same_jobs() -> None:
    run = {"wall_s": 2.0, "output_tokens": 100}
    earlier = {"jobs": 3, "workloads": ["W3q"], "bare": [run], "worker": [{**run, "wall_s": 2.5}]}
    result = compare("unused", iter(()), "unused", rounds=0, workloads=("W3q",), max_rows=3, earlier=earlier)
    assert (len(result["bare"]), result["bare_output_tokens_per_s"], result["ratio"]) == (1, 50, 0.8)
    with pytest.raises(ValueError, match="other jobs"):
        compare("unused", iter(()), "unused", rounds=0, workloads=("W3q",), max_rows=2, earlier=earlier)


_COMPILE_TWICE = """
import pathlib, sys
import torch
from bench.gpu.ahead import compile_share
from kvq.kernels import ops
from kvq.kernels.launch import Launch

def norms():
    for width in (64, 128):
        ops.rms_norm(torch.zeros(3, width), torch.zeros(width), 1e-5)

def num_compiled():
    return len(list(pathlib.Path(sys.argv[1]).glob("*/*.cubin")))

print(compile_share((9, 0), 0, 2, norms) + compile_share((9, 0), 1, 2, norms), num_compiled())
Launch.run = lambda launch: launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
norms()
print(num_compiled())
"""


def test_what_is_compiled_ahead_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMPILE_TWICE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "2", "2"], done.stderr[-4000:]
