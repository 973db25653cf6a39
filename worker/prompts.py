"""Prompts: a parsed body as token ids, and what a model refuses as an error of its row.

Owns the one way from body to tokens, shared by the worker that runs rows and the plan that only looks at them.
Knows the tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.engine.errors import InvalidParameter, PromptTooLong, RequestError
from kvq.engine.tokenizer import Tokenizer
from kvq.worker.bodies import ParsedBody
from kvq.worker.errors import RowError
from kvq.worker.tool_notations import Notation, notation_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """What a tokenizer is given for a body. A chat's text spells its special tokens itself."""

    text: str
    add_special_tokens: bool


def prompt_text(tokenizer: Tokenizer, parsed: ParsedBody) -> PromptText | tuple[int, ...]:
    """The text of a body's prompt or messages, or the token ids where it gives those.

    Raises:
        RequestError: the model has no chat template, or its template refuses the messages.
        RowError: the template leaves out what the body asks for.
    """
    if parsed.messages is None:
        assert parsed.embedding is None, "an embedding body may hold several prompts"
        assert parsed.prompt is not None
        if isinstance(parsed.prompt, str):
            return PromptText(text=parsed.prompt, add_special_tokens=True)
        return parsed.prompt
    tools = None if parsed.tools is None else list(parsed.tools)
    _check_template(tokenizer, parsed)
    asked, variables = parsed.template, dict(parsed.template.kwargs)
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    text = tokenizer.chat_text(
        parsed.messages,
        tools=tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **variables,
    )
    return PromptText(text=text, add_special_tokens=False)


def _check_template(tokenizer: Tokenizer, parsed: ParsedBody) -> None:
    """Refuse what the model's chat template would silently leave out."""
    effort, calls = parsed.template.reasoning_effort, parsed.tool_use
    if effort in (None, "none") and calls is None and parsed.tools is None:
        return
    template = tokenizer.chat_template(with_tools=parsed.tools is not None) or ""
    if effort not in (None, "none") and "reasoning_effort" not in template:
        raise RowError(
            "unsupported_field", "reasoning_effort: the model's chat template has no such", param="reasoning_effort"
        )
    if parsed.tools is not None and "tools" not in template:
        raise RowError("unsupported_field", "tools: the model's chat template does not show any", param="tools")
    if calls is not None and not calls.forced and notation_of(template) is None:
        raise RowError(
            "unsupported_field",
            "tool_choice: calls are not read in the notation of this model's chat template, only in those of "
            f'{", ".join(Notation)}; "required" or a named function is kept in a form instead, "none" gives plain text',
            param="tool_choice",
        )


def prompt_token_ids(tokenizer: Tokenizer, parsed: ParsedBody) -> tuple[int, ...]:
    """Token ids of a body's prompt or messages.

    Raises:
        RequestError: as ``prompt_text``.
    """
    prompt = prompt_text(tokenizer, parsed)
    if isinstance(prompt, PromptText):
        return tuple(tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens))
    return prompt


def prompt_texts(tokenizer: Tokenizer, parsed: ParsedBody) -> tuple[PromptText | tuple[int, ...], ...]:
    """``prompt_text`` of each prompt of a body: only one of an embedding body may have several."""
    if parsed.embedding is None:
        return (prompt_text(tokenizer, parsed),)
    return tuple(
        PromptText(text=item, add_special_tokens=True) if isinstance(item, str) else item
        for item in parsed.embedding.inputs
    )


def prompts_token_ids(tokenizer: Tokenizer, parsed: ParsedBody) -> list[tuple[int, ...]]:
    """Token ids of each input of an embedding body."""
    assert parsed.embedding is not None
    inputs = parsed.embedding.inputs
    encoded = iter(tokenizer.encode_many([item for item in inputs if isinstance(item, str)]))
    return [tuple(next(encoded)) if isinstance(item, str) else item for item in inputs]


def row_error(err: RequestError | UnicodeError, parsed: ParsedBody) -> RowError:
    """Why the row of ``parsed`` cannot run, in terms of the fields it has."""
    if isinstance(err, PromptTooLong):
        return RowError(err.code, str(err))
    if isinstance(err, InvalidParameter):
        blamed = err.param
        if parsed.embedding is not None and blamed == "prompt":
            blamed = "input"
        if parsed.form_field is not None and blamed.startswith("structured_outputs"):
            blamed = parsed.form_field
        return RowError("invalid_value", f"{blamed}: {err.message}", param=blamed)
    return RowError("invalid_value", str(err))
