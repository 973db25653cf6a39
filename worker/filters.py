"""Filters: the conditions by which a person picks jobs, such as ``error_code = engine_error and line_no < 100``.

Owns the little language and its fields. Knows no database: a filter is a tuple of conditions, which the store turns
into SQL with bound parameters. Invariant: nothing of the text becomes SQL; an unknown field or operator is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kvq.worker.errors import FilterError


class Operator(StrEnum):
    """How a field is compared. ``LIKE`` is SQL's: ``%`` is any text, ``_`` any character."""

    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="
    LIKE = "like"


# Field -> the type of its values.
FIELDS: dict[str, type[str] | type[int]] = {
    "state": str,
    "custom_id": str,
    "job_id": str,
    "line_no": int,
    "queue": str,
    "endpoint": str,
    "model": str,
    "priority": int,
    "attempts": int,
    "crashes": int,
    "error_code": str,
    "error_message": str,
    "finish_reason": str,
    "worker_id": str,
    "prompt_tokens": int,
    "completion_tokens": int,
}

_TERM = re.compile(
    r"""\s*(?P<field>\w+)\s*
    (?P<operator><=|>=|!=|<>|==|=|<|>|\blike\b)\s*
    (?:'(?P<single>(?:[^']|'')*)'|"(?P<double>[^"]*)"|(?P<bare>[^\s'"<>=!]+))
    (?P<rest>\s+and\s+(?=\S)|\s*$)""",
    re.IGNORECASE | re.VERBOSE,
)
_SPELLINGS = {"<>": Operator.NOT_EQUAL, "==": Operator.EQUAL}
_EXAMPLE = "write conditions like: error_code = engine_error and line_no < 100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One comparison of a field of FIELDS with a value of its type."""

    field: str
    operator: Operator
    value: str | int


def parse_filter(text: str) -> tuple[Condition, ...]:
    """Conditions joined by ``and``; a value with spaces is quoted.

    Raises:
        FilterError: naming the place and what could stand there.
    """
    conditions: list[Condition] = []
    position = 0
    while position < len(text) or not conditions:
        term = _TERM.match(text, position)
        if term is None:
            raise FilterError(f"cannot read {text[position:].strip()!r} in the filter; {_EXAMPLE}")
        conditions.append(_condition(term))
        position = term.end()
    return tuple(conditions)


def _condition(term: re.Match[str]) -> Condition:
    name = term["field"].lower()
    if name not in FIELDS:
        raise FilterError(f"{term['field']!r} is not a field to filter by; there are {', '.join(FIELDS)}")
    spelled = term["operator"].lower()
    operator = _SPELLINGS.get(spelled) or Operator(spelled)
    if term["single"] is not None:
        value = term["single"].replace("''", "'")
    else:
        value = term["double"] if term["double"] is not None else term["bare"]
    if FIELDS[name] is str:
        return Condition(field=name, operator=operator, value=value)
    if operator is Operator.LIKE or not re.fullmatch(r"-?\d{1,18}", value):
        raise FilterError(f"{name} is a number: compare it by =, !=, <, <=, > or >= with one, not {value!r}")
    return Condition(field=name, operator=operator, value=int(value))
