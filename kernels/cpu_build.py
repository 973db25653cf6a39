"""Build of the compiled CPU kernels: C source to shared library, once per machine and shape.

Owns the compiler call and the cache of built libraries. Knows nothing of what the kernels do. Without a C compiler
there is no library, and the caller falls back to the PyTorch reference.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

_FLAGS = (
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
)

# Far longer than a build takes.
_TURN_S = 120.0
_LOOK_S = 0.05


class NoCompiler(Exception):
    """The kernels cannot be built here; the message says why."""


def load_library(*, block_size: int, head_dim: int, value_dim: int) -> ctypes.CDLL:
    """The kernels for these sizes, built if they are not in the cache (a second or so).

    Raises:
        NoCompiler: there is no C compiler, it refused the source, or there is no folder to write to.
    """
    sources = _sources()
    sizes = {"BLOCK_SIZE": block_size, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim}
    path = _library_path(sources, sizes)
    try:
        with _turn(path):
            if not path.exists():
                _build(sources, path, sizes)
    except OSError as err:
        raise NoCompiler(f"the kernels cannot be kept in {path.parent} (set XDG_CACHE_HOME): {err}") from err
    try:
        return ctypes.CDLL(str(path))
    except OSError as err:
        raise NoCompiler(f"the built kernels in {path} do not load: {err}") from err


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """One process after another where the library is still to be built, so that workers that start together build once.

    Whoever waits too long (the builder is stopped, say), or on a file system without locks, builds as well: that is
    safe, since a library is put in its place whole.
    """
    if path.exists():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + _TURN_S
    with path.with_suffix(".lock").open("w") as lock:
        while time.monotonic() < until_s:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_S)
            except OSError:
                break
        yield


def _sources() -> dict[str, str]:
    """Text by file name."""
    folder = files("kvq.kernels").joinpath("cpu_c")
    return {item.name: item.read_text(encoding="utf-8") for item in sorted(folder.iterdir(), key=lambda i: i.name)}


def _library_path(sources: Mapping[str, str], sizes: Mapping[str, int]) -> Path:
    """Named after all that the result depends on: source, flags, processor, sizes."""
    key = "\n".join((*sources.values(), *_FLAGS, platform.machine(), _cpu_model(), str(_openmp_library())))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / f"cpu-{digest}-{'-'.join(map(str, sizes.values()))}.so"


def cache_folder() -> Path:
    """Where kvq keeps what it can make again: built kernels, converted models."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvq"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            lines = [line for line in cpuinfo if line.startswith(("model name", "flags", "Features"))]
    except FileNotFoundError:  # not Linux
        return platform.processor()
    return "".join(sorted(set(lines)))


def _openmp_library() -> Path | None:
    """The OpenMP runtime that torch has loaded: sharing it means sharing its threads instead of fighting them."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            for line in maps:
                path = line.split(maxsplit=5)[-1].strip()
                if "libgomp" in Path(path).name:
                    return Path(path)
    except FileNotFoundError:
        pass
    return None


def _compiler() -> str:
    for name in (os.environ.get("CC"), (sysconfig.get_config_var("CC") or "").split(" ")[0], "gcc", "cc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise NoCompiler("no C compiler was found (install gcc, or set CC)")


def _build(sources: Mapping[str, str], path: Path, sizes: Mapping[str, int]) -> None:
    compiler, openmp = _compiler(), _openmp_library()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "kernels.so"
        for name, text in sources.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        # One unit: most of the compiler's time goes into the intrinsics' headers.
        unit = Path(folder) / "kernels.c"
        unit.write_text("".join(f'#include "{name}"\n' for name in sources if name.endswith(".c")))
        defined = [f"-D{name}={size}" for name, size in sizes.items()]
        # torch's own OpenMP runtime comes first, so that -fopenmp's is not pulled in beside it.
        libraries = ([str(openmp)] if openmp else []) + ["-Wl,--as-needed", "-lm"]
        command = [compiler, *_FLAGS, *defined, str(unit), "-o", str(built), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoCompiler(f"{compiler} refused the kernels: {done.stderr.strip()[-2000:]}")
        built.replace(path)  # atomic: another process may be building or loading the same
