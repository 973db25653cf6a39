"""``kvq`` processes forked from one that has imported torch, transformers and Celery already.

Owns how such a process is made; once made it is a process like any other: its own settings, log, threads and
death. A new Python spends most of its start on imports, and a test that kills hundreds of workers is about what they
do afterwards. Invariant: the process that is forked from has no thread, no connection and no model.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

from tests.system.soak_poison import VARIABLE, die_of_poison

if TYPE_CHECKING:
    from collections.abc import Iterator

_IMPORTED_ONCE = [
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "kvq.engine.engine",
    "kvq.worker.runner",
    "kvq.worker.host",
    "kvq.worker.celery_worker",
    "kvq.cli.worker",
    "kvq.cli.run",
]
_CONTEXT = multiprocessing.get_context("forkserver")
# An exit code is read from a pipe, once: of two threads that ask at the same moment the second one is told 255.
# To start a process asks after all others.
_ONE_ASKS = threading.Lock()


class Forked:
    """One forked process, with the interface of ``subprocess.Popen``."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        with _ONE_ASKS:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise TimeoutExpired("kvq", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def fork(args: Sequence[str], folder: Path, environ: Mapping[str, str], log: Path) -> Forked:
    """``kvq ARGS``; the first call takes seconds, the others take what is left to do after the imports."""
    _CONTEXT.set_forkserver_preload(_IMPORTED_ONCE)
    # OpenMP reads it when it is loaded. Processes outnumber the processors here: more threads would wait for
    # each other.
    with _variable("OMP_NUM_THREADS", "1"):
        ensure_running()
    process = _CONTEXT.Process(target=_be_kvq, args=(list(args), folder, dict(environ), log), daemon=True)
    with _ONE_ASKS:
        process.start()
    return Forked(process)


def _be_kvq(args: list[str], folder: Path, environ: dict[str, str], log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["kvq", *args]
    if poison := os.environ.get(VARIABLE):
        die_of_poison(Path(poison))
    from kvq.cli.main import main

    main()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
