"""Prompts: a parsed body as token ids, and what a model refuses as an error of its row.

Owns the one way from body to tokens, shared by the worker that runs rows and the plan that only looks at them.
Knows the tokenizer, no engine.
"""

from __future__ import annotations

from kvq.engine.errors import InvalidParameter, PromptTooLong, RequestError
from kvq.engine.tokenizer import Tokenizer
from kvq.worker.bodies import ParsedBody
from kvq.worker.errors import RowError


def prompt_token_ids(tokenizer: Tokenizer, parsed: ParsedBody) -> tuple[int, ...]:
    """Token ids of a body's prompt or messages.

    Raises:
        RequestError: the model has no chat template, or its template refuses the messages.
    """
    if parsed.messages is None:
        prompt = parsed.prompt
        assert prompt is not None
        return tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
    tools = None if parsed.tools is None else list(parsed.tools)
    return tuple(tokenizer.apply_chat_template(parsed.messages, tools=tools, **parsed.chat_template_kwargs))


def row_error(err: RequestError | UnicodeError, parsed: ParsedBody) -> RowError:
    """Why the row of ``parsed`` cannot run, in terms of the fields it has."""
    if isinstance(err, PromptTooLong):
        return RowError(err.code, str(err))
    if isinstance(err, InvalidParameter):
        blamed = err.param
        if parsed.form_field is not None and blamed.startswith("structured_outputs"):
            blamed = parsed.form_field
        return RowError("invalid_value", f"{blamed}: {err.message}", param=blamed)
    return RowError("invalid_value", str(err))
