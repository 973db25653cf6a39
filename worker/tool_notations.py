"""Notations: how chat templates have a model write its calls of tools, and how such calls are read out of an answer.

Owns the marks by which a template's notation is told, and a reader for each. Knows no tokenizer and no OpenAI objects.
Invariant: an answer is calls, with the text before them, or it is text; never a part of a call, never a guess.
Sources: NousResearch/Hermes-Function-Calling (prompt format), also of Qwen 2.5 and Qwen 3; the templates of
Mistral-7B-Instruct-v0.3 and of Llama-3.1-8B-Instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import StrEnum
from typing import Any

Call = tuple[str, str]  # the name, the arguments as JSON text


class Notation(StrEnum):
    """The notations that are read.

    Hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.
    Mistral: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``, one list.
    Llama 3: ``{"name": ..., "parameters": {...}}``, one, as the whole answer.
    """

    HERMES = "Hermes"
    MISTRAL = "Mistral"
    LLAMA = "Llama 3"

    @property
    def opening(self) -> str | None:
        """The token that must be seen to tell calls from text; None where there is none."""
        return {Notation.HERMES: _HERMES_OPENING, Notation.MISTRAL: _MISTRAL_OPENING}.get(self)

    @property
    def call_id_length(self) -> int | None:
        """How many letters and digits the template wants a call's id to have when it is sent back; None: any text."""
        return 9 if self is Notation.MISTRAL else None


_HERMES_OPENING, _MISTRAL_OPENING, _LLAMA_OPENING = "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# Qwen 3 Coder and GLM use the tags of Hermes around a notation of their own.
_NOT_HERMES = ("<function=", "<arg_key>")
_MISTRAL_MARK = "[TOOL_CALLS] ["  # later templates put no list there
_LLAMA_MARK = '"parameters": dictionary of argument name and its value'


def notation_of(template: str) -> Notation | None:
    """The notation that a chat template (its Jinja source) has calls written in; None for one that is not read."""
    if _HERMES_OPENING in template:
        return None if any(mark in template for mark in _NOT_HERMES) else Notation.HERMES
    if _MISTRAL_MARK in template:
        return Notation.MISTRAL
    return Notation.LLAMA if _LLAMA_MARK in template else None


def read_answer(notation: Notation, text: str, names: Collection[str]) -> tuple[list[Call], str | None]:
    """The calls in an answer and the text before them (None for none); no calls and the whole text where it is text.

    ``names``: the tools offered; where nothing marks a call, only one of these is one.
    """
    if notation is Notation.HERMES:
        return _read_hermes(text)
    return _read_mistral(text) if notation is Notation.MISTRAL else _read_llama(text, names)


def parsed_json(text: str) -> Any:
    """The JSON value of a text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_hermes(text: str) -> tuple[list[Call], str | None]:
    found, first = [], None
    for match in _HERMES_CALL.finditer(text):
        call = _call(parsed_json(match[1]), "arguments")
        if call is None:
            return [], text
        first = match.start() if first is None else first
        found.append(call)
    before = text[:first].strip() if first is not None else text
    return found, before or None


def _read_mistral(text: str) -> tuple[list[Call], str | None]:
    before, _, after = text.partition(_MISTRAL_OPENING)
    calls = parsed_json(after)
    found = [_call(call, "arguments") for call in calls] if isinstance(calls, list) else []
    if not found or None in found:
        return [], text
    return [call for call in found if call is not None], before.strip() or None


def _read_llama(text: str, names: Collection[str]) -> tuple[list[Call], str | None]:
    value = parsed_json(text.strip().removeprefix(_LLAMA_OPENING))
    call = _call(value, "parameters") if isinstance(value, dict) and value.keys() == {"name", "parameters"} else None
    return ([], text) if call is None or call[0] not in names else ([call], None)


def _call(value: Any, arguments_key: str) -> Call | None:
    arguments = value.get(arguments_key, {}) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
