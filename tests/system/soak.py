"""Soak: workers on real databases and a real broker while one thing after another is broken.

``python -m tests.system.soak --minutes 5`` prints what was done and what came of it, as JSON; exit code 1 when a
promise was broken, with the rows that show it. Two legs: Celery workers on Redis and PostgreSQL, then ``kvq worker
--no-broker`` and ``kvq run`` on one SQLite file whose folder fills up.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import click

from tests.system.calm import calm_answers, dummy_model
from tests.system.soak_grounds import Ground, Servers, SqliteFolder
from tests.system.soak_leg import Leg
from tests.system.soak_plan import Plan, Report

LEGS: dict[str, Callable[[random.Random], Ground]] = {"redis and postgresql": Servers, "sqlite": SqliteFolder}
# Of the time, the kills and the jobs.
_SHARES = {"redis and postgresql": 0.6, "sqlite": 0.4}


def soak(plan: Plan, folder: Path, legs: tuple[str, ...] = tuple(LEGS)) -> dict[str, Report]:
    """Run the legs one after another, each with its share of ``plan``."""
    model = dummy_model(folder / "dummy")
    calm = calm_answers(model, folder, range(min(plan.num_bodies, plan.jobs)))
    reports = {}
    for name in legs:
        share = _SHARES[name] / sum(_SHARES[leg] for leg in legs)
        its = replace(
            plan, minutes=share * plan.minutes, kills=round(share * plan.kills), jobs=round(share * plan.jobs)
        )
        where = folder / name.replace(" ", "-")
        where.mkdir()
        reports[name] = Leg(its, LEGS[name](random.Random(plan.seed)), model=model, calm=calm, folder=where).run()
    return reports


@click.command()
@click.option("--minutes", type=float, default=5.0, show_default=True, help="How long things are broken at least.")
@click.option("--kills", type=int, default=0, show_default=True, help="How many workers are killed at least.")
@click.option("--jobs", type=int, default=4_000, show_default=True)
@click.option("--workers", type=int, default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--leg", "legs", type=click.Choice(list(LEGS)), multiple=True, default=list(LEGS), help="Only this leg.")
def main(minutes: float, kills: int, jobs: int, workers: int, seed: int, legs: tuple[str, ...]) -> None:
    """Break things for a while, then see whether every promise was kept."""
    logging.basicConfig(level=logging.WARNING)
    plan = Plan(minutes=minutes, kills=kills, jobs=jobs, workers=workers, seed=seed)
    with tempfile.TemporaryDirectory(prefix="kvq-soak-") as folder:
        reports = soak(plan, Path(folder), legs)
    shown = {name: asdict(report) for name, report in reports.items()}
    click.echo(json.dumps({"plan": asdict(plan), "legs": shown}, indent=2, default=str))
    sys.exit(1 if any(report.broken for report in reports.values()) else 0)


if __name__ == "__main__":
    main()
