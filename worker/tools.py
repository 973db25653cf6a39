"""Tools: what a chat may call, and the calls that its answer holds.

Owns the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` and the form that a forced call has. Knows no
tokenizer. Calls a model makes of its own accord are read in the notation of its template (tool_notations.py); a forced
call is kept in a form instead, whatever the template. Invariant: what is no call stays text.
Source: OpenAI's function calling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.engine.errors import InvalidParameter
from kvq.engine.request import StructuredOutputsParams
from kvq.worker.errors import RowError
from kvq.worker.json_values import as_boolean, as_list, as_object, as_text, wrong_type
from kvq.worker.tool_notations import Notation, parsed_json, read_answer

FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How calls come into an answer.

    ``forced``: the answer is calls and nothing else, kept so by its form. ``function``: the one to be called.
    ``notation``: the model's, once its template is known.
    """

    names: tuple[str, ...]
    forced: bool = False
    function: str | None = None
    parallel: bool = True
    notation: Notation = Notation.HERMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a body: shown to the model; ``use`` is None where its answer is plain text.

    ``form``: of the answer, where a call is forced.
    """

    shown: tuple[dict[str, Any], ...]
    use: ToolUse | None = None
    form: StructuredOutputsParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """An answer taken apart. ``calls`` are OpenAI's objects; ``content`` is the text before them, None for none."""

    content: str | None
    calls: tuple[dict[str, Any], ...]


def read_tools(fields: Mapping[str, Any]) -> Tools | None:
    """The tools that ``fields`` (without nulls) offer; None for none.

    Raises:
        RowError: naming the field that is wrong.
    """
    tools = tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(as_list("tools", fields.get("tools", []))))
    parallel = as_boolean("parallel_tool_calls", fields.get("parallel_tool_calls", True))
    choice = fields.get("tool_choice", "auto" if tools else "none")
    if not tools:
        if choice not in ("auto", "none"):
            raise RowError("invalid_value", "tool_choice: needs tools", param="tool_choice")
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if len(functions) < len(tools):
        raise RowError("invalid_value", "tools: two of them have the same name", param="tools")
    if choice == "none":
        return Tools(shown=tools)
    names = tuple(functions)
    if choice == "auto":
        return Tools(shown=tools, use=ToolUse(names=names, parallel=parallel))
    if choice == "required":
        use = ToolUse(names=names, forced=True, parallel=parallel)
        return Tools(shown=tools, use=use, form=_form("tools", _list_schema(functions, parallel=parallel)))
    name = _chosen(choice, names)
    use = ToolUse(names=names, forced=True, function=name, parallel=parallel)
    return Tools(shown=tools, use=use, form=_form("tools", _parameters(functions[name])))


def tool_answer(text: str, use: ToolUse, *, whole: bool, key: str) -> ToolAnswer:
    """The calls in an answer.

    Args:
        whole: the answer ended by itself; calls that were cut short are no calls.
        key: what the ids of the calls are made from: the same answer has the same ids.
    """
    if use.forced:
        found = _forced_calls(text, use) if whole else None
        content: str | None = text if found is None else None
    else:
        found, content = read_answer(use.notation, text, use.names)
    if not found:
        return ToolAnswer(content=text, calls=())
    if not use.parallel:
        found = found[:1]
    calls = tuple(
        {
            "id": _call_id(f"{key}/{number}", use.notation.call_id_length),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(found)
    )
    return ToolAnswer(content=content, calls=calls)


def _call_id(key: str, length: int | None) -> str:
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"call_{digest[:24]}" if length is None else digest[:length]


def read_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """The ``tool_calls`` of a message that is sent back; arguments, which OpenAI has as JSON text, as the object that
    templates expect.

    Raises:
        RowError: naming the field that is wrong.
    """
    return [_call(f"{where}[{i}]", call) for i, call in enumerate(as_list(where, calls))]


def _call(where: str, value: Any) -> dict[str, Any]:
    call = as_object(where, value)
    function = as_object(f"{where}.function", call.get("function"))
    as_text(f"{where}.function.name", function.get("name"))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parsed_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RowError(
            "invalid_value",
            f"{where}.function.arguments: must be an object, or its JSON text",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(where: str, value: Any) -> dict[str, Any]:
    tool = as_object(where, value)
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
        raise RowError(
            "invalid_value",
            f'{where}: must be {{"type": "function", "function": {{"name": ...}}}}',
            param=where,
        )
    as_text(f"{where}.function.name", function["name"])
    if not isinstance(function.get("parameters", {}), dict | None):
        raise wrong_type(f"{where}.function.parameters", "an object", function["parameters"])
    return tool


def _chosen(choice: Any, names: tuple[str, ...]) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        raise RowError(
            "invalid_value",
            'tool_choice: must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    name = as_text("tool_choice.function.name", function.get("name"))
    if name not in names:
        raise RowError("invalid_value", f"tool_choice: there is no tool {name!r}", param="tool_choice")
    return name


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """What a function's arguments must be: an object, whatever else it says; without parameters an empty one."""
    given = function.get("parameters")
    return {**({"additionalProperties": False} if given is None else given), "type": "object"}


def _list_schema(functions: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """A list of calls, as vLLM has it.

    The parameters of each function are a schema resource of their own, so that references in them mean what they meant.
    Source: JSON Schema 2020-12, section 9.3.1 (compound documents).
    """
    calls: list[dict[str, Any]] = []
    names: set[Any] = set()
    for number, (name, function) in enumerate(functions.items()):
        parameters = {"$id": f"tool:{number}", **_parameters(function)}
        if (own := as_text(f"tools[{number}].function.parameters.$id", parameters["$id"])) in names:
            raise RowError("invalid_value", f"tools: two of them have the $id {own!r}", param="tools")
        names.add(own)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return schema if parallel else {**schema, "maxItems": 1}


def _form(field: str, schema: Mapping[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(json=schema)
    except InvalidParameter as err:
        raise RowError("invalid_value", f"{field}: {err.message}", param=field) from err


def _forced_calls(text: str, use: ToolUse) -> list[tuple[str, str]] | None:
    value = parsed_json(text)
    if use.function is not None:
        return [(use.function, text.strip())] if isinstance(value, dict) else None
    if not isinstance(value, list):
        return None
    return [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in value]
