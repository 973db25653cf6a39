"""Records and reports: what a run leaves behind, and what is made of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from bench import report
from bench.compare import new_folder
from bench.engines.protocol import Job, JobResult, Sampling, Task
from bench.limits import Floor, Limits, ModelCost
from bench.machine import Machine
from bench.record import RunRecord, read_records
from bench.run import RunFailed, RunRequest, _check, parse_settings
from bench.workload import NAMES, Workload

_COST = ModelCost(layer_weights=1000, head_weights=100, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4)


def _record(
    engine: str, *, workload: str = "W1q", wall_s: float = 10.0, grouped: bool = False, dtype: str = "float32"
) -> RunRecord:
    return RunRecord(
        engine=engine,
        engine_version="1.0",
        dtype=dtype,
        grouped=grouped,
        kv_cache_tokens=None,
        settings={"threads": 2},
        num_threads=2,
        model="m",
        model_sha256="0" * 64,
        workload=workload,
        workload_sha256="1" * 64,
        num_jobs=2,
        num_samples=2,
        load_s=3.0,
        wall_s=wall_s,
        prompt_tokens=100,
        computed_prompt_tokens=60,
        output_tokens=50,
        peak_rss_bytes=10**9,
        greedy_outputs_sha256="a" * 64,
        started_at=f"2026-01-01T00:00:{int(wall_s):02}+00:00",
        load_average=0.1,
        command="python -m bench.run",
        machine=Machine.this(),
    )


def test_a_record_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    record = _record("kvq")
    record.write(tmp_path / "run.json")
    assert RunRecord.read(tmp_path / "run.json") == record
    content = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert content["output_tokens_per_s"] == 5.0
    assert content["total_tokens_per_s"] == 15.0
    assert content.keys() >= {"engine", "engine_version", "machine", "workload_sha256", "wall_s", "peak_rss_bytes"}


def test_files_of_other_kinds_are_not_taken_for_records(tmp_path: Path) -> None:
    limits = Limits(gemm_gflop_per_s=100, read_gb_per_s=20, copy_gb_per_s=18, num_threads=2, load_average=None)
    limits.write(tmp_path / "limits.json")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    assert read_records(tmp_path) == []
    assert Limits.read(tmp_path / "limits.json") == limits
    assert Floor.read(tmp_path / "limits.json") is None


def test_a_report_tells_medians_ratios_and_the_share_of_the_floor(tmp_path: Path) -> None:
    for place, wall_s in enumerate((9.0, 10.0, 40.0)):
        _record("kvq", wall_s=wall_s).write(tmp_path / f"kvq-{place}.json")
    _record("openvino", wall_s=25.0, grouped=True).write(tmp_path / "openvino.json")
    _record("kvq", wall_s=5.0, dtype="int8").write(tmp_path / "kvq-int8.json")
    limits = Limits(gemm_gflop_per_s=1e-6, read_gb_per_s=20, copy_gb_per_s=18, num_threads=2, load_average=None)
    limits.write(tmp_path / "limits.json")
    floor = Floor.count("W1q", _COST, [[1, 2, 3]], [[2]])
    floor.write(tmp_path / "floor.json")
    text = report.write(tmp_path)
    assert "| kvq, float32 | 10.0 (5) |" in text
    assert "| openvino, float32, grouped by hand | 2.50 |" in text
    assert "kvq with int8 weights is so many times faster than with float32: W1q 2.00." in text
    assert f"{floor.linear_ops / 1e3 / 10.0:.0%}" in text
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_the_floor_counts_shared_prefixes_once() -> None:
    floor = Floor.count("w", _COST, [[1, 2, 3, 4], [1, 2, 9], [7]], [[3], [1], [1, 1]])
    assert floor.distinct_prompt_tokens == 4 + 1 + 1
    assert floor.output_tokens == 6
    fed_back, sampled_rows = 2, 3 + 2  # the first job's second and third token; each prompt's last row and those two
    assert floor.linear_ops == 2 * (6 + fed_back) * _COST.layer_weights + 2 * sampled_rows * _COST.head_weights


def test_the_floor_of_a_step_is_the_larger_of_operations_and_bytes() -> None:
    slow = Limits(gemm_gflop_per_s=1e-6, read_gb_per_s=1e9, copy_gb_per_s=1, num_threads=2, load_average=None)
    operations = 3 * (2 * 1100 + _COST.attention_ops(10))
    assert _COST.step_s(slow, num_sequences=3, context=10) == pytest.approx(operations / 1e3)
    narrow = Limits(gemm_gflop_per_s=1e9, read_gb_per_s=1e-6, copy_gb_per_s=1, num_threads=2, load_average=None)
    num_bytes = 1100 * 4 + 3 * 10 * _COST.kv_bytes_per_token
    assert _COST.step_s(narrow, num_sequences=3, context=10) == pytest.approx(num_bytes / 1e3)


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_is_read_whole_and_grouping_keeps_all_jobs(name: str) -> None:
    workload = Workload.load(name)
    assert len(workload.jobs) == workload.num_rows_in_file > 10
    grouped = [job.custom_id for wave in workload.grouped() for job in wave]
    assert sorted(grouped) == sorted(job.custom_id for job in workload.jobs)


def test_grouping_by_hand_sends_one_job_of_each_prefix_ahead() -> None:
    leaders, rest = Workload.load("W2q").grouped()
    assert len({job.messages[0]["content"] for job in leaders}) == len(leaders) == 6
    assert len(rest) == 72 - 6


def test_a_task_crosses_into_the_engines_process_unchanged(tmp_path: Path) -> None:
    task = Task(
        waves=Workload.load("W4q", max_rows=2).as_submitted(),
        model="m",
        dtype="float32",
        num_threads=2,
        max_model_len=2048,
        kv_cache_tokens=None,
        settings={"block_size": 16},
    )
    task.write(tmp_path / "task.json")
    assert Task.read(tmp_path / "task.json") == task
    assert task.max_num_seqs == 16


def test_a_run_that_did_not_do_the_whole_work_leaves_no_record() -> None:
    job = Job(custom_id="a", messages=[], sampling=Sampling(max_tokens=4, ignore_eos=True))
    short = JobResult(custom_id="a", texts=["x"], prompt_tokens=3, output_tokens=3)
    with pytest.raises(RunFailed, match="3 tokens, but ignore_eos asks for 4"):
        _check([job], [short])
    with pytest.raises(RunFailed, match="1 jobs, but answers to 0"):
        _check([job], [])


def test_the_command_in_a_record_repeats_the_run() -> None:
    request = RunRequest(engine="vllm", workload="W2q", grouped=True, kv_cache_tokens=3008, settings={"a": 1})
    assert request.command == (
        "python -m bench.run --engine vllm --workload W2q --dtype float32 --kv-cache-tokens 3008 --group --set a=1"
    )
    request = RunRequest(engine="kvq", workload="W1q", max_rows=3, max_model_len=512, num_threads=99)
    assert request.command.endswith("--rows 3 --max-model-len 512 --threads 99")
    assert parse_settings(["a=1", "b=text", "c=true"]) == {"a": 1, "b": "text", "c": True}


def test_a_comparison_never_writes_among_the_records_of_another(tmp_path: Path) -> None:
    first = new_folder(tmp_path)
    first.mkdir()
    second = new_folder(tmp_path)
    second.mkdir()
    assert [second.name, new_folder(tmp_path).name] == [f"{first.name}-2", f"{first.name}-3"]


def test_the_machine_is_described_without_its_name() -> None:
    described = asdict(Machine.this())
    assert described["num_cores"] >= 1
    assert described["memory_bytes"] > 1 << 28
