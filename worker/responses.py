"""What goes back: OpenAI response bodies, and the lines of OpenAI's batch output and error files.

Owns the outward shape of an answer. Knows no SQL: it is handed engine outputs and stored rows.
Invariant: every line carries the custom_id of the line it answers, whatever became of the job.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvq.engine.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from kvq.worker.jobs import Endpoint, JobError, JobState
from kvq.worker.store_records import ResultRow
from kvq.worker.tools import ToolUse, tool_answer

# Codes of rows that OpenAI would answer with 4xx; anything else is the server's fault.
_CLIENT_ERROR_STATUS = {
    "model_not_found": 404,
    "unknown_url": 404,
    "server_error": 500,
    "internal_error": 500,
    "engine_error": 500,
    "generation_failed": 500,
    "worker_lost": 500,
    "time_limit_exceeded": 504,
}
CLIENT_CLOSED_REQUEST = 499
# How OpenAI writes the log-probability of a token that is all but impossible.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a token spells. ``special``: it is in a text only where that was asked for."""

    raw: bytes
    special: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompt, given back before the answer of a completion; ``only``: instead of it.

    ``first_token``: the prompt's first, which has no log-probability.
    """

    text: str
    first_token: Piece
    only: bool = False


def response_body(
    *,
    endpoint: Endpoint,
    job_id: str,
    model: str,
    created: datetime | float,
    output: RequestOutput,
    echo: Echo | None = None,
    tool_use: ToolUse | None = None,
) -> dict[str, Any]:
    """The ``chat.completion`` or ``text_completion`` object for a finished request.

    ``usage.completion_tokens`` counts all ``n`` samples; ``cached_tokens`` are prompt tokens whose KV was reused.
    ``tool_use``: how calls are read out of a chat's answer.
    Beyond OpenAI's: ``prompt_logprobs`` as vLLM has them, where they were asked for, and ``format_valid`` in a choice
    whose form was asked for.
    """
    chat = endpoint is Endpoint.CHAT
    metrics = output.metrics
    num_output = 0 if echo is not None and echo.only else metrics.completion_tokens
    extra = {}
    if chat and output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = _prompt_logprobs(output.prompt_logprobs)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{job_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(created.timestamp() if isinstance(created, datetime) else created),
        "model": model,
        "choices": [
            _chat_choice(sample, tool_use, job_id) if chat else _text_choice(sample, output, echo)
            for sample in output.outputs
        ],
        "usage": {
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": metrics.prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": metrics.cached_tokens},
        },
        **extra,
    }


def output_line(row: ResultRow) -> dict[str, Any]:
    """A line of the output file, for a job that succeeded."""
    return {
        "id": _line_id(row),
        "custom_id": row.custom_id,
        "response": {"status_code": 200, "request_id": row.job_id, "body": row.response},
        "error": None,
    }


def error_line(row: ResultRow) -> dict[str, Any]:
    """A line of the error file, for a job in any other state.

    ``error`` always says why. A refused or failed request has the HTTP answer OpenAI would give as its
    response; a job that never ran has none; one that was stopped while running keeps its partial answer.
    """
    error = row.error or JobError(code=row.state.value, message=f"the job is {row.state.value}")
    response: dict[str, Any] | None = None
    if row.state is JobState.FAILED:
        response = {
            "status_code": _CLIENT_ERROR_STATUS.get(error.code, 400),
            "request_id": row.job_id,
            "body": {"error": _error_object(error)},
        }
    elif row.response is not None:
        response = {"status_code": CLIENT_CLOSED_REQUEST, "request_id": row.job_id, "body": row.response}
    return {
        "id": _line_id(row),
        "custom_id": row.custom_id,
        "response": response,
        "error": {"code": error.code, "message": error.message},
    }


def _line_id(row: ResultRow) -> str:
    return f"batch_req_{row.job_id.replace('-', '')}"


def _error_object(error: JobError) -> dict[str, Any]:
    server = _CLIENT_ERROR_STATUS.get(error.code, 400) >= 500
    return {
        "message": error.message,
        "type": "server_error" if server else "invalid_request_error",
        "param": None,
        "code": error.code,
    }


def _chat_choice(sample: CompletionOutput, tool_use: ToolUse | None, job_id: str) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None:
        logprobs = {"content": [_chat_logprob(token) for token in sample.logprobs], "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
    finish_reason = sample.finish_reason.value
    if tool_use is not None:
        ended = sample.finish_reason is FinishReason.STOP
        answer = tool_answer(sample.text, tool_use, whole=ended, key=f"{job_id}/{sample.index}")
        if answer.calls:
            message |= {"content": answer.content, "tool_calls": list(answer.calls)}
            finish_reason = "tool_calls" if ended else finish_reason
    return {
        "index": sample.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        **_verdict(sample),
    }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {**_spelled(token), "top_logprobs": [_spelled(other) for other in token.top]}


def _spelled(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _text_choice(sample: CompletionOutput, output: RequestOutput, echo: Echo | None) -> dict[str, Any]:
    text, finish_reason, logprobs = sample.text, sample.finish_reason, None
    if sample.logprobs is not None:
        logprobs = _text_logprobs(sample.logprobs, _offsets(map(_piece, sample.logprobs), text))
    if echo is not None:
        if logprobs is not None:
            prompt = _prompt_text_logprobs(output, echo)
            logprobs = prompt if echo.only else _joined(prompt, logprobs, len(echo.text))
        text = echo.text if echo.only else echo.text + text
        finish_reason = FinishReason.LENGTH if echo.only else finish_reason
    extra = {}
    if output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = _prompt_logprobs(output.prompt_logprobs)
    return {
        "index": sample.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason.value,
        **_verdict(sample),
        **extra,
    }


def _text_logprobs(tokens: Sequence[TokenLogprob], offsets: list[int]) -> dict[str, list[Any]]:
    """Lists with an entry per token."""
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [{other.token: _finite(other.logprob) for other in (*token.top, token)} for token in tokens],
        "text_offset": offsets,
    }


def _prompt_text_logprobs(output: RequestOutput, echo: Echo) -> dict[str, list[Any]]:
    """The same of the prompt, whose first token nothing precedes: it has no log-probability."""
    rest: tuple[TokenLogprob, ...] = (output.prompt_logprobs or ())[1:]  # type: ignore[assignment]
    first, *others = _offsets((echo.first_token, *map(_piece, rest)), echo.text)
    alone: dict[str, list[Any]] = {
        "tokens": [echo.first_token.raw.decode("utf-8", "replace")],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [first],
    }
    return _joined(alone, _text_logprobs(rest, others), 0)


def _joined(before: dict[str, list[Any]], after: dict[str, list[Any]], num_chars: int) -> dict[str, list[Any]]:
    """The lists of a text, those of the text that follows it ``num_chars`` later appended."""
    moved = {**after, "text_offset": [num_chars + offset for offset in after["text_offset"]]}
    return {name: values + moved[name] for name, values in before.items()}


def _piece(token: TokenLogprob) -> Piece:
    return Piece(raw=token.raw, special=token.special)


def _offsets(pieces: Iterable[Piece], text: str) -> list[int]:
    """The place in ``text`` of each token: of a character that several tokens spell it is that of the first of them.

    A special token that the text leaves out takes no room in it, nor does the space that sentencepiece puts before a
    text. Tokens after the end of a text that was cut are at its end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, position = [], 0
    for piece in pieces:
        offsets.append(min(position, len(text)))
        chars = decoder.decode(piece.raw)
        if piece.special and not text.startswith(chars, position):
            continue
        if chars.startswith(" ") and not text.startswith(" ", position):
            chars = chars[1:]
        position += len(chars)
    return offsets


def _prompt_logprobs(tokens: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token an object of candidates by token id, the token itself among them."""
    return [
        None
        if token is None
        else {
            str(one.token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.token}
            for one in (*token.top, token)
        }
        for token in tokens
    ]


def _verdict(sample: CompletionOutput) -> dict[str, Any]:
    return {} if sample.format_valid is None else {"format_valid": sample.format_valid}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
