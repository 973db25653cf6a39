"""Every option of a row, through the whole worker, on both databases: used, or refused by name for that row alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from kvq.engine.engine import Engine
from kvq.migrations.url import database_url
from kvq.worker.jobs import Endpoint, JobState, NewJob
from kvq.worker.service import WorkerService
from kvq.worker.service_options import ServiceOptions
from kvq.worker.store import Store
from kvq.worker.store_records import ResultRow
from tests.factories import new_batch, new_job
from tests.models import engine_config, tiny_model
from tests.worker.conftest import ServiceMaker


def completion(number: int, **body: Any) -> NewJob:
    return new_job(number, endpoint=Endpoint.COMPLETIONS, body={"prompt": "a b c", "max_tokens": 6, **body})


def chat(number: int, **body: Any) -> NewJob:
    messages = [{"role": "user", "content": "hello"}]
    return new_job(number, body={"messages": messages, "max_tokens": 6, "temperature": 0, **body})


def run(store: Store, service: WorkerService, jobs: list[NewJob]) -> list[ResultRow]:
    batch_id = new_batch(store, jobs)
    service.start()
    service.run_until_idle(batch_id)
    rows = [store.job(job.job_id) for job in jobs]
    assert all(row is not None and row.finished for row in rows)
    assert store.check_integrity() == []
    return [row for row in rows if row is not None]


def choice(row: ResultRow) -> dict[str, Any]:
    assert row.error is None, row.error
    assert row.response is not None
    first: dict[str, Any] = row.response["choices"][0]
    return first


PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}


def test_answers_have_the_form_their_row_asks_for_in_every_spelling(store: Store, make_service: ServiceMaker) -> None:
    forms: list[tuple[dict[str, Any], Any]] = [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_grammar": 'root ::= "<" [0-9] ">"'}, "<[0-9]>"),
        ({"guided_json": PERSON}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, None),
    ]
    jobs = [
        make(i, **{**body, "max_tokens": 200, "temperature": 1.0})
        for i, (make, (body, _)) in enumerate([(make, form) for form in forms for make in (chat, completion)], 1)
    ]
    rows = run(store, make_service(), jobs)
    for row, (_, pattern) in zip(rows, [form for form in forms for _ in range(2)], strict=True):
        assert choice(row)["format_valid"] is True
        assert row.text is not None
        if pattern is None:
            assert json.loads(row.text)["age"] <= 9
        else:
            assert re.fullmatch(pattern, row.text)


def test_forms_that_cannot_be_kept_fail_alone_and_blame_the_field_of_the_row(
    store: Store, make_service: ServiceMaker
) -> None:
    bad = [
        chat(1, guided_regex="("),
        chat(2, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "what"}}}),
        chat(3, structured_outputs={"json_object": False}),
        chat(4, guided_grammar="start: nothing"),
        chat(5, guided_json={"$ref": "#"}),
        chat(6, guided_json={"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$"}, max_tokens=400),
    ]
    rows = run(store, make_service(), [*bad, *(chat(i) for i in range(7, 12))])
    assert [row.state for row in rows] == [JobState.FAILED] * 6 + [JobState.SUCCEEDED] * 5
    fields = ["guided_regex", "response_format", "structured_outputs", "guided_grammar", "guided_json"]
    for row, field in zip(rows, fields, strict=False):
        assert row.error is not None
        assert row.error.code == "invalid_value"
        assert field in row.error.message
    assert rows[5].error is not None
    assert rows[5].error.code == "generation_failed"


def test_unsupported_fields_are_refused_by_name(store: Store, make_service: ServiceMaker) -> None:
    bodies = {"best_of": 3, "suffix": "x", "use_beam_search": True, "cache_salt": "x", "nonsense": 1}
    rows = run(store, make_service(), [completion(i, **{name: bodies[name]}) for i, name in enumerate(bodies, 1)])
    for row, name in zip(rows, bodies, strict=True):
        assert row.error is not None
        assert row.error.message.startswith(f"{name}:")


def test_echo_and_prompt_logprobs_come_back_in_openais_and_vllms_shapes(
    store: Store, make_service: ServiceMaker, engine: Engine
) -> None:
    prompt = "Grüße an 😀 alle"
    rows = run(
        store,
        make_service(),
        [
            completion(1, prompt=prompt, echo=True, logprobs=2, temperature=0),
            completion(2, prompt=prompt, temperature=0),
            completion(3, prompt=prompt, echo=True, max_tokens=0, logprobs=0),
            chat(4, prompt_logprobs=1),
            completion(5, prompt=[9, 10, 11], echo=True),
        ],
    )
    echoed, plain, only = (choice(row) for row in rows[:3])
    tokens = engine.tokenizer.encode(prompt)
    assert echoed["text"] == prompt + plain["text"]
    assert rows[0].text == echoed["text"]
    logprobs = echoed["logprobs"]
    assert len(logprobs["tokens"]) == len(tokens) + 6
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][len(tokens)] == len(prompt)
    assert only["text"] == prompt
    assert len(only["logprobs"]["tokens"]) == len(tokens)
    assert rows[2].response is not None
    assert rows[2].response["usage"]["completion_tokens"] == 0
    assert rows[3].response is not None
    scored = rows[3].response["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == rows[3].metrics.prompt_tokens
    assert choice(rows[4])["text"].startswith(engine.tokenizer.decode([9, 10, 11]))


def test_truncation_and_token_ids_work_for_rows(store: Store, make_service: ServiceMaker) -> None:
    rows = run(
        store,
        make_service(),
        [
            completion(1, prompt=list(range(5, 5000)), truncate_prompt_tokens=-1),
            completion(2, prompt=list(range(5, 50)), truncate_prompt_tokens=7),
            chat(3, truncate_prompt_tokens=3),
            completion(4, prompt=[10**7]),
        ],
    )
    assert [row.metrics.prompt_tokens for row in rows[:3]] == [2048 - 6, 7, 3]
    assert rows[3].error is not None
    assert "token ids must be between" in rows[3].error.message


def test_equal_jobs_say_whose_answer_they_have(
    store: Store, store_url: str, make_service: ServiceMaker, engine: Engine
) -> None:
    before = engine.stats().generated_tokens
    jobs = [completion(i, prompt="all the same", temperature=0, max_tokens=30, ignore_eos=True) for i in range(1, 13)]
    rows = run(store, make_service(), jobs)
    assert len({row.text for row in rows}) == 1
    leaders = {row.job_id for row in rows if row.metrics.served_from is None}
    assert {row.metrics.served_from for row in rows} - {None} <= leaders
    assert len(leaders) < len(jobs)
    assert engine.stats().generated_tokens - before == 30 * len(leaders)
    with sa.create_engine(database_url(store_url), poolclass=sa.pool.NullPool).connect() as conn:
        found = conn.execute(sa.text("SELECT job_id, served_from FROM job_results"))
        shown = {row.job_id: row.served_from for row in found}
    assert shown == {row.job_id: row.metrics.served_from for row in rows}


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose authors recommend top_k 1."""
    folder: Path = tiny_model(tmp_path_factory.mktemp("opinionated"))
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 1, "max_new_tokens": 2}')
    return Engine.load(engine_config(folder, max_num_seqs=16))


@pytest.fixture
def opinionated_service(store: Store, opinionated: Engine) -> Iterator[WorkerService]:
    service = WorkerService(store, lambda: opinionated, options=ServiceOptions(model="tiny"))
    yield service
    service.drain(0)


def test_what_a_row_leaves_open_is_the_models_choice_and_is_recorded(
    store: Store, opinionated_service: WorkerService
) -> None:
    rows = run(
        store,
        opinionated_service,
        [
            completion(1, max_tokens=10),
            completion(2, temperature=0, max_tokens=10),
            completion(3, top_k=50, temperature=1.5, max_tokens=10),
        ],
    )
    assert [row.model_defaults for row in rows] == [{"temperature": 0.7, "top_k": 1}, None, None]
    assert rows[0].text == rows[1].text != rows[2].text
    assert rows[0].metrics.completion_tokens > 2
