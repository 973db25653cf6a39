"""What a soak is to do, and what it reports. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Short, so that a frozen worker is declared dead within the run.
LEASE_S = 6.0
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done to whom.

    A leg ends once things were broken for ``minutes`` and ``kills`` workers were killed, whichever is later.
    ``num_bodies``: distinct requests; each is asked for many times.
    """

    minutes: float
    kills: int
    jobs: int
    workers: int = 3
    seed: int = 0
    num_bodies: int = 400
    settle_s: float = 900.0


def job_id(number: int) -> str:
    return f"soak-{number}"


@dataclass(slots=True, kw_only=True)
class Report:
    """What was done in one leg, and what came of it. ``broken`` are sentences; none where every promise was kept."""

    seconds: float = 0.0
    disturbances: dict[str, int] = field(default_factory=dict)
    killed_while_they_ran_jobs: int = 0
    ended_as_the_database_was_away_and_started_again: int = 0
    jobs: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    sent_again_after_redis_lost_its_file: int = 0
    states: dict[str, int] = field(default_factory=dict)
    answers_computed: int = 0  # the others were served from stored answers to equal requests
    attempts_lost: int = 0
    jobs_run_more_than_once: int = 0
    killed_by_poison_jobs: int = 0
    dead_letters: dict[str, int] = field(default_factory=dict)  # crashes by custom id, when all else had ended
    dead_letters_retried: int = 0
    dead_letters_dropped: int = 0
    leases_lost: int = 0
    results_refused_by_the_fence: int = 0
    answers_compared_with_a_calm_run: int = 0
    audit: dict[str, bool] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
