"""Are the models that settings name there at all? Asked before rows are queued and before anything large is read.

Owns the refusals that say what a model can be. Reads no weights and imports no torch; a hub is asked once, briefly, and
only for what is not in its cache. What is there may still turn out not to be loadable: that the loader says.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvq.engine.config import EngineConfig
from kvq.engine.errors import ModelError
from kvq.engine.tokenizer import ModelSource

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_TIMEOUT_S = 10.0
_WHAT_A_MODEL_IS = (
    "give a folder with config.json and *.safetensors, a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, "
    "a .gguf file or package:NAME"
)


def require_model(config: EngineConfig) -> None:
    """Refuse a model that is not there, or a tokenizer or draft model that is named apart.

    Raises:
        ModelError: neither a folder, file, package nor repository goes by that name; says what may be given.
        ConfigError: a package that is not installed, as ModelSource says.
    """
    _require("model", config.model, "config.json")
    if config.tokenizer is not None:
        _require("tokenizer", config.tokenizer, "tokenizer_config.json")
    if config.speculative_model is not None:
        _require("speculative_model", config.speculative_model, "config.json")


def _require(setting: str, named: str, needed: str) -> None:
    source = ModelSource.resolve(named, setting)
    if source.gguf_path is not None:
        return
    folder = Path(source.path)
    if not folder.is_dir():
        _require_repository(setting, source.path, needed)
    elif setting != "tokenizer":  # whose files have many names
        _require_configuration(setting, folder)


def _require_configuration(setting: str, folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{setting}: {folder} holds a LoRA adapter: name it as lora_modules NAME={folder}, and its base model as "
            "model"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        raise ModelError(f"{setting}: {folder} holds GGUF files; name one of them, such as {ggufs[0]}")
    raise ModelError(f"{setting}: the folder {folder} holds no config.json; {_WHAT_A_MODEL_IS}")


def _require_repository(setting: str, hub_id: str, needed: str) -> None:
    if _HUB_ID.fullmatch(hub_id) is None:
        raise ModelError(f"{setting}: there is no folder {hub_id}; {_WHAT_A_MODEL_IS}")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(hub_id, needed), str):
        return
    try:
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError as err:
        raise ModelError(
            f"{setting}: there is no folder {hub_id}, and the hub has no model of that name, or only for those who are "
            f"logged in (HF_TOKEN); {_WHAT_A_MODEL_IS}"
        ) from err
    except Exception as err:  # the hub's client has no common error for "cannot be asked"
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ModelError(
            f"{setting}: there is no folder {hub_id}, and the hub cannot be asked for it ({reason}); {_WHAT_A_MODEL_IS}"
        ) from err
