"""One run: an engine, a workload, a JSON record.

``python -m bench.run --engine kvq --workload W1q``. The engine runs in a process of its own, in its
own virtual environment; this one only measures. Invariant: a record is written only for a run in which every job was
answered in full.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import peers
from bench.engines.protocol import Job, JobResult, Outcome, Task
from bench.machine import Machine, load_average, num_cores
from bench.process_tree import PeakMemory
from bench.record import RunRecord
from bench.workload import Workload

ENGINES = ("kvq", "vllm", "openvino", "llamacpp", "transformers")
DEFAULT_MAX_MODEL_LEN = 2048


class RunFailed(Exception):
    """The engine's process failed, or it did not do the whole work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run."""

    engine: str
    workload: str
    dtype: str = "float32"
    kv_cache_tokens: int | None = None
    grouped: bool = False
    max_rows: int | None = None
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    num_threads: int = field(default_factory=num_cores)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        parts = [f"python -m bench.run --engine {self.engine} --workload {self.workload} --dtype {self.dtype}"]
        if self.kv_cache_tokens is not None:
            parts.append(f"--kv-cache-tokens {self.kv_cache_tokens}")
        if self.grouped:
            parts.append("--group")
        if self.max_rows is not None:
            parts.append(f"--rows {self.max_rows}")
        if self.max_model_len != DEFAULT_MAX_MODEL_LEN:
            parts.append(f"--max-model-len {self.max_model_len}")
        if self.num_threads != num_cores():
            parts.append(f"--threads {self.num_threads}")
        parts += [f"--set {name}={json.dumps(value)}" for name, value in self.settings.items()]
        return " ".join(parts)


def run(request: RunRequest) -> tuple[RunRecord, list[JobResult]]:
    """Run it and measure.

    Raises:
        PeerMissing: the engine or its model is not installed.
        RunFailed: the engine failed or left jobs unanswered.
    """
    workload = Workload.load(request.workload, max_rows=request.max_rows)
    peer = peers.KVQ if request.engine == "kvq" else peers.PEERS[request.engine]
    if request.engine != "kvq":
        peer.require()
    python = sys.executable if request.engine == "kvq" else str(peer.python)
    model = peer.model(request.dtype)
    task = Task(
        waves=workload.grouped() if request.grouped else workload.as_submitted(),
        model=str(model),
        dtype=request.dtype,
        num_threads=request.num_threads,
        max_model_len=request.max_model_len,
        kv_cache_tokens=request.kv_cache_tokens,
        settings=request.settings,
    )
    started_at, load = datetime.now(UTC).isoformat(timespec="seconds"), load_average()
    environment = peer.environment(num_threads=request.num_threads)
    outcome, peak_rss_bytes = _run_process(python, request.engine, task, environment)
    _check(workload.jobs, outcome.results)
    record = RunRecord(
        engine=request.engine,
        engine_version=outcome.engine_version,
        dtype=request.dtype,
        grouped=request.grouped,
        kv_cache_tokens=request.kv_cache_tokens,
        settings=outcome.settings,
        num_threads=request.num_threads,
        model=model.name,
        model_sha256=peers.model_sha256(model),
        workload=workload.name if request.max_rows is None else f"{workload.name}[:{request.max_rows}]",
        workload_sha256=workload.sha256,
        num_jobs=len(workload.jobs),
        num_samples=sum(job.sampling.n for job in workload.jobs),
        load_s=outcome.load_s,
        wall_s=outcome.wall_s,
        prompt_tokens=sum(result.prompt_tokens for result in outcome.results),
        computed_prompt_tokens=outcome.computed_prompt_tokens,
        output_tokens=sum(result.output_tokens for result in outcome.results),
        peak_rss_bytes=peak_rss_bytes,
        greedy_outputs_sha256=_greedy_digest(workload.jobs, outcome.results),
        started_at=started_at,
        load_average=load,
        command=request.command,
        machine=Machine.this(),
        details=outcome.details,
    )
    return record, outcome.results


