"""GGUF files converted once: a Hugging Face folder beside them in the cache, loaded from there ever after.

Owns the cache of converted files. Parsing a GGUF's vocabulary and unpacking its weights takes ten times as long as
reading safetensors. Invariant: a folder that exists is complete (it is renamed into place), and belongs to that
content of that file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from kvq.kernels.cpu_build import cache_folder

logger = logging.getLogger(__name__)

# A larger file's unpacked weights would fill the disk for the sake of some seconds.
_MAX_WEIGHTS_GGUF_BYTES = 1 << 30


def tokenizer_folder(gguf: Path) -> Path:
    """Where the converted tokenizer of ``gguf`` is, or is to be."""
    return _root(gguf) / "tokenizer"


def weights_folder(gguf: Path, dtype_name: str) -> Path | None:
    """Where the converted weights are, or are to be; None for a file too large to be worth it."""
    if gguf.stat().st_size > _MAX_WEIGHTS_GGUF_BYTES:
        return None
    return _root(gguf) / f"weights-{dtype_name}"


def save_tokenizer(hf_tokenizer: Any, folder: Path) -> None:
    """Keep a converted tokenizer."""
    with _Staged(folder) as staged:
        hf_tokenizer.save_pretrained(staged)


def save_weights(network: Any, folder: Path) -> None:
    """Keep a converted network: its config and weights, no longer quantised."""
    from safetensors.torch import save_file

    config = network.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(network).__name__]
    # Tied weights are stored once, under the first name that they have.
    seen: set[int] = set()
    tensors = {}
    for name, tensor in network.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    with _Staged(folder) as staged:
        save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})
        (staged / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        network.generation_config.save_pretrained(staged)


class _Staged:
    """A folder that appears whole or not at all. A cache that cannot be written is only logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._staging: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Path:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._staging = tempfile.TemporaryDirectory(dir=self._folder.parent, ignore_cleanup_errors=True)
        path = Path(self._staging.name) / "content"
        path.mkdir()
        return path

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: object) -> bool:
        assert self._staging is not None
        try:
            if kind is None and not self._folder.exists():
                (Path(self._staging.name) / "content").replace(self._folder)
        finally:
            self._staging.cleanup()
        if isinstance(err, OSError):
            logger.warning("the converted model could not be kept in %s: %s", self._folder, err)
            return True
        return False


def _root(gguf: Path) -> Path:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return cache_folder() / f"gguf-{digest}"
