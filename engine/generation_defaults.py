"""The sampling options a model's authors recommend: ``generation_config.json``.

Owns which of its fields are taken. Knows nothing of requests. Source: vLLM's ``generation_config="auto"``, whose
fields these are, ``max_new_tokens`` excepted: an answer ends where the request or the model ends it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvq.engine.config import EngineConfig
from kvq.engine.errors import ConfigError, InvalidParameter
from kvq.engine.request import MODEL_DEFAULT_FIELDS, SamplingParams
from kvq.engine.tokenizer import ModelSource


def load_generation_defaults(config: EngineConfig) -> dict[str, Any]:
    """Values for SamplingParams, of the options the model's generation_config sets; empty with ``vllm``.

    Raises:
        ConfigError: a value is out of range.
    """
    from transformers.utils.hub import cached_file

    source = ModelSource.resolve(config.model)
    if config.generation_config == "vllm" or source.gguf_file is not None:
        return {}
    try:
        file = cached_file(source.path, "generation_config.json")
    except OSError:  # many models ship none
        return {}
    # The file itself, not GenerationConfig, which fills in values that the authors never set.
    declared = json.loads(Path(file).read_text(encoding="utf-8"))
    defaults = {name: declared[name] for name in MODEL_DEFAULT_FIELDS if declared.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except (InvalidParameter, TypeError) as err:
        raise ConfigError(
            "generation_config", f"the model's own default cannot be used ({err}); set generation_config to vllm"
        ) from err
    return defaults
