"""The store alone: rows claimed and finished as workers do it, by several processes and against a queue of any length.

Owns the measurements on a Store; the rows' work is skipped, everything SQL is real. Invariant: every row that was
claimed was finished, once.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import uuid
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from bench.process_tree import peak_rss_bytes
from kvq.migrations.url import database_url
from kvq.worker.jobs import ClaimedJob, Endpoint, JobMetrics, JobOutcome, JobState, NewJob, WaitingJob
from kvq.worker.store import Store

QUEUE = "bench"
NUM_PROCESSES = 4
_WINDOW = 1024  # rows a worker looks at before it claims
_CLAIM = 64  # rows of one claim and of one finish
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 12  # about 500 characters
_STARTED_S = 300.0


def body(number: int) -> dict[str, Any]:
    """A request of about 500 characters, each its own."""
    return {
        "messages": [{"role": "user", "content": f"{number} {_PROMPT}"}],
        "max_tokens": 16,
        "temperature": 0,
    }


def new_jobs(number: int) -> Iterator[NewJob]:
    """So many jobs."""
    for line_no in range(1, number + 1):
        yield NewJob(
            job_id=str(uuid.uuid4()),
            custom_id=f"row-{line_no}",
            endpoint=Endpoint.CHAT,
            body=body(line_no),
            line_no=line_no,
            queue=QUEUE,
        )


def fill(store: Store, number: int) -> str:
    """A batch of so many queued jobs; its id."""
    batch_id = str(uuid.uuid4())
    store.create_batch(batch_id=batch_id)
    report = store.insert_jobs(new_jobs(number), batch_id=batch_id)
    assert report.inserted == number
    return batch_id


def fill_database(url: str, number: int) -> None:
    """See to it that a database, by its URL, has ``number`` jobs queued, and has done the work that loading left."""
    with Store.open(url) as store:
        fill(store, number - store.num_queued(QUEUE, at_most=number))
    engine = sa.create_engine(database_url(url))
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in ("VACUUM (ANALYZE) jobs, job_payloads", "CHECKPOINT"):
                connection.execute(sa.text(statement))
    engine.dispose()


def by_length(url: str, lengths: tuple[int, ...], *, seconds: float) -> list[dict[str, float]]:
    """Rows looked at, claimed and finished by one worker, against the length of the queue, which stays what it is.

    What was taken out is put in again while the clock stands. The database must be empty.
    """
    points = []
    worker_id = str(uuid.uuid4())
    with Store.open(url) as store:
        store.register_worker(worker_id, hostname="bench", pid=os.getpid(), queue=QUEUE)
        queued = 0
        for length in lengths:
            fill(store, length - queued)
            queued = length
            _take_at_length(store, worker_id, length, seconds=min(1.0, seconds))  # plans and caches are warm
            taken, took_s = _take_at_length(store, worker_id, length, seconds=seconds)
            points.append(
                {"rows": length, "rows_per_s": taken / took_s, "taken": taken, "peak_rss_bytes": peak_rss_bytes()}
            )
        store.retire_worker(worker_id)
    return points


def _take_at_length(store: Store, worker_id: str, length: int, *, seconds: float) -> tuple[int, float]:
    taken, took_s = 0, 0.0
    while took_s < seconds:
        begin = time.perf_counter()
        num = 0
        window = store.peek(QUEUE, limit=_WINDOW)
        while window and num < min(length, _WINDOW):
            chosen, window = window[:_CLAIM], window[_CLAIM:]
            num += _take(store, worker_id, chosen)
        took_s += time.perf_counter() - begin
        taken += num
        fill(store, num)
    return taken, took_s


def _take(store: Store, worker_id: str, rows: list[WaitingJob]) -> int:
    outcomes = [_outcome(job) for job in store.claim(worker_id, [row.seq for row in rows])]
    if not outcomes:
        return 0
    accepted = len(store.finish(worker_id, outcomes).accepted)
    assert accepted == len(outcomes)
    return accepted


def contend(url: str, number: int, *, processes: int = NUM_PROCESSES) -> dict[str, float]:
    """``number`` of the queued rows claimed and finished by processes that contend for them."""
    context = multiprocessing.get_context("spawn")
    start, taken, reports = context.Barrier(processes + 1), context.Value("l", 0), context.Queue()
    workers = [
        context.Process(target=_work, args=(url, number, start, taken, reports), daemon=True) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    start.wait(timeout=_STARTED_S)
    told = [reports.get(timeout=3600) for _ in workers]
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a process of the benchmark failed; see above")
    take_s = max(ended_s for _, ended_s, _, _ in told) - min(begun_s for begun_s, _, _, _ in told)
    return {
        "processes": processes,
        "taken": taken.value,
        "take_s": take_s,
        "rows_per_s": taken.value / take_s,
        "workers_cpu_s": sum(cpu_s for _, _, cpu_s, _ in told),
        "worker_peak_rss_bytes": max(peak for _, _, _, peak in told),
    }


def _work(url: str, limit: int, start: Any, taken: Any, reports: Any) -> None:
    """A worker's way through the store until ``limit`` rows are finished by all together.

    Reports when it began and last finished a row (system-wide monotonic clock), its processor time, its peak memory.
    """
    worker_id = str(uuid.uuid4())
    source = random.Random(worker_id)
    with Store.open(url) as store:
        store.register_worker(worker_id, hostname="bench", pid=os.getpid(), queue=QUEUE)
        start.wait(timeout=_STARTED_S)
        begun_s = ended_s = time.monotonic()
        used_s = time.process_time()
        window: list[WaitingJob] = []
        while taken.value < limit:
            if not window:
                window = store.peek(QUEUE, limit=_WINDOW)
                # Workers that plan by prefix differ in what they want; here chance makes the difference.
                source.shuffle(window)
                if not window:
                    break
            chosen, window = window[:_CLAIM], window[_CLAIM:]
            accepted = _take(store, worker_id, chosen)
            if accepted:
                ended_s = time.monotonic()
                with taken.get_lock():
                    taken.value += accepted
        used_s = time.process_time() - used_s
        store.retire_worker(worker_id)
    reports.put((begun_s, ended_s, used_s, peak_rss_bytes()))


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
