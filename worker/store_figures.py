"""Figures in the store: samples of workers, queues, and what batches took. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from kvq.engine.stats import acceptance
from kvq.worker.database import Database
from kvq.worker.schema import Instant
from kvq.worker.store_rows import clean_text
from kvq.worker.store_workers import SAMPLE_FIELDS

# A pause between two results longer than this is a stop, not work.
_LONGEST_WORK_S = 60.0
_HISTORY_BATCHES = 20
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What a batch took: prompt tokens that were computed, output tokens, and seconds in which it was worked on."""

    batch_id: str
    num_jobs: int
    computed_tokens: int
    output_tokens: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """One row of ``worker_stats``: about ten seconds of a worker. ``age_s`` is by the database's clock."""

    worker_id: str
    at: datetime
    age_s: float
    prompt_tps: float
    generation_tps: float
    running: int
    waiting: int
    kv_usage: float
    prefix_hit_rate: float
    swapped_in: int
    swapped_out: int
    preemptions: int
    steps: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of the tokens guessed ahead that were right; None where none were guessed."""
        return acceptance(self.num_accepted_tokens, self.num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """One queue that has jobs. ``oldest_age_s`` is of the oldest queued job."""

    queue: str
    queued: int
    running: int
    dead: int
    oldest_age_s: float | None
    paused: bool
    num_workers: int


class FiguresStore:
    """The part of the store that is asked how things are going."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def worker_samples(self, *, last_s: float) -> list[WorkerSample]:
        """The samples of the last seconds, oldest first."""
        age = self._db.seconds_between("s.at", self._db.now)
        fields = ", ".join(f"coalesce(s.{name}, 0) AS {name}" for name in SAMPLE_FIELDS)
        statement = sa.text(f"""
        SELECT s.worker_id, s.at, {age} AS age_s, {fields}
        FROM worker_stats s WHERE s.at >= {self._db.now_plus("age")} ORDER BY s.id
        """).columns(at=Instant())
        with self._db.reading() as conn:
            return [WorkerSample(**row) for row in conn.execute(statement, {"age": -last_s}).mappings()]

    def queues(self) -> list[QueueRow]:
        """Every queue with jobs that are not finished, or dead ones, or that is paused."""
        age = self._db.seconds_between("min(CASE WHEN j.state = 'queued' THEN j.created_at END)", self._db.now)
        statement = sa.text(f"""
        SELECT j.queue, count(*) FILTER (WHERE j.state = 'queued') AS queued,
               count(*) FILTER (WHERE j.state = 'running') AS running,
               count(*) FILTER (WHERE j.state = 'dead') AS dead, {age} AS oldest_age_s,
               EXISTS (SELECT 1 FROM queues q WHERE q.name = j.queue AND q.paused) AS paused,
               (SELECT count(*) FROM workers w WHERE w.queue = j.queue AND w.state = 'live') AS num_workers
        FROM jobs j WHERE j.state IN ('queued', 'running', 'dead') GROUP BY j.queue ORDER BY j.queue
        """).columns(paused=sa.Boolean())
        with self._db.reading() as conn:
            return [QueueRow(**row) for row in conn.execute(statement).mappings()]

    def batch_costs(self, models: Collection[str]) -> list[BatchCost]:
        """What the newest batches took that were answered by a model of one of these names.

        Only time in which the batch was worked on counts: a batch that was stopped and went on a day later did not
        take a day.
        """
        gap = self._db.seconds_between("coalesce(r.before_at, r.claimed_at)", "r.finished_at")
        query = sa.text(f"""
        SELECT r.batch_id, count(*) AS num_jobs, CAST(sum(r.computed_tokens) AS bigint) AS computed_tokens,
               CAST(sum(r.completion_tokens) AS bigint) AS output_tokens,
               sum(CASE WHEN {gap} > {_LONGEST_WORK_S} THEN {_LONGEST_WORK_S} ELSE {gap} END) AS busy_s
        FROM (
            SELECT j.batch_id, j.claimed_at, r.finished_at, r.computed_tokens, r.completion_tokens,
                   lag(r.finished_at) OVER (PARTITION BY j.batch_id ORDER BY r.finished_at, r.seq) AS before_at
            FROM results r JOIN jobs j ON j.seq = r.seq
            WHERE j.state = 'succeeded' AND j.claimed_at IS NOT NULL AND r.model IN :models AND j.batch_id IN (
                SELECT batch_id FROM batches ORDER BY created_at DESC LIMIT 200)
        ) AS r
        GROUP BY r.batch_id ORDER BY max(r.finished_at) DESC LIMIT {_HISTORY_BATCHES}
        """).bindparams(sa.bindparam("models", expanding=True))
        values = {"models": [clean_text(name) for name in models]}
        with self._db.reading() as conn:
            return [BatchCost(**row) for row in conn.execute(query, values).mappings()]

    def check_owners(self, *, lease_s: float) -> list[str]:
        """Running jobs whose owner is not live, or has been silent for a whole lease."""
        silence = self._db.now_plus("silence")
        return self._check(
            "running without a live owner",
            f"""
            SELECT j.seq FROM jobs j WHERE j.state = 'running' AND NOT EXISTS (
                SELECT 1 FROM workers w
                WHERE w.worker_id = j.owner AND w.state = 'live' AND w.heartbeat_at >= {silence})""",
            silence=-lease_s,
        )

    def check_counts(self) -> list[str]:
        """Jobs that succeeded more than once, and batches whose states do not sum to their total."""
        twice = self._check(
            "succeeded more than once",
            """
            SELECT j.seq FROM jobs j
            WHERE (SELECT count(*) FROM job_attempts a WHERE a.seq = j.seq AND a.outcome = 'succeeded') > 1""",
        )
        states = "p.queued + p.running + p.succeeded + p.failed + p.cancelled + p.expired + p.dead"
        statement = sa.text(f"""
        SELECT p.batch_id FROM batch_progress p
        WHERE p.total <> {states} OR p.total <> (SELECT count(*) FROM jobs j WHERE j.batch_id = p.batch_id)
        ORDER BY p.batch_id LIMIT {_SHOWN}
        """)
        with self._db.reading() as conn:
            wrong = list(conn.execute(statement).scalars())
        return twice + ([f"counts do not sum to the total: batches {', '.join(wrong)}"] if wrong else [])

    def check_blocks(self) -> list[str]:
        """Workers that held KV blocks when they had no job: a sample says so, the last one before they ended too."""
        statement = sa.text(f"""
        SELECT s.worker_id, max(s.kv_usage) AS kv_usage FROM worker_stats s
        WHERE s.running = 0 AND s.waiting = 0 AND s.kv_usage > 0
        GROUP BY s.worker_id ORDER BY max(s.id) DESC LIMIT {_SHOWN}
        """)
        with self._db.reading() as conn:
            rows = conn.execute(statement).all()
        return [f"worker {row.worker_id} had no job and held {row.kv_usage:.1%} of its KV blocks" for row in rows]

    def check_outbox(self, *, lease_s: float) -> list[str]:
        """Ends that were not told: older than a lease, or any at all once nothing is queued or running."""
        return self._check(
            "ended, but its sender was not told",
            f"""
            SELECT DISTINCT j.seq FROM jobs j JOIN outbox o ON o.seq = j.seq
            WHERE o.created_at < {self._db.now_plus("age")}
               OR NOT EXISTS (SELECT 1 FROM jobs k WHERE k.state IN ('queued', 'running'))""",
            age=-lease_s,
        )

    def _check(self, sentence: str, query: str, **values: float) -> list[str]:
        with self._db.reading() as conn:
            seqs = list(conn.execute(sa.text(f"{query} ORDER BY j.seq LIMIT {_SHOWN + 1}"), values).scalars())
        if not seqs:
            return []
        more = ", ..." if len(seqs) > _SHOWN else ""
        return [f"{sentence}: jobs {', '.join(map(str, seqs[:_SHOWN]))}{more}"]
