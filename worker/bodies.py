"""Request bodies: an OpenAI chat completion, completion or embedding body, checked and turned into engine terms.

Owns which fields exist, their types and what is refused. Knows no file, no SQL and no tokenizer: whether
a prompt is too long is decided where it is tokenised. Invariant: no field is dropped silently; a field is
used, is a label that cannot change the answer, has the value that means "off", or the row is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq.engine.errors import InvalidParameter
from kvq.engine.request import MODEL_DEFAULT_FIELDS, SamplingParams
from kvq.worker import answer_forms, chats, embeddings, tools
from kvq.worker.chats import ChatTemplateUse
from kvq.worker.embeddings import EmbeddingBody
from kvq.worker.errors import RowError
from kvq.worker.jobs import Endpoint
from kvq.worker.json_values import (
    as_biases,
    as_boolean,
    as_integer,
    as_number,
    as_object,
    as_strings,
    as_text,
    as_token_id,
    as_token_ids,
    wrong_type,
)
from kvq.worker.limits import check_limits
from kvq.worker.tools import ToolUse

_NOTHING_SAMPLED = SamplingParams(temperature=0, max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """What a body asks for. Exactly one of ``messages``, ``prompt`` and ``embedding`` is set.

    ``given``: those of MODEL_DEFAULT_FIELDS that the body sets; the others may come from the model's own defaults.
    ``form_field``: the field that asked for ``params.structured_outputs``.
    ``tools`` are shown to the model; ``tool_use``: how calls are read out of its answer, None where it is plain text.
    ``echo``: the prompt is given back before the answer; ``prompt_only``: instead of it (``max_tokens: 0``).
    """

    params: SamplingParams
    model: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tool_use: ToolUse | None = None
    template: ChatTemplateUse = field(default_factory=ChatTemplateUse)
    given: frozenset[str] = frozenset()
    form_field: str | None = None
    echo: bool = False
    prompt_only: bool = False
    embedding: EmbeddingBody | None = None


def parse_body(endpoint: Endpoint, body: Mapping[str, Any]) -> ParsedBody:
    """Check a body and turn it into a prompt and sampling parameters.

    Spelling is OpenAI's, plus vLLM's extra sampling fields. ``null`` means absent. The default
    temperature is 1 (OpenAI's); without ``max_tokens`` an answer may fill the model's context.

    Raises:
        RowError: naming the field, for anything missing, unknown, unsupported or of a wrong type or value.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    check_limits(fields)
    if endpoint is Endpoint.EMBEDDINGS:
        return _embedding_body(fields)
    chat = endpoint is Endpoint.CHAT
    prompt_fields = _CHAT_FIELDS if chat else _COMPLETION_FIELDS
    for name, value in fields.items():
        if name in _OFF_VALUES:
            _require_off(name, value)
        elif name in _LABELS:
            _LABELS[name](name, value)
        elif name not in _SAMPLING_FIELDS and name not in prompt_fields and name not in answer_forms.FIELDS:
            raise _unknown(name, endpoint)
    model = fields.get("model")
    echo = as_boolean("echo", fields.pop("echo", False))
    prompt_only = echo and fields.get("max_tokens") == 0
    if prompt_only:  # the engine's answers have a token at least, which is then left out
        fields["max_tokens"] = 1
    form = answer_forms.answer_form(fields)
    offered = tools.read_tools(fields) if chat else None
    if offered is not None and offered.form is not None:
        if form is not None:
            raise RowError(
                "invalid_value", f"{form.field}: cannot be used together with a forced tool_choice", param=form.field
            )
        form = answer_forms.AnswerForm(field="tools", params=offered.form)
    return ParsedBody(
        params=_params(fields, endpoint, form, echo=echo),
        given=frozenset(name for name in MODEL_DEFAULT_FIELDS if name in fields),
        form_field=None if form is None else form.field,
        echo=echo,
        prompt_only=prompt_only,
        model=None if model is None else as_text("model", model),
        messages=chats.read_messages(fields) if chat else None,
        prompt=None if chat else _prompt(fields),
        tools=None if offered is None else offered.shown,
        tool_use=None if offered is None else offered.use,
        template=chats.read_template_use(fields) if chat else ChatTemplateUse(),
    )


def _embedding_body(fields: Mapping[str, Any]) -> ParsedBody:
    for name, value in fields.items():
        if name in _LABELS:
            _LABELS[name](name, value)
        elif name not in embeddings.FIELDS:
            raise _unknown(name, Endpoint.EMBEDDINGS)
    model = fields.get("model")
    return ParsedBody(
        params=_NOTHING_SAMPLED,
        model=None if model is None else as_text("model", model),
        embedding=embeddings.parse_embedding(fields),
    )


def changed_body(endpoint: Endpoint, body: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The body with fields set to other values, those set to null removed.

    Raises:
        RowError: when it cannot be run then.
    """
    fields = {**body, **changes}
    fields = {name: value for name, value in fields.items() if value is not None or name not in changes}
    if "max_tokens" in changes and "max_completion_tokens" not in changes:
        fields.pop("max_completion_tokens", None)  # the newer name of the same limit
    parse_body(endpoint, fields)
    return fields


def _params(
    fields: Mapping[str, Any], endpoint: Endpoint, form: answer_forms.AnswerForm | None, *, echo: bool
) -> SamplingParams:
    settings = {name: read(name, fields[name]) for name, read in _SAMPLING_FIELDS.items() if name in fields}
    most = settings.pop("max_completion_tokens", None)
    if most is not None and settings.setdefault("max_tokens", most) != most:
        raise RowError(
            "invalid_value",
            f"max_completion_tokens is {most} and max_tokens is {settings['max_tokens']}; give one of them",
            param="max_completion_tokens",
        )
    settings["logprobs"] = _logprobs(fields, endpoint)
    if echo and settings["logprobs"] is not None:
        settings.setdefault("prompt_logprobs", settings["logprobs"])
    settings["structured_outputs"] = None if form is None else form.params
    if fields.get("best_of", settings.get("n", 1)) != settings.get("n", 1):
        raise RowError("unsupported_field", "best_of: only the value of n is supported", param="best_of")
    try:
        return SamplingParams(**settings)
    except InvalidParameter as err:
        blamed = err.param
        if blamed == "logprobs" and endpoint is Endpoint.CHAT:  # there the number is of another field than the switch
            blamed = "top_logprobs"
        elif blamed == "max_tokens" and blamed not in fields:
            blamed = "max_completion_tokens"
        raise RowError("invalid_value", f"{blamed}: {err.message}", param=blamed) from err


def _logprobs(fields: Mapping[str, Any], endpoint: Endpoint) -> int | None:
    """Chat has a switch and a number; completions has a number alone."""
    if endpoint is Endpoint.COMPLETIONS:
        return as_integer("logprobs", fields["logprobs"]) if "logprobs" in fields else None
    wanted = as_boolean("logprobs", fields.get("logprobs", False))
    num_top = as_integer("top_logprobs", fields.get("top_logprobs", 0))
    if num_top and not wanted:
        raise RowError("invalid_value", "top_logprobs: needs logprobs: true", param="top_logprobs")
    return num_top if wanted else None


def _prompt(fields: Mapping[str, Any]) -> str | tuple[int, ...]:
    if "prompt" not in fields:
        raise RowError("missing_field", "prompt: is missing; a completion needs one", param="prompt")
    prompt = fields["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RowError(
                "unsupported_field",
                f"prompt: holds {len(prompt)} prompts; write one line for each, so that each has its own result",
                param="prompt",
            )
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise wrong_type("prompt", "a string or a list of token ids", prompt)
    if not prompt:
        raise RowError("invalid_value", "prompt: is empty", param="prompt")
    if isinstance(prompt, str):
        return as_text("prompt", prompt)
    return tuple(as_token_id(f"prompt[{i}]", token_id) for i, token_id in enumerate(prompt))


_SAMPLING_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": as_integer,
    "max_completion_tokens": as_integer,
    "min_tokens": as_integer,
    "n": as_integer,
    "temperature": as_number,
    "top_p": as_number,
    "top_k": as_integer,
    "min_p": as_number,
    "seed": as_integer,
    "stop": as_strings,
    "stop_token_ids": as_token_ids,
    "include_stop_str_in_output": as_boolean,
    "ignore_eos": as_boolean,
    "presence_penalty": as_number,
    "frequency_penalty": as_number,
    "repetition_penalty": as_number,
    "logit_bias": as_biases,
    "bad_words": as_strings,
    "allowed_token_ids": as_token_ids,
    "prompt_logprobs": as_integer,
    "skip_special_tokens": as_boolean,
    "truncate_prompt_tokens": as_integer,
}

_CHAT_FIELDS = frozenset({"model", "messages", "logprobs", "top_logprobs", *chats.FIELDS, *tools.FIELDS})
_COMPLETION_FIELDS = frozenset({"model", "prompt", "logprobs", "best_of", "echo"})

# Stored with the job; they cannot change the answer.
_LABELS: dict[str, Callable[[str, Any], Any]] = {
    "user": as_text,
    "metadata": as_object,
    "safety_identifier": as_text,
    "prompt_cache_key": as_text,
}

# Known fields that are not supported, with the values that ask for nothing.
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "guided_decoding_backend": ("auto",),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "priority": (0,),
    "request_id": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "prompt_cache_retention": (),
    "moderation": (),
    "session_id": (),
    "watermarking": (False,),
    "media_io_kwargs": ({},),
    "return_prompt_text": (False,),
    "stream_interval": (),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (),
    "flat_logprobs": (False,),
    "detokenize": (True,),
    "output_kind": (),
    "extra_args": ({},),
    "prompt_embeds": (),
    "trace_decode_token_ids": (),
}

_HINTS = {
    "stream": "answers are stored, not streamed; remove it",
    "priority": "a priority belongs to the batch or the message, not to the body",
}


def _require_off(name: str, value: Any) -> None:
    if name == "stream":
        as_boolean(name, value)
    if any(type(value) is type(off) and value == off for off in _OFF_VALUES[name]):
        return
    code = "stream_unsupported" if name == "stream" else "unsupported_field"
    raise RowError(code, f"{name}: {_HINTS.get(name, 'is not supported')}", param=name)


def _unknown(name: str, endpoint: Endpoint) -> RowError:
    known = [*_SAMPLING_FIELDS, *_CHAT_FIELDS, *_COMPLETION_FIELDS, *_LABELS, *answer_forms.FIELDS, *embeddings.FIELDS]
    if name in known or name in _OFF_VALUES:
        return RowError("unknown_field", f"{name}: is not a field of {endpoint.value}", param=name)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RowError("unknown_field", f"{name}: is not a known field{hint}", param=name)
