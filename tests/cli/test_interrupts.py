"""Ctrl-C at any moment of a command's life is one line and exit code 130, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvq.cli.interrupts import EXIT_INTERRUPTED
from tests.cli.conftest import heed_interrupts

# A command line that gets SIGINT when it comes to import NAME.
_WHILE_IMPORTING = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""
_AT_ITS_END = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""


def interrupted(program: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    program += f"import sys; sys.argv = ['kvq', *{args!r}]; from kvq.cli.__main__ import main; main()"
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, preexec_fn=heed_interrupts, timeout=120
    )


@pytest.mark.parametrize("name", ["click", "kvq.worker.errors", "kvq.cli.status", "sqlalchemy"])
def test_an_interrupt_while_modules_are_imported_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "kvq.db").touch()
    done = interrupted(_WHILE_IMPORTING.format(name=name), tmp_path, "status")
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "\nkvq: interrupted\n")


def test_an_interrupt_after_the_last_word_is_one_line(tmp_path: Path) -> None:
    done = interrupted(_AT_ITS_END, tmp_path, "config", "show")
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "\nkvq: interrupted\n")
    assert "max_num_seqs" in done.stdout
