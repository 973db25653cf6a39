"""Poison jobs in a soak: whichever process runs one dies, until it is given up, found, and retried or dropped.

Owns who the poison jobs are, the folder that says whether they are deadly, and what makes a process die of one.
Invariant: while they are deadly none of them ends but as a dead letter, however fast it would have run; afterwards
one is retried and must succeed, the other is dropped and must be gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.worker.filters import Condition, Operator
from kvq.worker.inference import Inference
from kvq.worker.jobs import ClaimedJob, Endpoint, JobState, NewJob
from kvq.worker.preparation import Prepared
from kvq.worker.retry import DEFAULT_MAX_CRASHES
from kvq.worker.store import Store
from tests.system.rows import query
from tests.system.soak_plan import Report

PREFIX = "poison-"
# Of a process that dies of poison jobs: the folder where it writes that it did. Not there: they are harmless.
VARIABLE = "SOAK_POISON"
_BATCH = "poison"
_RETRIED, _DROPPED = f"{PREFIX}retried", f"{PREFIX}dropped"
_BODY: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


def die_of_poison(folder: Path) -> None:
    """From now on this process is killed as it hands a poison job to its engine, beside whatever runs there."""
    submit = Inference.submit

    def deadly(self: Inference, job: ClaimedJob, prepared: Prepared) -> None:
        if job.job_id.startswith(PREFIX) and folder.is_dir():
            tempfile.mkstemp(dir=folder)
            os.kill(os.getpid(), signal.SIGKILL)
        submit(self, job, prepared)

    Inference.submit = deadly  # type: ignore[method-assign]


class Poison:
    """The poison jobs of one leg, deadly to processes whose environment is ``environ``. ``folder``: theirs alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.environ: Mapping[str, str] = {VARIABLE: str(folder)}
        self.num_killed = 0

    def send(self, store: Store) -> None:
        """Into SQL."""
        store.create_batch(batch_id=_BATCH)
        store.insert_jobs([_job(_RETRIED), _job(_DROPPED)], batch_id=_BATCH)

    def look_after_the_dead(self, store: Store, report: Report) -> int:
        """What a person does with dead letters: looks at them, drops one for good, retries the rest; how many."""
        letters = {letter.custom_id: letter for letter in store.dead_letters()}
        if self._deadly:
            report.dead_letters = {name: letters[name].crashes for name in sorted(letters)}
            for name in (_RETRIED, _DROPPED):
                if name not in letters or letters[name].crashes != DEFAULT_MAX_CRASHES:
                    report.broken.append(f"{name} is no dead letter of {DEFAULT_MAX_CRASHES} crashes: {letters}")
            self.stop()
        report.dead_letters_dropped += store.drop_dead(where=_named(_DROPPED))
        retried = store.retry_where(batch_id=None, states=[JobState.DEAD])
        report.dead_letters_retried += retried
        return retried

    def stop(self) -> None:
        """They do no harm any more."""
        if self._deadly:
            self.num_killed = len(list(self._folder.iterdir()))
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _deadly(self) -> bool:
        return self._folder.is_dir()


def judge_poison(report: Report, db: str) -> None:
    """The one that was retried has succeeded, the other is gone."""
    found = dict(query(db, f"SELECT custom_id, state FROM jobs WHERE batch_id = '{_BATCH}'"))
    if found != {_RETRIED: JobState.SUCCEEDED}:
        report.broken.append(f"of the poison jobs there should be {_RETRIED}, succeeded, and there are: {found}")


def _job(name: str) -> NewJob:
    return NewJob(job_id=name, custom_id=name, endpoint=Endpoint.COMPLETIONS, body={"prompt": name, **_BODY})


def _named(name: str) -> tuple[Condition, ...]:
    return (Condition(field="custom_id", operator=Operator.EQUAL, value=name),)
