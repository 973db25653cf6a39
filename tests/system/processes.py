"""``kvq worker`` as a real process, to be killed, told to stop, and read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

from tests.waiting import wait_until

# A worker imports torch and loads its model; on a busy machine that takes its time.
START_TIMEOUT_S = 240.0


class Process(Protocol):
    """A child process, as ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


# Starts ``kvq ARGS`` in a folder with an environment and a file for all it prints.
Launch = Callable[[Sequence[str], Path, Mapping[str, str], Path], Process]


def launch(args: Sequence[str], folder: Path, environ: Mapping[str, str], log: Path) -> Process:
    """A new Python, as the console script starts one."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "kvq.cli", *args],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


class Worker:
    """One process that runs jobs, with its settings in the environment and its log in a file.

    Args:
        folder: working folder; made if needed.
        settings: settings by name, as ``KVQ_*`` variables.
        failpoints: where the process is to kill itself.
        command: what of ``kvq`` it is.
        environ: variables besides.
        start: how the process is made.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        *options: str,
        failpoints: str = "",
        command: Sequence[str] = ("worker",),
        environ: Mapping[str, str] = MappingProxyType({}),
        start: Launch = launch,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("KVQ_")}
        variables |= {f"KVQ_{name.upper()}": str(value) for name, value in settings.items()} | environ
        if failpoints:
            variables["KVQ_FAILPOINTS"] = failpoints
        self._log = folder / "worker.log"
        self._process = start([*command, *options], folder, variables, self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

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
        self._process.send_signal(signum)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Tell it to stop, and wait until it has."""
        self.send(signal.SIGTERM)
        return self.wait()
