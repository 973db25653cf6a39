"""Limits: how large one request may be, so that one row can neither exhaust a worker nor stall it.

Owns the numbers. Looks at sizes only; types and meanings are checked elsewhere, and values of a wrong type pass.
Invariant: what is checked here costs time in proportion to its size, whatever it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvq.worker.errors import RowError

MAX_DEPTH = 64
MAX_PROMPT_BYTES = 8 * 2**20
MAX_PROMPT_TOKEN_IDS = 2**21
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIASES = 10_000
MAX_FORM_BYTES = 2**17
MAX_REGEX_CHARS = 2**13

_FORM_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_choice", "guided_grammar")


def check_limits(fields: Mapping[str, Any]) -> None:
    """Refuse a body that is too large in one of its parts.

    Raises:
        RowError: naming the field, its size and the limit.
    """
    check_depth(fields)
    _at_most("prompt", _prompt_bytes(fields), MAX_PROMPT_BYTES, "bytes")
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        _at_most("prompt", len(prompt), MAX_PROMPT_TOKEN_IDS, "tokens")
    for name in ("stop", "bad_words"):
        _check_strings(name, fields.get(name), most=MAX_STOP_STRINGS if name == "stop" else None)
    biases = fields.get("logit_bias")
    if isinstance(biases, dict):
        _at_most("logit_bias", len(biases), MAX_LOGIT_BIASES, "entries")
    for name in _FORM_FIELDS:
        if fields.get(name) is not None:
            _at_most(name, _json_bytes(fields[name]), MAX_FORM_BYTES, "bytes")
    nested = fields.get("structured_outputs")
    for name, pattern in (
        ("guided_regex", fields.get("guided_regex")),
        ("structured_outputs.regex", nested.get("regex") if isinstance(nested, dict) else None),
    ):
        if isinstance(pattern, str):
            _at_most(name, len(pattern), MAX_REGEX_CHARS, "characters")


def check_depth(value: Any) -> None:
    """Refuse what is nested too deeply, without recursion.

    Raises:
        RowError: it is.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        if not level:
            return
    raise RowError("invalid_value", f"the body is nested more than {MAX_DEPTH} levels deep")


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container


def _prompt_bytes(fields: Mapping[str, Any]) -> int:
    total = 0
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        total += len(prompt.encode("utf-8", "surrogatepass"))
    for name in ("messages", "tools"):
        if isinstance(fields.get(name), list):
            total += _json_bytes(fields[name])
    return total


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"))


def _check_strings(name: str, value: Any, *, most: int | None) -> None:
    strings = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    if most is not None:
        _at_most(name, len(strings), most, "strings")
    for string in strings:
        if isinstance(string, str):
            _at_most(name, len(string), MAX_STOP_CHARS, "characters in a string")


def _at_most(name: str, size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise RowError("invalid_value", f"{name}: has {size:,} {unit}, the limit is {limit:,}", param=name)
