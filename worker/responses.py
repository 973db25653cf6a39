"""What goes back: OpenAI response bodies, and the lines of OpenAI's batch output and error files.

Owns the outward shape of an answer. Knows no SQL: it is handed engine outputs and stored rows.
Invariant: every line carries the custom_id of the line it answers, whatever became of the job.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from kvq.engine.request import CompletionOutput, RequestOutput, TokenLogprob
from kvq.worker.jobs import Endpoint, JobError, JobState
from kvq.worker.store_records import ResultRow

# Codes of rows that OpenAI would answer with 4xx; anything else is the server's fault.
_CLIENT_ERROR_STATUS = {
    "model_not_found": 404,
    "unknown_url": 404,
    "server_error": 500,
    "internal_error": 500,
    "engine_error": 500,
    "worker_lost": 500,
    "time_limit_exceeded": 504,
}
CLIENT_CLOSED_REQUEST = 499


def response_body(
    *, endpoint: Endpoint, job_id: str, model: str, created: datetime | float, output: RequestOutput
) -> dict[str, Any]:
    """The ``chat.completion`` or ``text_completion`` object for a finished request.

    ``usage.completion_tokens`` counts all ``n`` samples; ``cached_tokens`` are prompt tokens whose KV was reused.
    """
    chat = endpoint is Endpoint.CHAT
    metrics = output.metrics
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{job_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(created.timestamp() if isinstance(created, datetime) else created),
        "model": model,
        "choices": [_chat_choice(sample) if chat else _text_choice(sample) for sample in output.outputs],
        "usage": {
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.completion_tokens,
            "total_tokens": metrics.prompt_tokens + metrics.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": metrics.cached_tokens},
        },
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


def _chat_choice(sample: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None:
        logprobs = {"content": [_chat_logprob(token) for token in sample.logprobs], "refusal": None}
    return {
        "index": sample.index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason.value,
    }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": list(token.token.encode("utf-8", "replace")),
        "top_logprobs": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
            for _, text, logprob in token.top
        ],
    }


def _text_choice(sample: CompletionOutput) -> dict[str, Any]:
    return {
        "index": sample.index,
        "text": sample.text,
        "logprobs": None if sample.logprobs is None else _text_logprobs(sample.logprobs),
        "finish_reason": sample.finish_reason.value,
    }


def _text_logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    offsets, position = [], 0
    for token in tokens:
        offsets.append(position)
        position += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{text: logprob for _, text, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }
