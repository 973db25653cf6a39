"""Loading: rows are written in order, in bounded chunks, and a failure on either side ends both."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from kvq.worker import loading
from kvq.worker.jobs import NewJob
from tests.factories import new_job


def _jobs(number: int, **changes: Any) -> Iterator[NewJob]:
    return (new_job(line_no, **changes) for line_no in range(1, number + 1))


def test_every_job_is_written_once_and_in_order() -> None:
    chunks: list[list[int | None]] = []

    def write(jobs: list[NewJob]) -> int:
        chunks.append([job.line_no for job in jobs])
        return len(jobs) - 1

    number = 2 * loading.CHUNK_JOBS + 7
    assert loading.load(_jobs(number), write) == (number - 3, number)
    assert [len(chunk) for chunk in chunks] == [loading.CHUNK_JOBS, loading.CHUNK_JOBS, 7]
    assert list(chain.from_iterable(chunks)) == list(range(1, number + 1))


@pytest.mark.parametrize("body", [{"prompt": "x" * 2**20}, {"messages": [{"role": "user", "content": "x" * 2**20}]}])
def test_long_prompts_make_small_chunks(body: dict[str, Any]) -> None:
    sizes: list[int] = []
    loading.load(_jobs(40, body=body), lambda jobs: sizes.append(len(jobs)) or 0)
    assert sizes == [16, 16, 8]


def test_a_chunk_that_cannot_be_written_ends_the_reading() -> None:
    read = 0

    def reading() -> Iterator[NewJob]:
        nonlocal read
        for job in _jobs(10 * loading.CHUNK_JOBS):
            read += 1
            yield job

    def write(jobs: list[NewJob]) -> int:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        loading.load(reading(), write)
    assert read <= 3 * loading.CHUNK_JOBS


def test_a_line_that_cannot_be_read_keeps_what_was_written() -> None:
    written: list[NewJob] = []

    def reading() -> Iterator[NewJob]:
        yield from _jobs(loading.CHUNK_JOBS + 1)
        raise ValueError("the file changed")

    def write(jobs: list[NewJob]) -> int:
        written.extend(jobs)
        return len(jobs)

    with pytest.raises(ValueError, match="the file changed"):
        loading.load(reading(), write)
    assert len(written) == loading.CHUNK_JOBS
