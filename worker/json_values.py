"""Typed values out of parsed JSON: each reader returns the value it was asked for or refuses the row.

Owns the wording of "must be X, got Y". Knows no field: the caller passes the name to blame.
Invariant: what a reader returns can be encoded as UTF-8 and holds no NaN or infinity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvq.worker.errors import RowError

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")  # as text it is written in one way only


class RepeatedName(ValueError):
    """A JSON object has a member twice: which of them was meant, nobody can tell."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: is given twice")
        self.name = name


def distinct_members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object as json's ``object_pairs_hook`` has it.

    Raises:
        RepeatedName: two of its members have the same name.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedName(next(name for name in names if names.count(name) > 1))
    return members


def wrong_type(name: str, wanted: str, value: Any) -> RowError:
    return RowError("invalid_type", f"{name}: must be {wanted}, got {json_kind(value)}", param=name)


def json_kind(value: Any) -> str:
    """The JSON name of a value's type, with an article: for messages to people."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list | tuple):
        return "an array"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def as_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as err:
        raise RowError(
            "invalid_value",
            f"{name}: holds half of a surrogate pair (\\u{ord(value[err.start]):04x}), which is no text",
            param=name,
        ) from err
    return value


def as_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise RowError("invalid_value", f"{name}: must be a finite number, got {number}", param=name)
    return number


def as_integer(name: str, value: Any) -> int:
    """JSON has one kind of number: 16.0 is the integer 16."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    return value


def as_token_id(name: str, value: Any) -> int:
    token_id = as_integer(name, value)
    if token_id < 0:
        raise RowError("invalid_value", f"{name}: is {token_id}, and a token id is never negative", param=name)
    return token_id


def as_boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return value


def as_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise wrong_type(name, "an array", value)
    return list(value)


def as_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(name, "an object", value)
    return dict(value)


def as_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (as_text(name, value),)
    if not isinstance(value, list | tuple):
        raise wrong_type(name, "a string or an array of strings", value)
    return tuple(as_text(f"{name}[{i}]", item) for i, item in enumerate(value))


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(as_token_id(f"{name}[{i}]", item) for i, item in enumerate(as_list(name, value)))


def as_biases(name: str, value: Any) -> dict[int, float]:
    biases = {}
    for key, bias in as_object(name, value).items():
        if not _TOKEN_ID.fullmatch(str(key)):
            raise RowError("invalid_value", f"{name}: the key {key!r} is not a token id", param=name)
        biases[int(key)] = as_number(f"{name}[{key}]", bias)
    return biases


def refuse_others(where: str, others: Mapping[str, Any], *, hint: str = "is not supported") -> None:
    """Refuse what is left of an object once all that is known was taken out of it; null is nothing.

    Raises:
        RowError: naming the first field that is left.
    """
    for name, value in others.items():
        if value is not None:
            raise RowError("unsupported_field", f"{where}.{name}: {hint}", param=f"{where}.{name}")
