"""Running kvq's command line: inside this process, or as a process of its own that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvq.cli.main import run
from tests.models import tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


Kvq = Callable[..., Ran]


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def kvq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvq:
    """Run a command in an empty folder with an empty configuration."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KVQ_")]:
        monkeypatch.delenv(name)

    def invoke(*args: object) -> Ran:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code=code, out=captured.out, err=captured.err)

    return invoke


def start(*args: object, folder: Path) -> subprocess.Popen[str]:
    """Start ``kvq`` as a process."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVQ_")}
    return subprocess.Popen(
        [sys.executable, "-m", "kvq.cli", *map(str, args)],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """In the child: undo an ignored SIGINT that the tests themselves were started with (as a background job is)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
