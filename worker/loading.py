"""Loading: many new jobs into a store, a chunk a transaction, the next chunk read while one is written.

Owns the size of a chunk and the thread that writes. Knows no SQL. Invariants: chunks are written one after the other,
in the order they were read; at most two are held, of bounded size; a failure on either side ends both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvq.worker.jobs import NewJob

CHUNK_JOBS = 5_000
CHUNK_CHARS = 16 * 2**20


def load(jobs: Iterable[NewJob], write: Callable[[list[NewJob]], int]) -> tuple[int, int]:
    """Write all jobs, reading the iterable on this thread; returns the sum of what ``write`` returned, and how many.

    Raises:
        Exception: what reading or writing raised; chunks written before stay written.
    """
    num_written = num_read = 0
    writing: Future[int] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="kvq-loading") as writer:
        for chunk in _chunks(jobs):
            if writing is not None:
                num_written += writing.result()
            num_read += len(chunk)
            writing = writer.submit(write, chunk)
        if writing is not None:
            num_written += writing.result()
    return num_written, num_read


def _chunks(jobs: Iterable[NewJob]) -> Iterator[list[NewJob]]:
    chunk: list[NewJob] = []
    num_chars = 0
    for job in jobs:
        chunk.append(job)
        num_chars += _num_chars(job.body)
        if len(chunk) >= CHUNK_JOBS or num_chars >= CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def _num_chars(body: dict[str, Any]) -> int:
    """About what the prompt of a body takes."""
    prompt = body.get("messages", body.get("prompt", body.get("input")))
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, list):
        return 0
    contents = (part.get("content") if isinstance(part, dict) else part for part in prompt)
    return sum(len(content) if isinstance(content, str | list) else 1 for content in contents)
