"""A real worker beside the bare engine: what Redis, Celery and PostgreSQL cost on the same jobs.

Owns starting both on the same model with the same settings, and the clocks. The engine's clock runs from the first
prompt handed over to the last answer; the worker's from before the first message is sent to the commit of the last
result, by the database's clock. Invariant: a run counts only if every job succeeded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench.workload import NAMES, Workload
from kvq.migrations.url import database_url

QUEUE = "bench"
# Of both; what is not here is the default, the same for both.
ENGINE_SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 2048}
_START_TIMEOUT_S = 300.0
_RUN_TIMEOUT_S = 1200.0


class WorkerProcess:
    """``kvq worker`` in a process of its own, from its start to its end."""

    def __init__(self, folder: Path, *, model: str, db: str, broker: str | None, **settings: object) -> None:
        values = {**ENGINE_SETTINGS, "model": model, "db": db, "queue": QUEUE, **settings}
        values |= {} if broker is None else {"broker": broker}
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVQ_")}
        environ |= {f"KVQ_{name.upper()}": str(value) for name, value in values.items()}
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "worker.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvq.cli", "worker", *([] if broker else ["--no-broker"])],
                env=environ,
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Until its engine is loaded."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while "engine ready" not in self._log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the worker did not start:\n{self._log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Tell it to stop, and wait."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextmanager
def running(worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """A worker that is ready, stopped in the end."""
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.stop()


def bodies_of(workloads: Sequence[str], *, max_rows: int | None = None) -> list[dict[str, Any]]:
    """The jobs of workloads one after the other, as request bodies."""
    jobs = [job for name in workloads for job in Workload.load(name, max_rows=max_rows).jobs]
    return [
        {"messages": job.messages, **{name: value for name, value in asdict(job.sampling).items() if value is not None}}
        for job in jobs
    ]


def run_bare(model: str, bodies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The engine alone, in a process of its own: seconds and output tokens."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"model": model, "bodies": bodies}, file)
        file.flush()
        command = [sys.executable, "-m", "bench.queue_worker", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_RUN_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"the bare engine failed:\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _bare(path: str) -> dict[str, float]:
    from kvq import LLM, SamplingParams

    task = json.loads(Path(path).read_text(encoding="utf-8"))
    llm = LLM(task["model"], **ENGINE_SETTINGS)
    bodies = [dict(body) for body in task["bodies"]]
    messages = [body.pop("messages") for body in bodies]
    params = [SamplingParams(**body) for body in bodies]
    llm.chat([[{"role": "user", "content": "Hi"}]], SamplingParams(max_tokens=4))
    begin = time.perf_counter()
    outputs = llm.chat(messages, params)
    wall_s = time.perf_counter() - begin
    return {
        "wall_s": wall_s,
        "output_tokens": sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
    }


def run_worker(model: str, bodies: Sequence[dict[str, Any]], *, db: str, broker: str, folder: Path) -> dict[str, float]:
    """The same jobs sent by a Celery client to a worker that waits for them: seconds and output tokens."""
    from celery import Celery

    app = Celery("bench", broker=broker, backend=broker, set_as_current=False)
    engine = sa.create_engine(database_url(db))
    with running(WorkerProcess(folder, model=model, db=db, broker=broker)), engine.connect() as connection:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")

        def send(body: dict[str, Any]) -> None:
            app.send_task("kvq.generate", queue=QUEUE, kwargs=body)

        send({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
        _wait_finished(connection, 1)
        before = connection.execute(sa.text("SELECT clock_timestamp()")).scalar_one()
        for body in bodies:
            send(body)
        _wait_finished(connection, len(bodies) + 1)
        row = connection.execute(
            sa.text("""
            SELECT extract(epoch FROM max(r.finished_at) - :before) AS wall_s,
                   sum(r.completion_tokens) AS output_tokens,
                   count(*) FILTER (WHERE j.state = 'succeeded') AS succeeded
            FROM jobs j JOIN results r USING (seq) WHERE j.created_at >= :before
            """),
            {"before": before},
        ).one()
    app.close()
    engine.dispose()
    if row.succeeded != len(bodies):
        raise RuntimeError(f"{row.succeeded} of {len(bodies)} jobs succeeded")
    return {"wall_s": float(row.wall_s), "output_tokens": int(row.output_tokens)}


def _wait_finished(connection: sa.Connection, number: int) -> None:
    deadline = time.monotonic() + _RUN_TIMEOUT_S
    # The index on time alone is walked, and seldom: counting must not take the time that is measured, which ends by the
    # database's clock.
    while connection.execute(sa.text("SELECT count(*) FROM results")).scalar_one() < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{number} jobs were not finished in {_RUN_TIMEOUT_S:g} s")
        time.sleep(1.0)


def jobs_per_s(model: str, db: str, *, finished: tuple[int, int], folder: Path) -> float:
    """How fast a worker without a broker finishes queued jobs, between two counts of those finished since it began.

    It computes each of them: an earlier run on the same database left answers to equal ones.
    """
    engine = sa.create_engine(database_url(db))
    with engine.connect() as connection:
        earlier = connection.execute(sa.text("SELECT count(*) FROM results")).scalar_one()
    worker = WorkerProcess(folder, model=model, db=db, broker=None, enable_dedup="false")
    with running(worker), engine.connect() as connection:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        _wait_finished(connection, earlier + finished[1])
        place = sa.text(
            "SELECT extract(epoch FROM finished_at) FROM results ORDER BY finished_at LIMIT 1 OFFSET :place"
        )
        times = [float(connection.execute(place, {"place": earlier + number - 1}).scalar_one()) for number in finished]
    engine.dispose()
    return (finished[1] - finished[0]) / (times[1] - times[0])


def compare(
    model: str,
    urls: Iterator[str],
    broker: str,
    *,
    rounds: int = 3,
    workloads: Sequence[str] = NAMES,
    max_rows: int | None = None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Bare engine and worker in turns, each ``rounds`` times; medians. ``max_rows``: of each workload.

    ``earlier``: what an earlier call on the same jobs returned; its runs count as well.
    """
    bodies = bodies_of(workloads, max_rows=max_rows)
    bare, worker = [], []
    if earlier is not None:
        if (earlier["jobs"], earlier["workloads"]) != (len(bodies), list(workloads)):
            raise ValueError("the rounds that the folder holds were measured on other jobs")
        bare, worker = list(earlier["bare"]), list(earlier["worker"])
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            bare.append(run_bare(model, bodies))
            worker.append(run_worker(model, bodies, db=next(urls), broker=broker, folder=Path(folder) / str(number)))
    rates = [statistics.median(run["output_tokens"] / run["wall_s"] for run in runs) for runs in (bare, worker)]
    return {
        "jobs": len(bodies),
        "workloads": list(workloads),
        "bare": bare,
        "worker": worker,
        "bare_output_tokens_per_s": rates[0],
        "worker_output_tokens_per_s": rates[1],
        "ratio": rates[1] / rates[0],
    }


if __name__ == "__main__":
    print(json.dumps(_bare(sys.argv[1])))
