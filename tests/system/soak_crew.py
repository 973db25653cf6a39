"""The processes of a soak that run jobs: started, killed, frozen, and started again when they end by themselves.

Owns the processes and what their logs said. Knows the database only to see who runs jobs. Invariant: whoever was
killed or has ended is replaced, as a supervisor would; an end that nothing explains is a broken promise.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from kvq.cli.main import EXIT_OUR_FAULT, EXIT_ROWS_FAILED
from tests.system.forked import fork
from tests.system.processes import START_TIMEOUT_S, Worker
from tests.system.rows import query
from tests.system.soak_plan import LEASE_S
from tests.waiting import wait_until

_LEASE_LOST = "was declared dead while it was silent"
_REFUSED = " results were refused"
# A process that starts, or reads a file, while the database is away says so and ends.
_AWAY = ("the database is unavailable", "the database refused a statement: disk I/O error")
_LAST_LINES = 10
_LOOK_S = 5.0
_LONGEST_FREEZE_S = LEASE_S + 30.0


class Crew:
    """``num_workers`` workers with the same settings and variables, and one ``kvq run`` for every file."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        *options: str,
        num_workers: int,
        files: Sequence[Path] = (),
        environ: Mapping[str, str],
        draw: random.Random,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._options = options
        self._num_workers = num_workers
        self._files = list(files)
        self._environ = environ
        self._draw = draw
        self._num_started = 0
        self._workers: list[Worker] = []
        self._runs: dict[Path, Worker] = {}
        self.counts: Counter[str] = Counter()
        self.leases_lost = 0
        self.results_refused = 0
        self.killed_at_work = 0
        self.ended_away = 0
        self.broken: list[str] = []

    @property
    def files_left(self) -> int:
        """Files whose ``kvq run`` has not said that all its rows succeeded."""
        return len(self._files)

    def start(self) -> None:
        """Start them all, and wait until the workers are ready."""
        self.tend()
        for worker in self._workers:
            worker.wait_ready()

    def tend(self) -> None:
        """Replace those that are gone."""
        for process in [*self._workers, *self._runs.values()]:
            if process.exit_code is not None:
                self._remove(process)
        while len(self._workers) < self._num_workers:
            self._workers.append(self._new("worker", *self._options))
        for file in self._files:
            if file not in self._runs:
                self._runs[file] = self._new("run", str(file))

    def kill(self) -> None:
        """``kill -9`` of one, of those that run jobs if there are any, and its replacement."""
        busy = self._busy()
        victim = self._draw.choice(busy or self._workers)
        victim.kill()
        self.counts["worker killed"] += 1
        self.killed_at_work += victim in busy
        self._remove(victim)
        self.tend()

    def freeze(self) -> None:
        """Stop one past its lease and let it go on: it must find out by itself that others run its jobs."""
        busy = [worker for worker in self._busy() if worker in self._workers]
        if not busy:
            return
        worker = self._draw.choice(busy)
        worker.send(signal.SIGSTOP)
        until_s = time.monotonic() + _LONGEST_FREEZE_S
        while (alive := self._is_live(worker)) and time.monotonic() < until_s:
            time.sleep(0.2)
        noticed = worker.log.count(_LEASE_LOST)
        worker.send(signal.SIGCONT)
        if alive:  # stopped in the middle of a transaction that the others wait for
            self.counts["worker frozen, holding a lock"] += 1
            return
        wait_until(
            lambda: worker.exit_code is not None or worker.log.count(_LEASE_LOST) > noticed,
            timeout_s=START_TIMEOUT_S,
            what="a frozen worker to notice that its lease is over",
        )
        self.counts["worker frozen past its lease"] += 1

    def pids(self) -> list[int]:
        """Of those that run."""
        return [process.pid for process in [*self._workers, *self._runs.values()] if process.exit_code is None]

    def stop(self) -> None:
        """Tell the workers to stop; each must end in good order."""
        for worker in self._workers:
            if worker.exit_code is None:
                worker.send(signal.SIGTERM)
        for worker in self._workers:
            if (code := worker.wait(120)) != 0 and not _was_away(worker):
                self.broken.append(f"a worker that was told to stop ended with {code}: {worker.log[-2000:]}")
            self._note(worker)
        self._workers.clear()

    def end(self) -> None:
        """Whatever happened, leave nothing running."""
        for process in [*self._workers, *self._runs.values()]:
            process.kill()

    def _new(self, command: str, *args: str) -> Worker:
        self._num_started += 1
        # Every third serves answers that are stored; the others compute each job.
        settings = {**self._settings, "enable_dedup": "true" if self._num_started % 3 == 0 else "false"}
        folder = self._folder / f"{command}-{self._num_started}"
        return Worker(folder, settings, *args, command=(command,), environ=self._environ, start=fork)

    def _busy(self) -> list[Worker]:
        """Those that own running jobs, waited for a while; none when nobody has any."""
        processes = [*self._workers, *self._runs.values()]

        def found() -> list[Worker]:
            with suppress(SQLAlchemyError):
                at_work = self._pids("AND EXISTS (SELECT 1 FROM jobs j WHERE j.owner = w.worker_id)")
                return [process for process in processes if process.pid in at_work and process.exit_code is None]
            return []

        with suppress(AssertionError):
            return wait_until(found, timeout_s=_LOOK_S)
        return []

    def _is_live(self, worker: Worker) -> bool:
        with suppress(SQLAlchemyError):
            return worker.pid in self._pids()
        return True

    def _pids(self, condition: str = "") -> set[int]:
        rows = query(str(self._settings["db"]), f"SELECT w.pid FROM workers w WHERE w.state = 'live' {condition}")
        return {row[0] for row in rows}

    def _remove(self, process: Worker) -> None:
        self._note(process)
        if process in self._workers:
            self._workers.remove(process)
            explained = False
        else:
            (file,) = (file for file, run in self._runs.items() if run is process)
            del self._runs[file]
            # Where rows are dead letters its last word is that rows failed; once they are retried it goes on with them.
            explained = process.exit_code in (0, EXIT_ROWS_FAILED)
            if process.exit_code == 0:
                self._files.remove(file)
        if _was_away(process):
            self.ended_away += 1
        elif not explained and process.exit_code != -signal.SIGKILL:
            self.broken.append(f"a process ended by itself with {process.exit_code}: {process.log[-2000:]}")

    def _note(self, process: Worker) -> None:
        for line in process.log.splitlines():
            if _REFUSED in line:
                self.results_refused += int(line.split(_REFUSED)[0].split()[-1])
            elif _LEASE_LOST in line:
                self.leases_lost += 1


def _was_away(process: Worker) -> bool:
    """Whether it ended by itself, and its last words are that the database is away."""
    last_words = process.log.splitlines()[-_LAST_LINES:]
    return process.exit_code == EXIT_OUR_FAULT and any(sentence in line for line in last_words for sentence in _AWAY)
