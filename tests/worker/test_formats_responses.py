"""Answers: OpenAI's response objects, and the lines of its output and error files."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kvq.engine.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprob
from kvq.worker.formats import error_line, output_line, response_body
from kvq.worker.jobs import Endpoint, JobError, JobMetrics, JobState
from kvq.worker.store_records import ResultRow

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
JOB = "0f0e0d0c-0000-4000-8000-000000000001"


def output(*texts: str, logprobs: tuple[TokenLogprob, ...] | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        outputs=tuple(
            CompletionOutput(index=i, text=text, token_ids=(4,), finish_reason=FinishReason.STOP, logprobs=logprobs)
            for i, text in enumerate(texts)
        ),
        metrics=RequestMetrics(
            arrival_s=0,
            first_scheduled_s=1,
            first_token_s=2,
            finished_s=3,
            prompt_tokens=3,
            cached_tokens=2,
            computed_tokens=1,
            completion_tokens=8,
            preemptions=0,
            seed=5,
        ),
    )


def body(endpoint: Endpoint, *texts: str, logprobs: tuple[TokenLogprob, ...] | None = None) -> dict[str, Any]:
    return response_body(
        endpoint=endpoint, job_id=JOB, model="m", created=NOW, output=output(*texts, logprobs=logprobs)
    )


def row(state: JobState, **changes: Any) -> ResultRow:
    values: dict[str, Any] = {
        "seq": 1,
        "job_id": JOB,
        "batch_id": "b",
        "custom_id": "mine",
        "line_no": 1,
        "state": state,
        "endpoint": Endpoint.CHAT,
        "model": "m",
        "text": None,
        "finish_reason": None,
        "response": None,
        "error": None,
        "metrics": JobMetrics(),
        "attempts": 1,
        "crashes": 0,
        "worker_id": None,
        "created_at": NOW,
        "started_at": None,
        "finished_at": NOW,
    }
    return ResultRow(**{**values, **changes})


def test_a_chat_completion_has_openais_shape() -> None:
    assert body(Endpoint.CHAT, "Hi", "Hello") == {
        "id": f"chatcmpl-{JOB}",
        "object": "chat.completion",
        "created": int(NOW.timestamp()),
        "model": "m",
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
            for i, text in enumerate(["Hi", "Hello"])
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 8,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_completion_has_openais_shape() -> None:
    answer = body(Endpoint.COMPLETIONS, "Hi")
    assert answer["id"] == f"cmpl-{JOB}"
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}]


def test_logprobs_have_each_endpoints_shape() -> None:
    tokens = (
        TokenLogprob(token_id=1, token="Grü", logprob=-0.5, top=((1, "Grü", -0.5), (2, "Hi", -1.5))),
        TokenLogprob(token_id=3, token="ße", logprob=-0.25, top=((3, "ße", -0.25),)),
    )
    chat = body(Endpoint.CHAT, "Grüße", logprobs=tokens)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat] == ["Grü", "ße"]
    assert chat[0]["bytes"] == list("Grü".encode())
    assert chat[0]["top_logprobs"][1] == {"token": "Hi", "logprob": -1.5, "bytes": [72, 105]}
    assert body(Endpoint.COMPLETIONS, "Grüße", logprobs=tokens)["choices"][0]["logprobs"] == {
        "tokens": ["Grü", "ße"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"Grü": -0.5, "Hi": -1.5}, {"ße": -0.25}],
        "text_offset": [0, 3],
    }


def test_an_output_line_has_openais_shape() -> None:
    answer = {"object": "chat.completion"}
    assert output_line(row(JobState.SUCCEEDED, response=answer)) == {
        "id": "batch_req_0f0e0d0c000040008000000000000001",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": JOB, "body": answer},
        "error": None,
    }


def test_a_failed_row_carries_the_http_answer_and_the_reason() -> None:
    error = JobError(code="context_length_exceeded", message="too long: 9000 > 2048")
    line = error_line(row(JobState.FAILED, error=error))
    assert line["custom_id"] == "mine"
    assert line["error"] == {"code": error.code, "message": error.message}
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["message"] == error.message
    assert line["response"]["body"]["error"]["type"] == "invalid_request_error"


def test_a_fault_of_the_server_is_no_bad_request() -> None:
    line = error_line(row(JobState.FAILED, error=JobError(code="engine_error", message="step failed")))
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.EXPIRED, JobState.DEAD])
def test_a_row_that_never_answered_keeps_its_custom_id_and_says_why(state: JobState) -> None:
    line = error_line(row(state))
    assert (line["custom_id"], line["response"]) == ("mine", None)
    assert line["error"]["code"] == state.value
    assert line["error"]["message"]


def test_the_partial_answer_of_a_cancelled_row_is_kept() -> None:
    line = error_line(row(JobState.CANCELLED, response={"choices": []}))
    assert line["response"] == {"status_code": 499, "request_id": JOB, "body": {"choices": []}}
    assert line["error"]["code"] == "cancelled"
