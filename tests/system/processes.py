"""``kvq worker`` as a real process, to be killed, told to stop, and read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.waiting import wait_until

# A worker imports torch and loads its model; on a busy machine that takes its time.
START_TIMEOUT_S = 240.0


class Worker:
    """One worker process with its settings in the environment and its log in a file.

    Args:
        folder: working folder; made if needed.
        settings: settings by name, as ``KVQ_*`` variables.
        failpoints: where the process is to kill itself.
    """

    def __init__(self, folder: Path, settings: dict[str, object], *options: str, failpoints: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVQ_")}
        environ |= {f"KVQ_{name.upper()}": str(value) for name, value in settings.items()}
        if failpoints:
            environ["KVQ_FAILPOINTS"] = failpoints
        self._log = folder / "worker.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvq.cli", "worker", *options],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

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
        self._process.send_signal(signum)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Tell it to stop, and wait until it has."""
        self.send(signal.SIGTERM)
        return self.wait()
