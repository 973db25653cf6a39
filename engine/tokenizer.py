"""Tokenizer: text to token ids and back, with the model's chat template.

Owns the Hugging Face tokenizer and where a model's files are. Knows nothing of requests. Thread safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.engine import gguf_cache
from kvq.engine.config import PACKAGE_PREFIX, EngineConfig, packaged_gguf
from kvq.engine.errors import ModelError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where ``from_pretrained`` finds a model: a folder or hub id, and a GGUF file name inside the folder."""

    path: str
    gguf_file: str | None = None

    @classmethod
    def resolve(cls, model: str) -> ModelSource:
        """Read a ``model`` setting.

        Raises:
            ModelError: when it names a local path that does not exist.
            ConfigError: when it names a package that is not there.
        """
        if model.startswith(PACKAGE_PREFIX):
            file = packaged_gguf(model)
            return cls(path=str(file.parent), gguf_file=file.name)
        path = Path(model).expanduser()
        if path.suffix == ".gguf":
            if not path.is_file():
                raise ModelError(f"model: there is no file {path}")
            return cls(path=str(path.parent), gguf_file=path.name)
        if path.is_dir():
            return cls(path=str(path))
        if model.startswith((".", "/", "~")):
            raise ModelError(f"model: there is no folder {path}")
        return cls(path=model)

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file itself."""
        return Path(self.path) / self.gguf_file if self.gguf_file else None

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``from_pretrained``."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, hf_tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._hf = hf_tokenizer
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, config: EngineConfig) -> Tokenizer:
        """Load the tokenizer that ``config`` names; no weights are read.

        Raises:
            ModelError: when there is none.
        """
        from transformers import AutoTokenizer

        source = ModelSource.resolve(config.tokenizer or config.model)
        cached = None if source.gguf_path is None else gguf_cache.tokenizer_folder(source.gguf_path)
        if cached is not None and cached.is_dir():
            source, cached = ModelSource(path=str(cached)), None
        try:
            hf = AutoTokenizer.from_pretrained(
                source.path, trust_remote_code=config.trust_remote_code, **source.load_arguments
            )
        except (OSError, ValueError) as err:
            raise ModelError(f"cannot load a tokenizer from {source.path}: {err}") from err
        if cached is not None:
            gguf_cache.save_tokenizer(hf, cached)
        return cls(hf, _eos_token_ids(hf, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return len(self._hf)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        ids: list[int] = self._hf(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer.

        Raises:
            RequestError: when the model has no chat template, or its template refuses the messages.
        """
        import jinja2

        if self._hf.chat_template is None:
            raise RequestError("the model has no chat template; use /v1/completions with a prompt")
        try:
            text = self._hf.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as err:
            raise RequestError(f"messages: the model's chat template refused them: {err}") from err
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, exactly as the tokens spell it."""
        text: str = self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _eos_token_ids(hf: Any, config: EngineConfig) -> frozenset[int]:
    """The tokenizer's end token, and those of the model's generation_config where it has one."""
    from transformers import GenerationConfig

    ids: set[int] = set() if hf.eos_token_id is None else {int(hf.eos_token_id)}
    source = ModelSource.resolve(config.model)
    if source.gguf_file is None:
        try:
            declared = GenerationConfig.from_pretrained(source.path).eos_token_id
        except OSError:  # many models ship none
            declared = None
        if declared is not None:
            ids.update([declared] if isinstance(declared, int) else declared)
    return frozenset(ids)
