"""``kvq submit`` and ``kvq export`` as a person runs them: rows a second, memory, and how soon the first job runs.

Owns the files and the processes. Invariant: what was submitted is what is exported.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from bench.process_tree import PeakMemory
from bench.queue_store import QUEUE, body
from bench.queue_worker import WorkerProcess, running
from kvq.migrations.url import database_url

_FIRST_JOB_TIMEOUT_S = 600.0


def write_jobs(path: Path, number: int) -> Path:
    """A file of so many lines in OpenAI's batch format, about 650 bytes each."""
    with path.open("w", encoding="utf-8") as file:
        for line_no in range(1, number + 1):
            line = {
                "custom_id": f"row-{line_no}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body(line_no),
            }
            file.write(json.dumps(line) + "\n")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun:
    """One run of a command, from the start of its process to its end."""

    rows: int
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    stdout: str = ""

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.wall_s


def submit(path: Path, number: int, url: str) -> CommandRun:
    """``kvq submit`` of a file of ``number`` lines; its output is the batch id."""
    return _run(["submit", str(path), "--db", url, "--queue", QUEUE], number)


def export(batch_id: str, number: int, url: str, folder: Path) -> CommandRun:
    """``kvq export`` of a batch of ``number`` results."""
    output = folder / "export.jsonl"
    run = _run(["export", batch_id, "--db", url, "--output", str(output)], number)
    with output.open("rb") as lines:
        assert sum(1 for _ in lines) == number, "rows are missing in the export"
    output.unlink()
    return run


def _run(arguments: list[str], rows: int) -> CommandRun:
    begin, used_s = time.perf_counter(), _cpu_s_of_children()
    process = subprocess.Popen(_kvq(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    memory = PeakMemory(process.pid)
    stdout, stderr = process.communicate()
    wall_s = time.perf_counter() - begin
    peak_rss_bytes = memory.stop()
    if process.returncode:
        raise RuntimeError(f"kvq {arguments[0]} ended with {process.returncode}:\n{stderr[-4000:]}")
    cpu_s = _cpu_s_of_children() - used_s
    return CommandRun(rows=rows, wall_s=wall_s, cpu_s=cpu_s, peak_rss_bytes=peak_rss_bytes, stdout=stdout.strip())


def _cpu_s_of_children() -> float:
    """Of those that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _kvq(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvq.cli", *arguments]


def finish_all(url: str, batch_id: str) -> None:
    """End every job of a batch, as workers would, in one statement each."""
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "A label"}}]}
    engine = sa.create_engine(database_url(url))
    with engine.begin() as connection:
        values = {"batch_id": batch_id, "response": json.dumps(response)}
        connection.execute(
            sa.text("""
            UPDATE jobs SET state = 'succeeded', attempt = 1, owner = 'bench', claimed_at = created_at
            WHERE batch_id = :batch_id AND state = 'queued'
            """),
            values,
        )
        connection.execute(
            sa.text("""
            INSERT INTO results
                (seq, attempt, worker_id, text, finish_reason, response, prompt_tokens, completion_tokens)
            SELECT seq, 1, 'bench', 'A label', 'stop', CAST(:response AS json), 120, 2
            FROM jobs WHERE batch_id = :batch_id AND state = 'succeeded' ON CONFLICT DO NOTHING
            """),
            values,
        )
        connection.execute(sa.text("ANALYZE jobs, results"))
    engine.dispose()


def first_job_s(path: Path, url: str, *, model: str, broker: str, folder: Path) -> float:
    """Seconds from the start of ``kvq submit`` to its first job running on a worker that was idle.

    The submission is ended there, since this is asked of a file of a million lines.
    """
    engine = sa.create_engine(database_url(url))
    claimed = sa.text("SELECT extract(epoch FROM min(claimed_at) - :before) FROM jobs WHERE claimed_at IS NOT NULL")
    with running(WorkerProcess(folder, model=model, db=url, broker=broker)), engine.connect() as connection:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        before = connection.execute(sa.text("SELECT clock_timestamp()")).scalar_one()
        arguments = ["submit", str(path), "--db", url, "--broker", broker, "--queue", QUEUE]
        process = subprocess.Popen(_kvq(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _FIRST_JOB_TIMEOUT_S
            while (seconds := connection.execute(claimed, {"before": before}).scalar()) is None:
                if time.monotonic() > deadline:
                    raise RuntimeError("no job ran")
                time.sleep(0.05)
        finally:
            process.terminate()  # not SIGINT, which is ignored in whatever was started in a shell's background
            process.wait(60)
    engine.dispose()
    return float(seconds)
