"""The command itself: fast, lazy, and honest in its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import kvq as package
from kvq.cli.interrupts import EXIT_INTERRUPTED
from kvq.cli.main import COMMANDS, EXIT_BAD_INPUT, EXIT_OUR_FAULT, cli
from kvq.engine.errors import ModelError, StepFailed
from kvq.worker.errors import SettingsError, StoreUnavailable
from tests.cli.conftest import Kvq

_HEAVY = ("torch", "transformers", "sqlalchemy", "alembic", "celery", "redis", "rich")


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["completion", "bash"]])
def test_what_needs_no_work_imports_no_heavy_package(args: list[str]) -> None:
    code = f"""
import sys
from kvq.cli.main import run
code = run({args!r})
heavy = [name for name in {_HEAVY!r} if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*COMMANDS, "db upgrade", "db current", "config show"])
def test_every_command_explains_itself_without_torch(name: str) -> None:
    code = f"import sys; from kvq.cli.main import run; code = run({[*name.split(), '--help']!r}); "
    code += "sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Usage: kvq {name}" in done.stdout


def test_the_version_is_the_packages(kvq: Kvq) -> None:
    assert kvq("--version").out == f"kvq, version {version()}\n"


def version() -> str:
    return package.__version__


def test_the_help_lists_every_command(kvq: Kvq) -> None:
    out = kvq("--help").out
    for name, text in COMMANDS.items():
        assert name in out
        assert text in out


@pytest.mark.parametrize(
    "words",
    ["run a", "plan a", "submit a b", "run --output a", "export --errors a", "status --db a", "worker --model a"],
)
def test_shells_complete_the_names_of_files(words: str) -> None:
    environ = {**os.environ, "_KVQ_COMPLETE": "bash_complete", "COMP_WORDS": f"kvq {words}"}
    environ["COMP_CWORD"] = str(len(words.split()))
    program = "import sys; from kvq.cli.main import cli; sys.argv[0] = 'kvq'; cli(prog_name='kvq')"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == f"file,{words[-1]}\n", done.stderr


def test_standard_output_on_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "kvq.cli", "config", "show"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (EXIT_OUR_FAULT, "kvq: error: cannot write: No space left on device\n")


def test_a_command_that_is_nearly_right_is_guessed(kvq: Kvq) -> None:
    assert "Did you mean status?" in kvq("statsu").err
    assert "Did you mean" not in kvq("frobnicate").err


def test_help_spells_values_as_they_are_typed_and_names_no_value_of_python(kvq: Kvq) -> None:
    out = " ".join(kvq("worker", "--help").out.split())
    for phrase in ("int8 computes", "auto reads safetensors", "prefix admits", "Tokens per KV block"):
        assert phrase in out
    assert "None" not in out


def test_usage_errors_are_2_and_go_to_stderr(kvq: Kvq) -> None:
    for args in (["nonsense"], ["run"], ["run", "a", "b"], ["status", "--nonsense"], ["submit"], ["results"]):
        ran = kvq(*args)
        assert ran.code == EXIT_BAD_INPUT, args
        assert ran.out == ""
        assert "Usage: kvq" in ran.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("db", "is wrong"), EXIT_BAD_INPUT),
        (ModelError("no such model"), EXIT_BAD_INPUT),
        (StoreUnavailable("gone"), EXIT_OUR_FAULT),
        (StepFailed("broken"), EXIT_OUR_FAULT),
        (KeyboardInterrupt(), EXIT_INTERRUPTED),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    kvq: Kvq, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    ran = kvq("status")
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("kvq: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_kvq(kvq: Kvq, shell: str) -> None:
    ran = kvq("completion", shell)
    assert ran.code == 0
    assert "_KVQ_COMPLETE" in ran.out
    assert 'string split ","' not in ran.out, "descriptions have commas"


def test_python_m_kvq_cli_is_kvq() -> None:
    done = subprocess.run([sys.executable, "-m", "kvq.cli", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_BAD_INPUT
    assert "No such command" in done.stderr
