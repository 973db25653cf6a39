"""``kvq worker`` as a real process, to be killed, told to stop, and read.

A worker spends seconds importing torch before it does anything, which a test that kills a hundred of them has not:
so workers are forked from a process that has imported it and done nothing else (multiprocessing's fork server). From
there on they are what the command makes them, ``exec`` alone is left out; ``fresh`` workers are whole.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.waiting import wait_until

# On a busy machine a worker takes its time to load its model.
START_TIMEOUT_S = 120.0
_PRELOADED = [
    "kvq.cli.main",
    "kvq.engine.engine",
    "kvq.worker.app",
    "kvq.worker.celery_worker",
    "kvq.worker.runner",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "celery.worker.worker",
    "celery.backends.redis",
    "kombu.transport.redis",
]


class Worker:
    """One worker process with its settings in the environment and its log in a file.

    Args:
        folder: working folder; made if needed.
        settings: settings by name, as ``KVQ_*`` variables.
        failpoints: where the process is to kill itself.
        fresh: start a new interpreter, as a person does.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, object],
        *options: str,
        failpoints: str = "",
        fresh: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVQ_")}
        environ |= {f"KVQ_{name.upper()}": str(value) for name, value in settings.items()}
        if failpoints:
            environ["KVQ_FAILPOINTS"] = failpoints
        self._log = folder / "worker.log"
        self._log.touch()
        start = _Fresh if fresh else _Forked
        self._process: _Fresh | _Forked = start(folder, environ, options, self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the negative number of the signal that ended it."""
        return self._process.poll()

    def wait_for_log(self, text: str) -> Self:
        def found() -> bool:
            assert self.exit_code is None, f"the worker ended with {self.exit_code}:\n{self.log}"
            return text in self.log

        wait_until(found, timeout_s=START_TIMEOUT_S, what=f"{text!r} in the worker's log")
        return self

    def wait_ready(self) -> Self:
        return self.wait_for_log("engine ready")

    def wait_killed(self) -> None:
        """Wait until it has killed itself at a failpoint."""
        assert self.wait(START_TIMEOUT_S) == -signal.SIGKILL, self.log

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait(30)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.exit_code is None:
            os.kill(self.pid, signum)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Tell it to stop, and wait until it has."""
        self.send(signal.SIGTERM)
        return self.wait()


class _Fresh:
    """A worker that a new interpreter runs."""

    def __init__(self, folder: Path, environ: Mapping[str, str], options: Sequence[str], log: Path) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvq.cli", "worker", *options],
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)


class _Forked:
    """A worker forked from the process that has imported what it needs."""

    def __init__(self, folder: Path, environ: Mapping[str, str], options: Sequence[str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(
            target=_run_worker, args=(str(folder), dict(environ), list(options), str(log)), daemon=False
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"the worker still runs after {timeout_s:g} s"
        return code


def _run_worker(folder: str, environ: dict[str, str], options: list[str], log: str) -> None:
    """What the forked process does: become ``kvq worker``."""
    with open(log, "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["kvq", "worker", *options]
    main: Any = __import__("kvq.cli.main", fromlist=["main"]).main
    main()
