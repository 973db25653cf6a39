"""Lines: one line of an input file, in OpenAI's batch form or the short form.

Owns what a line must hold and what its errors say. Knows no file: lines come in as bytes without white space around
them. Invariant: ``read_line`` raises nothing, whatever the bytes; what is wrong is in the line it returns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from kvq.worker.errors import RowError
from kvq.worker.jobs import Endpoint
from kvq.worker.json_values import RepeatedName, as_text, distinct_members, json_kind, wrong_type

MAX_CUSTOM_ID_LENGTH = 512
MAX_DEDUP_KEY_LENGTH = 512
_LINE_FIELDS = ("custom_id", "method", "url", "body")
_DEDUP_KEY = "dedup_key"  # ours, in either form
_ENDPOINT_BY_URL = {endpoint.value: endpoint for endpoint in Endpoint}


@dataclass(slots=True, kw_only=True)
class Line:
    """One line as read; its body is not looked into. Where ``error`` is set, the rest is what could still be told."""

    custom_id: str
    has_own_id: bool
    endpoint: Endpoint
    body: dict[str, Any]
    error: RowError | None
    dedup_key: str | None = None


def read_line(line_no: int, raw: bytes) -> Line:
    """Take a line apart."""
    try:
        return _read(line_no, raw, _DECODER)
    except RepeatedName as err:
        line = reread_line(line_no, raw)
        line.error = line.error or RowError("invalid_value", str(err), param=err.name)
        return line


def reread_line(line_no: int, raw: bytes) -> Line:
    """As ``read_line``, in less time: names that are given twice are not looked for again."""
    return _read(line_no, raw, _LENIENT_DECODER)


def _read(line_no: int, raw: bytes, decoder: json.JSONDecoder) -> Line:
    custom_id: str | None = None
    endpoint = Endpoint.CHAT
    body: dict[str, Any] = {}
    error: RowError | None = None
    dedup_key: str | None = None
    try:
        row = _parse_object(raw, decoder)
        if _DEDUP_KEY in row:
            dedup_key = checked_dedup_key(row.pop(_DEDUP_KEY))
        custom_id = _custom_id(row)
        endpoint, body = _request(row)
    except RowError as err:
        error = err
    return Line(
        custom_id=f"line-{line_no}" if custom_id is None else custom_id,
        has_own_id=custom_id is not None,
        endpoint=endpoint,
        body=body,
        error=error,
        dedup_key=dedup_key,
    )


def checked_dedup_key(value: Any) -> str | None:
    """``dedup_key`` as it came: text, None where there is none.

    Raises:
        RowError: it is something else, empty, or too long.
    """
    if value is None:
        return None
    key = as_text(_DEDUP_KEY, value)
    if not 0 < len(key) <= MAX_DEDUP_KEY_LENGTH:
        message = f"{_DEDUP_KEY}: must have 1 to {MAX_DEDUP_KEY_LENGTH} characters, got {len(key)}"
        raise RowError("invalid_value", message, param=_DEDUP_KEY)
    return key


def _parse_object(raw: bytes, decoder: json.JSONDecoder) -> dict[str, Any]:
    try:
        row = decoder.decode(raw.decode("utf-8"))
    except RepeatedName:
        raise
    except UnicodeDecodeError as err:
        raise RowError("invalid_json", f"is not UTF-8 (byte {err.start + 1} of the line)") from err
    except json.JSONDecodeError as err:
        raise RowError("invalid_json", f"is not valid JSON: {err.msg} at column {err.colno}") from err
    except (ValueError, RecursionError) as err:  # NaN; an integer of thousands of digits; nested without end
        raise RowError("invalid_json", f"is not valid JSON: {err}") from err
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"is {json_kind(row)}, not an object")
    return row


def _custom_id(row: dict[str, Any]) -> str | None:
    """``custom_id``, or ``id`` in the short form, where a number will do."""
    if "custom_id" in row and "id" in row:
        raise RowError("unknown_field", "id: is given beside custom_id; keep one of them", param="id")
    name = "custom_id" if "custom_id" in row else "id"
    value = row.get(name)
    if value is None:
        return None
    if name == "id" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    custom_id = as_text(name, value)
    if not custom_id:
        raise RowError("invalid_value", f"{name}: is empty", param=name)
    if "\0" in custom_id:
        raise RowError("invalid_value", f"{name}: holds a NUL character, which SQL cannot store", param=name)
    if len(custom_id) > MAX_CUSTOM_ID_LENGTH:
        raise RowError(
            "invalid_value",
            f"{name}: has {len(custom_id)} characters; at most {MAX_CUSTOM_ID_LENGTH} are allowed",
            param=name,
        )
    return custom_id


def _request(row: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint and body of a line in either form. A prompt at the top makes it the short form."""
    if "messages" in row or "prompt" in row or "input" in row:
        return _short_form(row)
    if "id" in row and row.keys().isdisjoint(("method", "url", "body")):
        message = "prompt: is missing; a line in the short form has messages, prompt or input"
        raise RowError("missing_field", message, param="prompt")
    for name in row:
        if name not in _LINE_FIELDS:
            raise RowError(
                "unknown_field",
                f"{name}: is not a field of a line; a line has {', '.join(_LINE_FIELDS)} "
                "or, in the short form, messages, prompt or input",
                param=name,
            )
    if len(row) < len(_LINE_FIELDS) or None in row.values():
        missing = [name for name in _LINE_FIELDS if row.get(name) is None]
        raise RowError(
            "missing_field",
            f"{', '.join(missing)}: missing; a line has {', '.join(_LINE_FIELDS)} "
            "or, in the short form, messages, prompt or input",
            param=missing[0],
        )
    if row["method"] != "POST":
        raise RowError("invalid_value", f"method: must be POST, got {row['method']!r}", param="method")
    url = as_text("url", row["url"])
    if url not in _ENDPOINT_BY_URL:
        raise RowError("unknown_url", f"url: must be {' or '.join(Endpoint)}, got {url!r}", param="url")
    if not isinstance(row["body"], dict):
        raise wrong_type("body", "an object", row["body"])
    return _ENDPOINT_BY_URL[url], row["body"]


def _short_form(row: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    for name in ("method", "url", "body"):
        if name in row:
            raise RowError(
                "unknown_field", f"{name}: is given beside a prompt; the prompt belongs into the body", param=name
            )
    prompts = [name for name in ("messages", "prompt", "input") if name in row]
    if len(prompts) > 1:
        raise RowError(
            "unknown_field", f"{prompts[1]}: is given beside {prompts[0]}; keep one of them", param=prompts[1]
        )
    body = {name: value for name, value in row.items() if name not in ("id", "custom_id")}
    return Endpoint.of(body), body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=distinct_members)
_LENIENT_DECODER = json.JSONDecoder(parse_constant=_no_constant)
