"""Chats: the messages of a body, and what it asks of the model's chat template.

Owns the fields of a message, and those that change how messages become a prompt. Knows no tokenizer: whether a
template reads what is set for it is said where it is known (prompts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq.worker.errors import RowError
from kvq.worker.json_values import as_boolean, as_list, as_object, as_text, refuse_others, wrong_type
from kvq.worker.tools import read_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = frozenset({"chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What chat templates read of a message.
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"})
# What a body has a field of its own for, and arguments of transformers' apply_chat_template that are no variables.
_NOT_VARIABLES = frozenset(
    {
        *("self", "messages", "conversation", "conversations", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "sanitize_control_tokens", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateUse:
    """How messages become a prompt.

    ``kwargs``: variables for the template. ``reasoning_effort``: one of them, refused where the template has no such.
    ``add_generation_prompt``: the prompt ends with the beginning of an answer. ``continue_final_message``: it ends with
    the last message, which the answer goes on with.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def read_template_use(fields: Mapping[str, Any]) -> ChatTemplateUse:
    """What ``fields`` (without nulls) ask of the chat template.

    Raises:
        RowError: naming the field that is wrong.
    """
    kwargs = as_object("chat_template_kwargs", fields.get("chat_template_kwargs", {}))
    for name in kwargs:
        if name in _NOT_VARIABLES:
            where = f"chat_template_kwargs.{name}"
            raise RowError("unsupported_field", f"{where}: is no variable of a chat template", param=where)
    effort = fields.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise RowError(
            "invalid_value",
            f"reasoning_effort: must be one of {', '.join(EFFORTS)}, got {effort!r}",
            param="reasoning_effort",
        )
    continues = as_boolean("continue_final_message", fields.get("continue_final_message", False))
    adds = as_boolean("add_generation_prompt", fields.get("add_generation_prompt", not continues))
    if continues and adds:
        raise RowError(
            "invalid_value",
            "continue_final_message: cannot be used together with add_generation_prompt",
            param="continue_final_message",
        )
    return ChatTemplateUse(
        kwargs=kwargs, reasoning_effort=effort, add_generation_prompt=adds, continue_final_message=continues
    )


def read_messages(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The messages of ``fields``, as chat templates take them.

    Raises:
        RowError: naming the part that is missing, not supported or of a wrong type.
    """
    if "messages" not in fields:
        raise RowError(
            "missing_field", "messages: is missing; a chat completion needs a list of messages", param="messages"
        )
    messages = as_list("messages", fields["messages"])
    if not messages:
        raise RowError("invalid_value", "messages: is empty; give at least one message", param="messages")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(where: str, message: Any) -> dict[str, Any]:
    given = {name: value for name, value in as_object(where, message).items() if value is not None}
    if given.get("annotations") == []:  # in every message that OpenAI's own client sends back
        del given["annotations"]
    for name in given:
        if name not in _MESSAGE_FIELDS:
            raise RowError(
                "unsupported_field", f"{where}.{name}: is not supported in a message", param=f"{where}.{name}"
            )
    if "role" not in given:
        raise RowError("missing_field", f"{where}.role: is missing", param=f"{where}.role")
    role = as_text(f"{where}.role", given["role"])
    if role not in ROLES:
        raise RowError(
            "invalid_value", f"{where}.role: must be one of {', '.join(ROLES)}, got {role!r}", param=f"{where}.role"
        )
    if given.get("tool_calls") is not None:
        given["tool_calls"] = read_calls(f"{where}.tool_calls", given["tool_calls"])
    if "content" not in given:
        if role == "assistant" and given.get("tool_calls"):
            return {**given, "content": ""}
        raise RowError("missing_field", f"{where}.content: is missing", param=f"{where}.content")
    return {**given, "content": _content(f"{where}.content", given["content"])}


def _content(where: str, content: Any) -> str:
    """Plain text. Text parts are joined by newlines, as vLLM does for templates that take strings."""
    if isinstance(content, str):
        return as_text(where, content)
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of text parts", content)
    texts = []
    for i, part in enumerate(content):
        given = as_object(f"{where}[{i}]", part)
        kind = given.pop("type", None)
        if kind != "text":
            raise RowError(
                "unsupported_field",
                f"{where}[{i}]: parts of type {kind!r} are not supported, only text",
                param=f"{where}[{i}].type",
            )
        texts.append(as_text(f"{where}[{i}].text", given.pop("text", None)))
        refuse_others(f"{where}[{i}]", given)
    return "\n".join(texts)
