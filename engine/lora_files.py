"""Adapter files: a PEFT folder as low-rank weights by module name, or a refusal.

Owns what an adapter may be: the fields of ``adapter_config.json`` and the tensors of ``adapter_model.safetensors``.
Knows the names and sizes of the linear layers it may target, no network and no requests. Invariants: pickles are never
read; nothing that an adapter asks for is dropped silently, it is computed or the adapter is refused by name and field.
Source: PEFT's checkpoint format, https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvq.engine.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<part>lora_[AB])(?:\.default)?\.weight")

# Fields that only training reads, or that the weights themselves answer.
_WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "lora_dropout",
        "fan_in_fan_out",  # of the base layer's weight; A and B lie the same way in either case
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "eva_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)
_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
# Ways to begin training that leave the base model's weights as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Sizes of a linear layer that adapters may target."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """One module's delta: ``y += (x A^T) B^T``. ``a`` [r, in], ``b`` [out, r] with the scale multiplied in; float32."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    """What ``adapter_config.json`` says of ranks and scales."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    rank_stabilised: bool

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732, section 3)."""
        rank = self.rank_of(module)
        return float(_matching(self.alpha_pattern, module, self.alpha)) / (rank**0.5 if self.rank_stabilised else rank)


def read_adapter(name: str, folder: Path, *, modules: Mapping[str, LinearShape], max_rank: int) -> dict[str, LoraPair]:
    """Read the adapter ``name`` for a model whose linear layers are ``modules``.

    Raises:
        AdapterError: naming the adapter and the field or tensor that is missing, wrong or not supported.
    """
    if not folder.is_dir():
        raise AdapterError(name, f"there is no folder {folder}")
    declared = _read_config(name, folder / CONFIG_FILE)
    halves = _read_weights(name, folder)
    pairs: dict[str, LoraPair] = {}
    for module, parts in halves.items():
        shape = modules.get(module)
        if shape is None:
            raise AdapterError(name, f"target_modules: {module} is not a linear layer that kvq adapts in this model")
        if set(parts) != {"lora_A", "lora_B"}:
            raise AdapterError(name, f"{WEIGHTS_FILE}: {module} has only one of lora_A and lora_B")
        rank = declared.rank_of(module)
        if rank > max_rank:
            raise AdapterError(name, f"r: is {rank} for {module}, but max_lora_rank is {max_rank}; raise the setting")
        expected = {"lora_A": (rank, shape.in_features), "lora_B": (shape.out_features, rank)}
        for part, tensor in parts.items():
            if tuple(tensor.shape) != expected[part]:
                raise AdapterError(
                    name,
                    f"{WEIGHTS_FILE}: {module}.{part} is {_by(tensor.shape)}, but r and the model make it "
                    f"{_by(expected[part])}; the adapter was trained for another model",
                )
            if not bool(torch.isfinite(tensor).all()):
                raise AdapterError(name, f"{WEIGHTS_FILE}: {module}.{part} holds values that are not finite")
        b = parts["lora_B"].float() * declared.scale_of(module)
        pairs[module] = LoraPair(a=parts["lora_A"].float().contiguous(), b=b.contiguous())
    return pairs


def _read_config(name: str, file: Path) -> _Declared:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise AdapterError(name, f"cannot read {file}: {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:
        raise AdapterError(name, f"{CONFIG_FILE} is not JSON: {err}") from err
    if not isinstance(config, dict):
        raise AdapterError(name, f"{CONFIG_FILE} is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(name, f"peft_type: must be LORA, got {config.get('peft_type')!r}")
    if config.get("bias", "none") != "none":
        raise AdapterError(name, f"bias: must be none, got {config['bias']!r}; trained biases are not supported")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise AdapterError(
            name,
            f"init_lora_weights: {config['init_lora_weights']!r} changes the base model's weights; "
            "save the adapter converted to plain LoRA (path_initial_model_for_weight_conversion)",
        )
    for field, value in config.items():
        if field not in _READ and field not in _WITHOUT_EFFECT and value not in (None, False, [], {}, ""):
            raise AdapterError(name, f"{field}: is {_shown(value)}, which is not supported; only plain LoRA is")
    return _Declared(
        rank=_positive(name, "r", config.get("r", 8)),
        alpha=_number(name, "lora_alpha", config.get("lora_alpha", 8)),
        rank_pattern=_pattern(name, "rank_pattern", config, _positive),
        alpha_pattern=_pattern(name, "alpha_pattern", config, _number),
        rank_stabilised=config.get("use_rslora") is True,
    )


def _read_weights(name: str, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors by module, then ``lora_A`` or ``lora_B``."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        hint = f"; {_PICKLE_FILE} is a pickle, save it as safetensors" if (folder / _PICKLE_FILE).is_file() else ""
        raise AdapterError(name, f"there is no {WEIGHTS_FILE} in {folder}{hint}")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as err:
        raise AdapterError(name, f"{WEIGHTS_FILE} cannot be read: {err}") from err
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(name, f"{WEIGHTS_FILE}: {key}: {_why_refused(key)}")
        halves.setdefault(match["module"], {})[match["part"]] = tensor
    if not halves:
        raise AdapterError(name, f"{WEIGHTS_FILE} holds no weights")
    return halves


def _why_refused(key: str) -> str:
    if "lora_embedding" in key:
        return "adapters of embeddings are not supported"
    if "lora_magnitude" in key:
        return "DoRA is not supported"
    return "is not the lora_A or lora_B of a linear layer, and nothing else is supported"


def _pattern(name: str, field: str, config: Mapping[str, Any], read: Any) -> dict[str, Any]:
    pattern = config.get(field) or {}
    if not isinstance(pattern, dict):
        raise AdapterError(name, f"{field}: must be an object, got {_shown(pattern)}")
    for key in pattern:
        try:
            re.compile(key)
        except re.error as err:
            raise AdapterError(name, f"{field}: {key!r} is not a regular expression: {err}") from err
    return {key: read(name, f"{field}.{key}", value) for key, value in pattern.items()}


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The first entry whose key is the end of the module's name, or matches it as PEFT's patterns do."""
    return next((value for key, value in pattern.items() if re.fullmatch(rf"(?:.*\.)?(?:{key})", module)), default)


def _positive(name: str, field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(name, f"{field}: must be a positive integer, got {_shown(value)}")
    return value


def _number(name: str, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(name, f"{field}: must be a number, got {_shown(value)}")
    return float(value)


def _by(shape: Any) -> str:
    return " by ".join(map(str, shape))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
