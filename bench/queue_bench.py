"""The queue alone: how fast rows go in and come out of the store, whatever number of them is queued.

``python -m bench.queue_bench``. For each length a fresh database is filled, then four processes claim and finish rows
as workers do, without an engine. PostgreSQL is a private server from the tests' wheel unless ``--pg-url`` names one.
Invariant: every row that was claimed was finished, once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.machine import Machine, load_average
from bench.process_tree import peak_rss_bytes
from kvq.migrations import migrate
from kvq.worker.jobs import ClaimedJob, Endpoint, JobMetrics, JobOutcome, JobState, NewJob, WaitingJob
from kvq.worker.store import Store

LENGTHS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
NUM_PROCESSES = 4
_QUEUE = "bench"
_WINDOW = 1024  # rows a worker looks at before it claims
_CLAIM = 64  # rows of one claim and of one finish
_MAX_TAKEN = 20_000  # rows taken out at each length: enough for a rate
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 12  # about 500 characters


def measure(url: str, length: int) -> dict[str, float]:
    """One length: fill the empty database at ``url``, then take rows out."""
    with Store.open(url, create=True) as store:
        batch_id = str(uuid.uuid4())
        store.create_batch(batch_id=batch_id)
        begin = time.perf_counter()
        report = store.insert_jobs(_jobs(length), batch_id=batch_id)
        submit_s = time.perf_counter() - begin
        assert report.inserted == length
    context = multiprocessing.get_context("spawn")
    start, taken, reports = context.Barrier(NUM_PROCESSES + 1), context.Value("l", 0), context.Queue()
    workers = [
        context.Process(target=_work, args=(url, min(length, _MAX_TAKEN), start, taken, reports), daemon=True)
        for _ in range(NUM_PROCESSES)
    ]
    for worker in workers:
        worker.start()
    start.wait(timeout=120)
    told = [reports.get(timeout=3600) for _ in workers]
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a process of the benchmark failed; see above")
    with Store.open(url) as store:
        progress = store.batch_progress(batch_id)
        assert progress.succeeded == taken.value, f"{taken.value} finished, {progress.succeeded} succeeded"
    take_s = max(ended_s for _, ended_s, _ in told) - min(begun_s for begun_s, _, _ in told)
    return {
        "rows": length,
        "submit_s": submit_s,
        "submit_rows_per_s": length / submit_s,
        "taken": taken.value,
        "take_s": take_s,
        "rows_per_s": taken.value / take_s,
        "submitter_peak_rss_bytes": peak_rss_bytes(),
        "worker_peak_rss_bytes": max(peak for _, _, peak in told),
    }


def _jobs(number: int) -> Iterator[NewJob]:
    for line_no in range(1, number + 1):
        body = {"messages": [{"role": "user", "content": f"{line_no} {_PROMPT}"}], "max_tokens": 16, "temperature": 0}
        yield NewJob(
            job_id=str(uuid.uuid4()),
            custom_id=f"row-{line_no}",
            endpoint=Endpoint.CHAT,
            body=body,
            line_no=line_no,
            queue=_QUEUE,
        )


def _work(url: str, limit: int, start: Any, taken: Any, reports: Any) -> None:
    """A worker's way through the store until ``limit`` rows are finished by all together.

    Reports when it began, when it last finished a row (system-wide monotonic clock) and its peak memory.
    """
    worker_id = str(uuid.uuid4())
    source = random.Random(worker_id)
    with Store.open(url) as store:
        store.register_worker(worker_id, hostname="bench", pid=os.getpid(), queue=_QUEUE)
        start.wait(timeout=120)
        begun_s = ended_s = time.monotonic()
        window: list[WaitingJob] = []
        while taken.value < limit:
            if not window:
                window = store.peek(_QUEUE, limit=_WINDOW)
                # Workers that plan by prefix differ in what they want; here chance makes the difference.
                source.shuffle(window)
                if not window:
                    break
            chosen, window = window[:_CLAIM], window[_CLAIM:]
            outcomes = [_outcome(job) for job in store.claim(worker_id, [row.seq for row in chosen])]
            if outcomes:
                accepted = len(store.finish(worker_id, outcomes).accepted)
                assert accepted == len(outcomes)
                ended_s = time.monotonic()
                with taken.get_lock():
                    taken.value += accepted
        store.retire_worker(worker_id)
    reports.put((begun_s, ended_s, peak_rss_bytes()))


def _outcome(job: ClaimedJob) -> JobOutcome:
    return JobOutcome(
        seq=job.seq,
        job_id=job.job_id,
        attempt=job.attempt,
        claim_id=job.claim_id,
        state=JobState.SUCCEEDED,
        text="A label",
        finish_reason="stop",
        response={"choices": [{"index": 0, "message": {"role": "assistant", "content": "A label"}}]},
        metrics=JobMetrics(prompt_tokens=120, completion_tokens=2, computed_tokens=120),
    )


@contextmanager
def sqlite_urls() -> Iterator[Iterator[str]]:
    """Fresh files, one at a time."""

    def fresh(folder: str) -> Iterator[str]:
        number = 0
        while True:
            yield f"sqlite:///{folder}/queue-{number}.db"
            for file in Path(folder).glob(f"queue-{number}.db*"):
                file.unlink()
            number += 1

    with tempfile.TemporaryDirectory() as folder:
        yield fresh(folder)


@contextmanager
def postgres_urls(server_url: str | None) -> Iterator[Iterator[str]]:
    """Fresh databases on ``server_url``, or on a private server."""
    import psycopg
    from sqlalchemy.engine import make_url

    def fresh(url: str) -> Iterator[str]:
        while True:
            name = f"kvq_bench_{uuid.uuid4().hex}"
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload,unused-ignore]
            database = make_url(url).set(database=name).render_as_string(hide_password=False)
            migrate.upgrade(database)
            yield database
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')  # type: ignore[call-overload,unused-ignore]

    if server_url is not None:
        yield fresh(server_url)
        return
    from tests.servers import PostgresServer

    server = PostgresServer()
    server.start()
    try:
        yield fresh(server.url)
    finally:
        server.remove()


def markdown(result: dict[str, Any]) -> str:
    """The figures, for people."""
    lines = [
        "| database | queued rows | submit, rows/s | claim and finish by 4 processes, rows/s "
        "| submitter's memory, MB | a worker's, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, points in result["databases"].items():
        lines += [
            f"| {name} | {p['rows']:,} | {p['submit_rows_per_s']:,.0f} | {p['rows_per_s']:,.0f} | "
            f"{p['submitter_peak_rss_bytes'] / 1e6:.0f} | {p['worker_peak_rss_bytes'] / 1e6:.0f} |"
            for p in points
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.queue_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--databases", nargs="+", choices=("sqlite", "postgres"), default=("sqlite", "postgres"))
    parser.add_argument("--pg-url", help="a PostgreSQL server whose user may create databases")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scaling", help="folder")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "kind": "queue",
        "machine": asdict(Machine.this()),
        "load_average": load_average(),
        "databases": {},
    }
    for name in arguments.databases:
        with sqlite_urls() if name == "sqlite" else postgres_urls(arguments.pg_url) as urls:
            result["databases"][name] = [
                measure(url, length) for length, url in zip(arguments.lengths, urls, strict=False)
            ]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "queue.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = markdown(result)
    (arguments.output / "queue.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
