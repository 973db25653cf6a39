"""Runs the Triton kernels' tests under Triton's interpreter: ``interpreted_*.py``, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(900)  # a minute on an idle machine
@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_triton_kernels_equal_the_definition_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.kernels.interpreter", "-p", "no:cacheprovider", HERE / name]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=880, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
