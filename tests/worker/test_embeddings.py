"""Embedding jobs: bodies read or refused by field, and rows beside generation through the whole worker."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.engine.engine import Engine
from kvq.engine.llm import LLM
from kvq.engine.request import EmbeddingOutput, RequestMetrics, RequestOutput
from kvq.worker.bodies import parse_body
from kvq.worker.embeddings import MAX_INPUTS, SplitJobs
from kvq.worker.errors import RowError
from kvq.worker.inference import Inference
from kvq.worker.jobs import ClaimedJob, Endpoint, JobError, JobOutcome, JobState, NewJob
from kvq.worker.lines import read_line
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.factories import new_batch, new_job
from tests.waiting import wait_until
from tests.worker.conftest import ServiceMaker
from tests.worker.test_celery_worker import take_in

TEXTS = ["a cat sat on the mat", "stock markets fell", "a cat sat on the mat"]


def embedding(number: int, given: Any, **body: Any) -> NewJob:
    return new_job(number, endpoint=Endpoint.EMBEDDINGS, body={"input": given, **body})


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("one", ("one",)),
        (["one", "two"], ("one", "two")),
        ([1, 2.0], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["one", [2]], ("one", (2,))),
    ],
)
def test_every_form_of_input_is_read(given: Any, inputs: tuple[Any, ...]) -> None:
    parsed = parse_body(Endpoint.EMBEDDINGS, {"input": given, "model": "m", "user": "me", "dimensions": None})
    assert parsed.embedding is not None
    assert (parsed.embedding.inputs, parsed.embedding.encoding_format, parsed.model) == (inputs, "float", "m")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_field", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input[0]"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": ["a", 1]}, "invalid_type", "input[1]"),
        ({"input": [1, "a"]}, "invalid_type", "input[1]"),
        ({"input": {"text": "a"}}, "invalid_type", "input"),
        ({"input": "\ud800"}, "invalid_value", "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "invalid_value", "input"),
        ({"input": "a" * (8 * 2**20 + 1)}, "invalid_value", "input"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": "8"}, "invalid_type", "dimensions"),
        ({"input": "a", "temperature": 1}, "unknown_field", "temperature"),
        ({"input": "a", "messages": []}, "unknown_field", "messages"),
        ({"input": "a", "stream": False}, "unknown_field", "stream"),
        ({"input": "a", "imput": "b"}, "unknown_field", "imput"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_field(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RowError) as refused:
        parse_body(Endpoint.EMBEDDINGS, body)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_input_is_no_field_of_the_other_endpoints() -> None:
    with pytest.raises(RowError, match="input: is not a field of /v1/completions"):
        parse_body(Endpoint.COMPLETIONS, {"prompt": "a", "input": "b"})


def test_a_line_is_known_by_its_url_or_by_its_input() -> None:
    full = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}'
    for raw in (full, b'{"id": "a", "input": "x"}'):
        line = read_line(1, raw)
        assert (line.error, line.endpoint, line.body) == (None, Endpoint.EMBEDDINGS, {"input": "x"})
    line = read_line(1, b'{"id": "a", "input": "x", "prompt": "y"}')
    assert line.error is not None
    assert line.error.message == "input: is given beside prompt; keep one of them"


def output_of(request_id: str, served_from: str | None = None) -> RequestOutput:
    metrics = RequestMetrics(
        **dict.fromkeys(("arrival_s", "first_scheduled_s", "first_token_s", "finished_s"), 0.0),
        **dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens", "preemptions", "seed"), 1
        ),
    )
    return RequestOutput(
        request_id=request_id,
        prompt_token_ids=(1,),
        outputs=(),
        metrics=metrics,
        served_from=served_from,
        embedding=EmbeddingOutput(embedding=(1.0,)),
    )


@given(st.lists(st.integers(1, 4), max_size=5), st.randoms(use_true_random=False))
def test_a_split_job_is_complete_once_with_its_outputs_in_order(counts: list[int], random: Any) -> None:
    split = SplitJobs()
    ids_by_job = {f"job{i}": split.split(f"job{i}", count) for i, count in enumerate(counts)}
    request_ids = [request_id for ids in ids_by_job.values() for request_id in ids]
    random.shuffle(request_ids)
    complete = [done for request_id in request_ids for done in split.gather([output_of(request_id)])]
    assert {job_id: [o.request_id for o in outputs] for job_id, outputs in complete} == ids_by_job
    assert len(complete) == len(counts)
    assert split.drop("job0") == ["job0"]


def test_a_dropped_job_names_the_requests_that_have_not_ended() -> None:
    split = SplitJobs()
    split.split("a", 3)
    assert split.gather([output_of("a#1")]) == []
    assert split.drop("a") == ["a", "a#2"]


def test_the_answer_of_an_input_of_another_job_is_named_by_that_job() -> None:
    split = SplitJobs()
    split.split("a", 2)
    (_, (first,)), *_ = split.gather([output_of("b", served_from="a#1"), output_of("a#1")])
    assert first.served_from == "a"


def test_embedding_rows_run_beside_generation(store: Store, make_service: ServiceMaker, engine: Engine) -> None:
    token_ids = [engine.tokenizer.encode(text) for text in TEXTS]
    jobs = [
        embedding(1, TEXTS[0]),
        embedding(2, TEXTS),
        embedding(3, token_ids[1], encoding_format="base64"),
        embedding(4, token_ids, user="somebody"),
        new_job(5, endpoint=Endpoint.COMPLETIONS, body={"prompt": TEXTS[0], "max_tokens": 3}),
        embedding(6, "x", dimensions=8),
        embedding(7, ["fine", "word " * 5000]),
        embedding(8, [[1], [999_999]]),
        embedding(9, "long " * 30, truncate_prompt_tokens=4),
    ]
    batch_id = new_batch(store, jobs)
    service = make_service()
    service.start()
    progress = service.run_until_idle(batch_id)
    assert (progress.succeeded, progress.failed) == (6, 3)
    rows = {row.line_no: row for row in store.iter_results(batch_id)}

    llm = LLM.__new__(LLM)
    llm.engine, llm._num_requests = engine, 0
    service.drain(0)
    expected = [list(output.outputs.embedding) for output in llm.embed(TEXTS)]
    vectors = {no: _vectors(rows[no].response) for no in (1, 2, 3, 4)}
    assert (vectors[1], vectors[2]) == ([expected[0]], expected)
    assert vectors[4] == expected
    np.testing.assert_allclose(vectors[3][0], expected[1], rtol=1e-6)

    row = rows[2]
    num_tokens = sum(map(len, token_ids))
    assert row.response is not None
    assert row.response["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert [item["index"] for item in row.response["data"]] == [0, 1, 2]
    assert (row.text, row.finish_reason, row.metrics.seed, row.metrics.tpot_ms) == (None, None, None, None)
    assert (row.metrics.prompt_tokens, row.metrics.completion_tokens) == (num_tokens, 0)
    assert row.metrics.ttft_ms is not None
    assert row.metrics.e2e_ms is not None
    assert rows[9].metrics.prompt_tokens == 4
    errors = {no: rows[no].error for no in (6, 7, 8)}
    assert {no: error.code for no, error in errors.items() if error is not None} == {
        6: "invalid_value",
        7: "context_length_exceeded",
        8: "invalid_value",
    }
    assert "dimensions: is 8" in str(errors[6])
    assert "input: token ids" in str(errors[8])
    assert store.check_integrity() == []


def _vectors(response: dict[str, Any] | None) -> list[list[float]]:
    assert response is not None
    given = [item["embedding"] for item in response["data"]]
    return [np.frombuffer(base64.b64decode(v), "<f4").tolist() if isinstance(v, str) else v for v in given]


def test_a_cancelled_embedding_job_leaves_nothing_in_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "step", list)  # the engine stands still
    outcomes: list[JobOutcome] = []
    inference = Inference(lambda: engine, on_outcome=outcomes.append, on_change=lambda: None)
    inference.start()
    assert inference.wait_ready(60)
    new = embedding(1, ["a", "b", "c"])
    job = ClaimedJob(
        seq=1,
        job_id=new.job_id,
        batch_id=None,
        custom_id="",
        endpoint=new.endpoint,
        body=new.body,
        priority=0,
        attempt=1,
        claim_id=1,
        crashes=0,
        queue_ms=0,
    )
    inference.submit(job, inference.prepare(new.endpoint, new.body))
    inference.abort(new.job_id, JobState.CANCELLED, JobError(code="cancelled", message="on request"))
    wait_until(lambda: bool(outcomes))
    inference.stop()
    assert [(outcome.state, outcome.response) for outcome in outcomes] == [(JobState.CANCELLED, None)]
    assert not engine.has_unfinished_requests


def test_a_celery_message_with_input_is_an_embedding_job(redis_url: str, store: Store) -> None:
    with celery_client(redis_url) as client:
        client.send_task("kvq.generate", kwargs={"input": ["a", "b"], "dimensions": 4}, queue="kvq")
    take_in(redis_url, store)
    (job,) = store.peek("kvq", limit=9)
    assert (job.endpoint, job.body) == (Endpoint.EMBEDDINGS, {"input": ["a", "b"], "dimensions": 4})
