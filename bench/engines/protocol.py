"""What crosses between ``bench.run`` and an engine's process: a Task in, an Outcome out, as JSON files.

Owns these two records and the frame of every adapter. Imports the standard library only, since each engine runs in a
virtual environment of its own. Invariant: the clock of ``wall_s`` runs from messages to texts, with the model
loaded and warmed up, and nothing else of the harness inside.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The part of an OpenAI body that the workloads use."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    ignore_eos: bool = False

    @classmethod
    def of_body(cls, body: dict[str, Any]) -> Sampling:
        return cls(**{name: body[name] for name in cls.__dataclass_fields__ if name in body})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row of a workload."""

    custom_id: str
    messages: list[dict[str, str]]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an adapter is to do.

    ``waves`` are submissions: an engine gets the jobs of one wave at once, and the next wave when they are done. As
    submitted there is one wave; grouped by hand there are two (one job of each prefix, then the rest).
    """

    waves: list[list[Job]]
    model: str  # a folder or file in the form the engine wants
    dtype: str
    num_threads: int
    max_model_len: int
    kv_cache_tokens: int | None
    settings: dict[str, Any]  # for the engine as they are, over the adapter's own

    @property
    def jobs(self) -> list[Job]:
        return [job for wave in self.waves for job in wave]

    @property
    def max_num_seqs(self) -> int:
        """Enough for all samples of all jobs at once, within reason."""
        return min(128, sum(job.sampling.n for job in self.jobs))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        fields = json.loads(path.read_text(encoding="utf-8"))
        waves = [
            [Job(**{**job, "sampling": Sampling(**job["sampling"])}) for job in wave] for wave in fields.pop("waves")
        ]
        return cls(waves=waves, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The answer to one job. ``token_ids`` has one list per sample; None where the engine does not give ids."""

    custom_id: str
    texts: list[str]
    prompt_tokens: int
    output_tokens: int
    token_ids: list[list[int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an adapter did. ``computed_prompt_tokens`` is None where the engine does not tell."""

    engine_version: str
    settings: dict[str, Any]
    load_s: float
    wall_s: float
    computed_prompt_tokens: int | None
    results: list[JobResult]
    details: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Outcome:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(results=[JobResult(**result) for result in fields.pop("results")], **fields)


class Adapter(ABC):
    """An engine behind four calls, made in this order: ``load``, ``run`` for each wave, ``describe``, ``close``."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def load(self) -> None:
        """Load the model and answer something short, so that nothing is left to be compiled or allocated."""

    @abstractmethod
    def run(self, jobs: list[Job]) -> list[JobResult]:
        """Answer ``jobs``, all handed over at once."""

    @abstractmethod
    def describe(self) -> tuple[str, dict[str, Any]]:
        """The engine's version and the settings it ran with."""

    def computed_prompt_tokens(self) -> int | None:
        """Prompt tokens computed by ``run`` so far; None where the engine does not tell."""
        return None

    def details(self) -> dict[str, Any]:
        """Anything else worth keeping."""
        return {}

    def close(self) -> None:  # noqa: B027 (most engines end with their process)
        """Let go of the engine."""


WARM_UP = Job(
    custom_id="warm-up",
    messages=[{"role": "user", "content": "Say hello to the benchmark."}],
    sampling=Sampling(max_tokens=4, temperature=0.0, ignore_eos=True),
)


def main(make: Callable[[Task], Adapter]) -> None:
    """The whole life of an adapter's process: ``python -m bench.engines.NAME TASK.json OUTCOME.json``."""
    task = Task.read(Path(sys.argv[1]))
    begin = time.perf_counter()
    adapter = make(task)
    try:
        adapter.load()
        load_s = time.perf_counter() - begin
        begin = time.perf_counter()
        results = [result for wave in task.waves for result in adapter.run(wave)]
        wall_s = time.perf_counter() - begin
        version, settings = adapter.describe()
        Outcome(
            engine_version=version,
            settings=settings,
            load_s=load_s,
            wall_s=wall_s,
            computed_prompt_tokens=adapter.computed_prompt_tokens(),
            results=results,
            details=adapter.details(),
        ).write(Path(sys.argv[2]))
    finally:
        adapter.close()
