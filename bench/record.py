"""RunRecord: one run of one engine over one workload, as it is kept in ``bench/results``.

Owns the JSON format. Invariant: a record holds everything its line in a report needs, and no text of the model.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.machine import Machine

KIND = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run. Rates are derived from tokens and ``wall_s``, and written beside them for people."""

    engine: str
    engine_version: str
    dtype: str
    grouped: bool  # the jobs were ordered by hand
    kv_cache_tokens: int | None
    settings: dict[str, Any]
    num_threads: int
    model: str
    model_sha256: str
    workload: str
    workload_sha256: str
    num_jobs: int
    num_samples: int
    load_s: float
    wall_s: float
    prompt_tokens: int
    computed_prompt_tokens: int | None  # None: the engine does not tell
    output_tokens: int
    peak_rss_bytes: int
    greedy_outputs_sha256: str | None  # None: no ids, or nothing greedy
    started_at: str  # UTC, ISO 8601
    load_average: float | None  # when the run began
    command: str
    machine: Machine
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens answered for, whether computed or reused."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s

    @property
    def label(self) -> str:
        """The engine as a table names it: what makes two runs of it different kinds of run."""
        parts = [self.engine, self.dtype]
        if self.grouped:
            parts.append("grouped by hand")
        if self.kv_cache_tokens is not None:
            parts.append(f"{self.kv_cache_tokens}-token cache")
        return ", ".join(parts)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rates = {"output_tokens_per_s": self.output_tokens_per_s, "total_tokens_per_s": self.total_tokens_per_s}
        content = {"kind": KIND, **asdict(self), **rates}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> RunRecord | None:
        """The record in ``path``; None for a JSON file of another kind."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("kind") != KIND:
            return None
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in content.items() if name in known}
        return cls(**{**values, "machine": Machine(**values["machine"])})


def read_records(folder: Path) -> list[RunRecord]:
    """All records below ``folder``, oldest first."""
    found = (RunRecord.read(path) for path in sorted(folder.rglob("*.json")))
    return sorted((record for record in found if record is not None), key=lambda record: record.started_at)
