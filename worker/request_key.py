"""Request keys: by what a finished answer is found again, in other batches and by other workers.

Knows what an answer depends on: the model as it computes (weights, settings, versions, device) and the request (tokens,
parameters, the shape of the response). Invariant: whatever could change an answer changes the key; in doubt there is no
key, and the answer is computed.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import kvq
from kvq.engine.config import EngineConfig
from kvq.engine.dedup import answer_parameters
from kvq.worker.jobs import Endpoint

if TYPE_CHECKING:
    from kvq.worker.inference import Prepared

logger = logging.getLogger(__name__)

# Settings that decide how much is done at a time and when, never what comes out. A setting that is not named here
# counts, so that a new one is safe until somebody has thought about it.
_NEUTRAL = frozenset(
    {
        "max_num_seqs",
        "gpu_memory_utilization",
        "kv_cache_memory",
        "num_gpu_blocks_override",
        "scheduling_policy",
        "swap_space",
        "enable_dedup",
        "max_loras",
        "max_cpu_loras",
    }
)
# Named as they are found; their content counts instead.
_PATHS = ("model", "tokenizer")
# Files of this size are read whole, larger ones at their beginning, where safetensors and GGUF list the tensors.
_READ_WHOLE = 512 << 20
_READ_HEAD = 16 << 20
_CHUNK = 4 << 20


def model_identity(config: EngineConfig, *, max_model_len: int) -> str | None:
    """What an engine is, as far as answers depend on it; None where its weights cannot be told from others.

    ``max_model_len`` as it was resolved, since it ends answers that have no other bound.
    """
    try:
        prints = [_print_of(getattr(config, name)) for name in _PATHS if getattr(config, name) is not None]
        prints += [_print_of(path) for path in config.lora_paths.values()]
    except OSError as err:
        logger.warning("answers are not kept for equal requests, as the model's files cannot be read: %s", err)
        return None
    if None in prints:
        return None
    settings = [
        f"{f.name}={getattr(config, f.name)!r}"
        for f in fields(config)
        if f.name not in _NEUTRAL and f.name not in _PATHS
    ]
    parts = [*map(str, prints), *settings, f"max_model_len={max_model_len}", *_machine(), _code_print()]
    return _digest("\0".join(parts).encode("utf-8", "surrogatepass"))


def request_key(identity: str, endpoint: Endpoint, prepared: Prepared) -> str | None:
    """The key of a request to the engine of ``identity``; None for one that draws from a stream of its own."""
    parameters = answer_parameters(prepared.params)
    if parameters is None:
        return None
    asked = (prepared.token_ids, prepared.lora, parameters, prepared.echo, prepared.tool_use)
    parts = [identity, endpoint.value, *map(repr, asked)]
    return _digest("\0".join(parts).encode("utf-8", "surrogatepass"))


def _print_of(model: str) -> str | None:
    """A digest of the files that make up a model or tokenizer."""
    from kvq.engine.tokenizer import ModelSource  # transformers takes seconds to import

    source = ModelSource.resolve(model)
    if source.gguf_path is not None:
        return _file_print(source.gguf_path)
    folder = Path(source.path)
    if not folder.is_dir():
        snapshot = _cached_snapshot(source.path)
        if snapshot is None:
            return None
        folder = snapshot
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return _digest("\0".join(f"{path.name}={_file_print(path)}" for path in files).encode())


def _cached_snapshot(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _file_print(path: Path) -> str:
    """The content of a file; of a large one its size, its beginning and when it was written."""
    real = path.resolve()
    if len(real.name) == 64 and real.parent.name == "blobs":
        return real.name  # the hub's cache names large files by their SHA-256
    status = real.stat()
    digest = hashlib.sha256()
    for chunk in _chunks(real, status.st_size if status.st_size <= _READ_WHOLE else _READ_HEAD):
        digest.update(chunk)
    written = "" if status.st_size <= _READ_WHOLE else f"@{status.st_mtime_ns}"
    return f"{status.st_size}:{digest.hexdigest()}{written}"


def _chunks(path: Path, most: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while most > 0 and (chunk := file.read(min(_CHUNK, most))):
            most -= len(chunk)
            yield chunk


def _machine() -> list[str]:
    """What computes: settings that are ``auto`` follow from it."""
    import torch
    import transformers

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cpu = torch.backends.cpu.get_cpu_capability()
    return [torch.__version__, transformers.__version__, platform.machine(), cpu, *devices]


@cache
def _code_print() -> str:
    """The version, and the sources of everything that computes, so that a changed kernel is another model."""
    root = Path(kvq.__file__).parent
    digest = hashlib.sha256(kvq.__version__.encode())
    for folder in ("engine", "kernels"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
