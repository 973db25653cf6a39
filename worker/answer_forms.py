"""The fields of a body that ask for an answer in a form: OpenAI's ``response_format`` and vLLM's two spellings.

Owns their shapes and which of them exclude each other. Knows nothing of grammars: whether a schema can be followed
is decided where the model's vocabulary is known. Invariant: what an error blames is the field the row has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvq.engine.errors import InvalidParameter
from kvq.engine.request import StructuredOutputsParams
from kvq.worker.errors import RowError
from kvq.worker.json_values import as_boolean, as_object, as_strings, as_text, refuse_others, wrong_type

_RESPONSE_TYPES = ("text", "json_object", "json_schema")
_SCHEMA_LABELS: dict[str, Callable[[str, Any], Any]] = {"name": as_text, "description": as_text, "strict": as_boolean}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form asked for, and the field that asks."""

    field: str
    params: StructuredOutputsParams


def _schema(name: str, value: Any) -> Any:
    """An object, its JSON text, or true."""
    return value if isinstance(value, str | bool) else as_object(name, value)


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise wrong_type(name, "an array of strings", value)
    return as_strings(name, value)


_CONSTRAINTS: dict[str, Callable[[str, Any], Any]] = {
    "json": _schema,
    "regex": as_text,
    "choice": _choices,
    "grammar": as_text,
    "json_object": as_boolean,
}
_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "disable_any_whitespace": as_boolean,
    "whitespace_pattern": as_text,
}
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
_WHITESPACE = "guided_whitespace_pattern"

FIELDS = frozenset({"response_format", "structured_outputs", _WHITESPACE, *_GUIDED})


def answer_form(fields: Mapping[str, Any]) -> AnswerForm | None:
    """The form that ``fields`` (without nulls) ask for; None for any text.

    Raises:
        RowError: a field is wrong, or two of them ask for a form.
    """
    wanted = {name: fields[name] for name in fields if name in FIELDS and name != _WHITESPACE}
    if (whitespace := fields.get(_WHITESPACE)) is not None and "guided_json" not in wanted:
        raise RowError("invalid_value", f"{_WHITESPACE}: needs guided_json", param=_WHITESPACE)
    if wanted.get("response_format") is not None:
        format_ = _response_format(wanted.pop("response_format"))
        if format_ is not None:
            wanted["response_format"] = format_
    if len(wanted) > 1:
        names = sorted(wanted)
        raise RowError("invalid_value", f"{names[0]}: cannot be used together with {names[1]}", param=names[0])
    for name, value in wanted.items():
        if name in _GUIDED:
            settings = {_GUIDED[name]: _CONSTRAINTS[_GUIDED[name]](name, value)}
            if whitespace is not None:
                settings["whitespace_pattern"] = as_text(_WHITESPACE, whitespace)
        elif name == "structured_outputs":
            settings = _structured_outputs(value)
        else:
            settings = value
        return AnswerForm(field=name, params=_params(name, settings))
    return None


def _response_format(value: Any) -> dict[str, Any] | None:
    given = as_object("response_format", value)
    kind = given.pop("type", None)
    if kind not in _RESPONSE_TYPES:
        raise RowError(
            "unsupported_field",
            f"response_format.type: must be one of {', '.join(_RESPONSE_TYPES)}, got {kind!r}",
            param="response_format.type",
        )
    form = {"json": _named_schema(given.pop("json_schema", None))} if kind == "json_schema" else {"json_object": True}
    refuse_others("response_format", given, hint=f"is not supported with type {kind}")
    return None if kind == "text" else form


def _named_schema(value: Any) -> dict[str, Any]:
    """The schema of OpenAI's ``json_schema``; ``strict`` or not, it is kept."""
    where = "response_format.json_schema"
    given = as_object(where, value)
    schema = given.pop("schema", None)
    for name, read in _SCHEMA_LABELS.items():
        if (label := given.pop(name, None)) is not None:
            read(f"{where}.{name}", label)
    refuse_others(where, given)
    if schema is None:
        raise RowError("missing_field", f"{where}.schema: is missing", param=f"{where}.schema")
    return as_object(f"{where}.schema", schema)


def _structured_outputs(value: Any) -> dict[str, Any]:
    settings = {}
    for name, item in as_object("structured_outputs", value).items():
        where = f"structured_outputs.{name}"
        read = _CONSTRAINTS.get(name) or _OPTIONS.get(name)
        if item is None or (name in ("disable_fallback", "disable_additional_properties") and item is False):
            continue
        if read is None:
            raise RowError("unsupported_field", f"{where}: is not supported", param=where)
        settings[name] = read(where, item)
    return settings


def _params(field: str, settings: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**settings)
    except InvalidParameter as err:
        raise RowError("invalid_value", f"{field}: {err.message}", param=field) from err
