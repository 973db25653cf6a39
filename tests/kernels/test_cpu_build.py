"""The library of CPU kernels is built once, however many ask for it, and whoever built it before was stopped."""

from __future__ import annotations

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvq.kernels import cpu_build
from kvq.kernels.cpu_build import NoCompiler, load_library

# Notes that it was called, takes its time, and compiles nothing.
_COMPILER = """#!/bin/sh
echo called >> {calls}
while [ "$1" != -o ]; do shift; done
sleep 0.3
exec cc -shared -x c /dev/null -o "$2"
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lines of this file: calls of a compiler that builds into an empty cache."""
    path, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(_COMPILER.format(calls=path), encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_those_who_start_together_build_once(calls: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: load_library(block_size=16, head_dim=64, value_dim=64), range(4)))
    assert len({library._name for library in libraries}) == 1
    assert calls.read_text().splitlines() == ["called"]
    assert len(list(cpu_build.cache_folder().iterdir())) == 2, "the library and its lock"


def test_a_builder_that_was_stopped_holds_the_others_up_for_a_while_only(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "_TURN_S", 0.2)
    path = cpu_build._library_path(cpu_build._sources(), {"BLOCK_SIZE": 16, "HEAD_DIM": 64, "VALUE_DIM": 64})
    path.parent.mkdir(parents=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began_s = time.monotonic()
        load_library(block_size=16, head_dim=64, value_dim=64)
        assert time.monotonic() - began_s >= 0.2
    assert calls.read_text().splitlines() == ["called"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NoCompiler, match=r"cannot be kept in .*/file/kvq \(set XDG_CACHE_HOME\)"):
        load_library(block_size=16, head_dim=64, value_dim=64)
