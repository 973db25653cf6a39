"""Forked processes tell the same exit code to everybody who asks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from tests.system.forked import Forked, fork

_NUM_PROCESSES = 40
_NUM_THREADS = 4


def test_threads_that_ask_at_the_same_moment_are_told_the_same_exit_code(tmp_path: Path) -> None:
    told: set[int] = set()
    for number in range(_NUM_PROCESSES):
        process = fork(["--version"], tmp_path, os.environ, tmp_path / f"{number}.log")
        _together(lambda process=process: told.add(_ask_until_it_ended(process)))

    assert told == {0}


def _ask_until_it_ended(process: Forked) -> int:
    while (code := process.poll()) is None:
        pass
    return code


def _together(call: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for _ in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
