"""Tokenizer: text to token ids and back, with the model's chat template.

Owns the Hugging Face tokenizer and where a model's files are. Knows nothing of requests. Thread safe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.engine import gguf_cache
from kvq.engine.config import PACKAGE_PREFIX, EngineConfig, packaged_gguf
from kvq.engine.errors import ModelError, RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece writes a byte that is no token by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where ``from_pretrained`` finds a model: a folder or hub id, and a GGUF file name inside the folder."""

    path: str
    gguf_file: str | None = None

    @classmethod
    def resolve(cls, model: str, setting: str = "model") -> ModelSource:
        """Read a ``setting`` that names a model.

        Raises:
            ModelError: when it names a local path that does not exist.
            ConfigError: when it names a package that is not there.
        """
        if model.startswith(PACKAGE_PREFIX):
            file = packaged_gguf(model, setting)
            return cls(path=str(file.parent), gguf_file=file.name)
        path = Path(model).expanduser()
        if path.suffix == ".gguf":
            if not path.is_file():
                raise ModelError(f"{setting}: there is no file {path}")
            return cls(path=str(path.parent), gguf_file=path.name)
        if path.is_dir():
            return cls(path=str(path))
        if model.startswith((".", "/", "~")):
            raise ModelError(f"{setting}: there is no folder {path}")
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
        self._added_tokens = frozenset(hf_tokenizer.get_added_vocab())
        self._byte_by_char = _byte_alphabet() if _is_byte_level(hf_tokenizer) else None
        self._special = _special_tokens(hf_tokenizer)
        self._before = () if self._byte_by_char is not None else self._token_before()

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
    def hf(self) -> Any:
        """The Hugging Face tokenizer."""
        return self._hf

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return len(self._hf)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token spells; a token may be a part of a character."""
        token = self._hf.convert_ids_to_tokens(token_id)
        if token is None:  # a column of the logits that the vocabulary does not use
            return b""
        if token in self._added_tokens:
            return str(token).encode()
        if self._byte_by_char is not None:
            if all(char in self._byte_by_char for char in token):
                return bytes(self._byte_by_char[char] for char in token)
            return str(token).encode()
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return str(token).replace("\u2581", " ").encode("utf-8", "replace")

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, at the start of a text and after a space (vLLM's two)."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            found[plain] = None
            # A tokenizer that splits the space off would have the second sequence bar the word's end everywhere.
            if spaced[:1] != plain[:1] and len(spaced) == len(plain):
                found[spaced] = None
        return tuple(ids for ids in found if ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        ids: list[int] = self._hf(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, on all cores."""
        if not texts:
            return []
        ids: list[list[int]] = self._hf(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def chat_template(self, *, with_tools: bool = False) -> str | None:
        """The Jinja source of the chat template, of the one for tools where a model has several; None without any."""
        templates = self._hf.chat_template
        if isinstance(templates, dict):
            name = "tool_use" if with_tools and "tool_use" in templates else "default"
            templates = templates.get(name)
        return None if templates is None else str(templates)

    def is_special(self, token: int | str) -> bool:
        """True for a token, by its id or as it is written, that ``skip_special_tokens`` leaves out."""
        return token in (self._special.values() if isinstance(token, str) else self._special)

    def chat_text(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """A chat as the text the model reads, special tokens spelled out, ready for the assistant's answer.

        ``continue_final_message``: ready for more of the last message instead (``add_generation_prompt`` is then off).

        Raises:
            RequestError: when the model has no chat template, or its template refuses the messages.
        """
        import jinja2

        if self._hf.chat_template is None:
            raise RequestError("the model has no chat template; use /v1/completions with a prompt")
        try:
            text: str = self._hf.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as err:
            raise RequestError(f"messages: the model's chat template refused them: {err}") from err
        return text

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer.

        Raises:
            RequestError: as ``chat_text``.
        """
        return self.encode(self.chat_text(messages, tools=tools, **template_kwargs), add_special_tokens=False)

    def continuation(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """What token ids add to a text that they follow, exactly as the tokens spell it."""
        whole = self.decode([*self._before, *token_ids], skip_special_tokens=skip_special_tokens)
        return whole[len(self._before) :]

    def _token_before(self) -> tuple[int, ...]:
        """A token of one letter: sentencepiece takes the first space from a text, not from the middle of one."""
        last = self.encode("a", add_special_tokens=False)[-1:]
        return tuple(last) if self.decode(last) == "a" else ()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids as a whole text."""
        text: str = self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _special_tokens(hf: Any) -> dict[int, str]:
    """Those with a role (begin, end) and those that are only marked as special, such as ``[TOOL_CALLS]``."""
    marked = {token_id: str(token) for token_id, token in hf.added_tokens_decoder.items() if token.special}
    return marked | dict(zip(hf.all_special_ids, hf.all_special_tokens, strict=True))


def _is_byte_level(hf: Any) -> bool:
    """True where tokens are written in the byte alphabet of GPT-2, as the tokenizer's decoder says."""
    backend = getattr(hf, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


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
