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
from bench.scaling import planner_point

from kvq.worker.store import Store

_ROOT = Path(__file__).parent.parent.parent


def _run(*arguments: str, prelude: str = "") -> str:
    start = "import runpy, sys\nrunpy.run_module(sys.argv[0], run_name='__main__')"
    code = f"{prelude}\nimport sys\nsys.argv = {list(arguments)!r}\n{start}"
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=environment, capture_output=True, text=True)
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


# Imports of these fail in the process that checks the GPU: the card's machine does not have them.
_BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"celery", "kombu", "redis", "sqlalchemy", "alembic", "psycopg"}:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_the_gpu_check_runs_on_a_cpu_without_the_queues_packages(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    chosen = ["kernels", "decode_attention", "grouped_prefix", "prefill_attention", "throughput_8b", "offline"]
    _run("bench.gpu_check", "--toy", "--parts", *chosen, "--output", str(file), prelude=_BLOCK)
    result = json.loads(file.read_text(encoding="utf-8"))
    errors = {name: part["result"]["error"] for name, part in result["parts"].items() if "error" in part["result"]}
    assert errors == {}
    assert result["parts"].keys() == {"rates", *chosen}
    assert result["parts"]["kernels"]["result"]["ok"]


def test_scaling_draws_what_it_measured(tmp_path: Path) -> None:
    text = _run("bench.scaling", "--toy", "--output", str(tmp_path))
    assert "| 4 |" in text
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
