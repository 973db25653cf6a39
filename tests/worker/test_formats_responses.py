"""Answers: OpenAI's response objects, and the lines of its output and error files."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from kvq.engine.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprob
from kvq.worker.formats import Echo, error_line, output_line, response_body
from kvq.worker.jobs import Endpoint, JobError, JobMetrics, JobState
from kvq.worker.responses import Piece
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


def spelled(token: str, logprob: float, *top: TokenLogprob, raw: bytes | None = None) -> TokenLogprob:
    return TokenLogprob(token_id=len(token), token=token, logprob=logprob, raw=raw or token.encode(), rank=1, top=top)


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
        spelled("Grü", -0.5, spelled("Grü", -0.5), spelled("Hi", -1.5)),
        spelled("ße", -0.25, spelled("ße", -0.25)),
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


def test_a_character_in_two_tokens_has_its_bytes_and_one_place() -> None:
    tokens = (spelled("\ufffd", -1.0, raw=b"\xc3"), spelled("\ufffd", -0.1, raw=b"\xa9"), spelled("!", -0.2))
    chat = body(Endpoint.CHAT, "é!", logprobs=tokens)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in chat] == [[0xC3], [0xA9], [33]]
    assert body(Endpoint.COMPLETIONS, "é!", logprobs=tokens)["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]


def test_an_impossible_token_has_openais_log_probability() -> None:
    tokens = (spelled("a", 0.0, spelled("a", 0.0), spelled("b", -math.inf)),)
    top = body(Endpoint.CHAT, "a", logprobs=tokens)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [0.0, -9999.0]


def test_echo_puts_the_prompt_before_the_answer_and_its_logprobs() -> None:
    scored = replace(
        output(" x", logprobs=(spelled(" x", -0.5),)), prompt_logprobs=(None, spelled("b", -1.0, spelled("c", -0.3)))
    )
    answer = response_body(
        endpoint=Endpoint.COMPLETIONS,
        job_id=JOB,
        model="m",
        created=NOW,
        output=scored,
        echo=Echo(text="ab", first_token=Piece(raw=b"a")),
    )
    (choice,) = answer["choices"]
    assert choice["text"] == "ab x"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", " x"],
        "token_logprobs": [None, -1.0, -0.5],
        "top_logprobs": [None, {"c": -0.3, "b": -1.0}, {" x": -0.5}],
        "text_offset": [0, 1, 2],
    }
    only = response_body(
        endpoint=Endpoint.COMPLETIONS,
        job_id=JOB,
        model="m",
        created=NOW,
        output=scored,
        echo=Echo(text="ab", first_token=Piece(raw=b"a"), only=True),
    )
    assert only["choices"][0]["text"] == "ab"
    assert only["choices"][0]["finish_reason"] == "length"
    assert only["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert only["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_have_vllms_shape_in_both_places() -> None:
    scored = replace(output("x"), prompt_logprobs=(None, spelled("b", -1.0, spelled("cc", -0.3))))
    expected = [
        None,
        {
            "2": {"logprob": -0.3, "rank": 1, "decoded_token": "cc"},
            "1": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
        },
    ]
    chat = response_body(endpoint=Endpoint.CHAT, job_id=JOB, model="m", created=NOW, output=scored)
    text = response_body(endpoint=Endpoint.COMPLETIONS, job_id=JOB, model="m", created=NOW, output=scored)
    assert chat["prompt_logprobs"] == text["choices"][0]["prompt_logprobs"] == expected


def test_a_choice_says_whether_it_has_the_form_that_was_asked_for() -> None:
    cut = replace(output("{"), outputs=(replace(output("{").outputs[0], format_valid=False),))
    answer = response_body(endpoint=Endpoint.CHAT, job_id=JOB, model="m", created=NOW, output=cut)
    assert answer["choices"][0]["format_valid"] is False
    assert "format_valid" not in body(Endpoint.CHAT, "x")["choices"][0]


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