def _run_process(python: str, engine: str, task: Task, environment: dict[str, str]) -> tuple[Outcome, int]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task.write(folder / "task.json")
        command = [python, "-m", f"bench.engines.{engine}", str(folder / "task.json"), str(folder / "outcome.json")]
        with (folder / "log").open("w+b") as log:
            process = subprocess.Popen(
                command, cwd=peers.ROOT, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
            )
            memory = PeakMemory(process.pid)
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            finally:
                peak = memory.stop()
            if code or not (folder / "outcome.json").exists():
                log.seek(0)
                tail = log.read().decode(errors="replace")[-6000:]
                raise RunFailed(f"{engine} ended with exit code {code}:\n{tail}")
        return Outcome.read(folder / "outcome.json"), peak


def _check(jobs: Sequence[Job], results: Sequence[JobResult]) -> None:
    """Every job answered once, with all its samples, and in full where the length is fixed."""
    by_id = {result.custom_id: result for result in results}
    if len(by_id) != len(results) or by_id.keys() != {job.custom_id for job in jobs}:
        raise RunFailed(f"{len(jobs)} jobs, but answers to {len(by_id)} of them in {len(results)} results")
    for job in jobs:
        result, sampling = by_id[job.custom_id], job.sampling
        most = sampling.n * sampling.max_tokens
        if len(result.texts) != sampling.n or not 0 < result.output_tokens <= most:
            raise RunFailed(f"{job.custom_id}: {len(result.texts)} samples of {result.output_tokens} tokens in all")
        if sampling.ignore_eos and result.output_tokens != most:
            raise RunFailed(f"{job.custom_id}: {result.output_tokens} tokens, but ignore_eos asks for {most}")


def _greedy_digest(jobs: Sequence[Job], results: Sequence[JobResult]) -> str | None:
    """Equal for engines that gave the same tokens; an end-of-sequence token at the end does not count."""
    by_id = {result.custom_id: result for result in results}
    greedy = [by_id[job.custom_id] for job in jobs if job.sampling.temperature == 0]
    if not greedy or any(result.token_ids is None for result in greedy):
        return None
    texts = [[result.custom_id, result.texts] for result in greedy]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def parse_settings(pairs: Sequence[str], *, option: str = "--set") -> dict[str, Any]:
    """The ``name=value`` pairs given with ``option``; a value is JSON where it can be, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise SystemExit(f"{option} {pair}: write name=value")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def summary(record: RunRecord) -> str:
    """One line for people."""
    computed = "" if record.computed_prompt_tokens is None else f", {record.computed_prompt_tokens:,} computed"
    return (
        f"{record.workload} {record.label}: {record.wall_s:.1f} s, {record.output_tokens_per_s:.1f} output tokens/s, "
        f"{record.prompt_tokens:,} prompt tokens{computed}, load {record.load_s:.1f} s, "
        f"peak {record.peak_rss_bytes / 1e9:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, choices=ENGINES)
    parser.add_argument("--workload", required=True, help="a file in OpenAI batch format, or W1q, W2q, W3q, W4q")
    parser.add_argument("--dtype", default="float32", help="float32, int8, ... what the engine offers")
    parser.add_argument("--kv-cache-tokens", type=int, help="room in the KV cache; default: the engine's own choice")
    parser.add_argument("--group", action="store_true", help="hand the jobs over grouped by prefix, as a person would")
    parser.add_argument("--rows", type=int, help="only the first rows of the file")
    parser.add_argument("--max-model-len", type=int, default=DEFAULT_MAX_MODEL_LEN)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="engine setting"
    )
    parser.add_argument("--output", type=Path, help="the JSON record; default: ENGINE-WORKLOAD.json in this folder")
    parser.add_argument("--texts", type=Path, help="also write the answers, one JSON object a line")
    arguments = parser.parse_args()
    request = RunRequest(
        engine=arguments.engine,
        workload=arguments.workload,
        dtype=arguments.dtype,
        kv_cache_tokens=arguments.kv_cache_tokens,
        grouped=arguments.group,
        max_rows=arguments.rows,
        max_model_len=arguments.max_model_len,
        num_threads=arguments.threads,
        settings=parse_settings(arguments.settings),
    )
    try:
        record, results = run(request)
    except (RunFailed, peers.PeerMissing) as err:
        raise SystemExit(str(err)) from err
    record.write(arguments.output or Path(f"{record.engine}-{Path(arguments.workload).stem}.json"))
    if arguments.texts is not None:
        lines = (json.dumps({"custom_id": result.custom_id, "texts": result.texts}) for result in results)
        arguments.texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(summary(record))


if __name__ == "__main__":
    main()
