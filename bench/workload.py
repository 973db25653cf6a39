"""Workloads: the files in ``bench/workloads``, and the ways of handing their jobs over.

Owns reading and grouping. Knows no engine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from bench.engines.protocol import Job, Sampling

FOLDER = Path(__file__).parent / "workloads"
NAMES = ("W1q", "W2q", "W3q", "W4q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One file, or its first rows."""

    name: str
    sha256: str  # of the whole file
    jobs: list[Job]
    num_rows_in_file: int

    @classmethod
    def load(cls, path: str, *, max_rows: int | None = None) -> Workload:
        """Read a file in OpenAI's batch format, or a workload by its short name (``W1q``)."""
        file = FOLDER / f"{path}.jsonl" if path in NAMES else Path(path)
        content = file.read_bytes()
        rows = [json.loads(line) for line in content.splitlines() if line.strip()]
        jobs = [
            Job(
                custom_id=row["custom_id"],
                messages=row["body"]["messages"],
                sampling=Sampling.of_body(row["body"]),
            )
            for row in rows[:max_rows]
        ]
        return cls(name=file.stem, sha256=hashlib.sha256(content).hexdigest(), jobs=jobs, num_rows_in_file=len(rows))

    def as_submitted(self) -> list[list[Job]]:
        """All jobs at once, in the order of the file."""
        return [self.jobs]

    def grouped(self) -> list[list[Job]]:
        """As a person would prepare the file: one job of each shared prefix first, then the rest, sorted by prefix."""
        by_prefix: dict[str, list[Job]] = {}
        for job in self.jobs:
            by_prefix.setdefault(_prefix(job), []).append(job)
        leaders = [jobs[0] for jobs in by_prefix.values()]
        rest = [job for jobs in by_prefix.values() for job in jobs[1:]]
        return [wave for wave in (leaders, rest) if wave]


def _prefix(job: Job) -> str:
    """What jobs of these files share is their system prompt; without one, nothing."""
    first = job.messages[0]
    return first["content"] if first["role"] == "system" else job.custom_id
