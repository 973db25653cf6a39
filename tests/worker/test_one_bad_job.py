"""One bad row never hurts another: it fails with a code and a sentence, or runs, its neighbours answer as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.engine.engine import Engine
from kvq.engine.errors import EngineError, ModelError
from kvq.worker.jobs import Endpoint, JobError, JobOutcome, JobState, NewJob
from kvq.worker.limits import MAX_DEPTH
from kvq.worker.service import WorkerService
from kvq.worker.service_options import ServiceOptions
from kvq.worker.store import Store
from tests.factories import new_batch, new_job
from tests.models import engine_config, tiny_llama_config, write_model
from tests.worker.conftest import ServiceMaker
from tests.worker.crowds import NEIGHBOURS, Crowd, crowd_on

EXPLOSIVE = "^(([a-z]{1,50}){1,50}){1,50}$"
POISON = 1234  # the token whose embedding is NaN in the poisoned model


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def schema_in_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def named(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


# name: (fields of the body, code, part of the sentence)
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a schema without a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "missing_field",
        "schema",
    ),
    "a schema that is no object": (named([]), "invalid_type", "must be an object"),
    "a schema that nothing fits": (named(False), "invalid_type", "must be an object"),
    "an object that nothing fits": (
        named({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        "invalid_value",
        "response_format",
    ),
    "a schema that refers to itself": (named({"$ref": "#"}), "invalid_value", "no answer can satisfy it"),
    "a schema of an unknown type": (named({"type": "nonsense"}), "invalid_value", "nonsense"),
    "a schema with a keyword we cannot keep": (
        named({"type": "array", "uniqueItems": True}),
        "invalid_value",
        "uniqueItems",
    ),
    "a schema that is too large": ({"guided_json": {"enum": ["x" * 200_000]}}, "invalid_value", "limit is 131,072"),
    "an empty list of choices": ({"guided_choice": []}, "invalid_value", "guided_choice"),
    "an empty choice": ({"guided_choice": ["yes", ""]}, "invalid_value", "guided_choice"),
    "an empty regex": ({"guided_regex": ""}, "invalid_value", "guided_regex"),
    "a regex that does not parse": ({"guided_regex": "("}, "invalid_value", "guided_regex"),
    "a regex that is too long": ({"guided_regex": "a" * 10_000}, "invalid_value", "limit is 8,192"),
    "a regex that explodes": (
        {"guided_json": {"type": "string", "pattern": EXPLOSIVE}, "max_tokens": 400},
        "generation_failed",
        "form",
    ),
    "an empty grammar": ({"guided_grammar": ""}, "invalid_value", "guided_grammar"),
    "a grammar without an end": ({"guided_grammar": "start: a\na: a"}, "invalid_value", "guided_grammar"),
    "a grammar nested too deeply": (
        {"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        "invalid_value",
        "guided_grammar",
    ),
    "an empty prompt": ({"prompt": ""}, "invalid_value", "prompt: is empty"),
    "a prompt of no tokens": ({"prompt": []}, "invalid_value", "prompt: is empty"),
    "a token id past the vocabulary": ({"prompt": [1, 10**7]}, "invalid_value", "token ids must be between 0 and"),
    "a token id past 64 bits": ({"prompt": [10**30]}, "invalid_value", "token ids must be between 0 and"),
    "a negative token id": ({"prompt": [1, -2]}, "invalid_value", "never negative"),
    "a stop token past the vocabulary": ({"stop_token_ids": [10**7]}, "invalid_value", "not in the vocabulary"),
    "an allowed token past the vocabulary": ({"allowed_token_ids": [10**7]}, "invalid_value", "not in the vocabulary"),
    "a bias for a token past the vocabulary": (
        {"logit_bias": {"99999999": 1}},
        "invalid_value",
        "not in the vocabulary",
    ),
    "a bias for no token": ({"logit_bias": {"-1": 1}}, "invalid_value", "not a token id"),
    "a bias for a number without end": ({"logit_bias": {"9" * 5_000: 1}}, "invalid_value", "not a token id"),
    "a bias given twice": ({"logit_bias": {"5": 1, "05": 2}}, "invalid_value", "'05' is not a token id"),
    "a field of an endless name": ({"x" * 100_000: 1}, "unknown_field", "xxx..."),
    "a number of a page": ({"seed": 10**4_000}, "invalid_value", "must be in [0, 9223372036854775807]"),
    "a bias that is too large": ({"logit_bias": {"5": 101}}, "invalid_value", "[-100, 100]"),
    "a bias without end": ({"logit_bias": {"5": float("inf")}}, "invalid_value", "finite"),
    "a bias that is no number": ({"logit_bias": {"5": float("nan")}}, "invalid_value", "finite"),
    "options that leave no token": (
        {"allowed_token_ids": [100], "stop_token_ids": [100], "min_tokens": 2},
        "generation_failed",
        "no token is left",
    ),
    "a penalty that makes a logit infinite": (
        {"prompt": list(range(5, 60)), "repetition_penalty": 1e-300},
        "generation_failed",
        "a logit of inf",
    ),
    "a stop string of 10 kB": ({"stop": "x" * 10_000}, "invalid_value", "10,000 characters"),
    "a thousand samples": ({"n": 1_000}, "invalid_value", "n: must be between 1 and 128"),
    "a body nested too deeply": ({"metadata": nested(MAX_DEPTH + 5)}, "invalid_value", "nested more than 64 levels"),
    "a body nested beyond recursion": ({"metadata": nested(100_000)}, "invalid_value", "nested more than 64 levels"),
    "a schema nested too deeply": ({"guided_json": json.dumps(schema_in_schema(300))}, "invalid_value", "guided_json"),
    "half a surrogate pair in the prompt": ({"prompt": "a \ud83d b"}, "invalid_value", "surrogate"),
    "half a surrogate pair in a stop string": ({"stop": "\ud83d"}, "invalid_value", "surrogate"),
    "half a surrogate pair in a choice": ({"guided_choice": ["\ud83d"]}, "invalid_value", "surrogate"),
    "half a surrogate pair in a schema": ({"guided_json": {"enum": ["\ud83d"]}}, "invalid_value", "surrogate"),
    "half a surrogate pair in a label": ({"user": "\ud83d"}, "invalid_value", "surrogate"),
    "a prompt longer than the model": ({"prompt": [5] * 5_000}, "context_length_exceeded", "5000"),
}

# What no JSON can say never comes as far as a row in SQL.
NO_JSON = ("a body nested beyond recursion", "a bias without end", "a bias that is no number")

# What looks alarming and is legitimate.
STRANGE: dict[str, dict[str, Any]] = {
    "a schema of anything": {"guided_json": {}, "max_tokens": 8},
    "a schema that is true": {"guided_json": True, "max_tokens": 8},
    "an object without properties": named({"type": "object", "additionalProperties": False}),
    "a regex that backtracking engines die of": {"guided_regex": "(x+x+)+y", "max_tokens": 40},
    "a regex of nested counts": {"guided_regex": "(a{1,1000}){1,1000}", "max_tokens": 40},
    "a long list": {
        "guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 9_000},
        "max_tokens": 20,
    },
    "128 samples on 16 seats": {"n": 128, "max_tokens": 2, "temperature": 1.0},
    "a bias at its bound": {"logit_bias": {"5": 100, "6": -100}, "temperature": 0},
    "a temperature outside fp32": {"temperature": 1e-46, "logprobs": 1},
    "a stop string at its bound": {"stop": "x" * 1024},
    "a schema of some depth": {"guided_json": schema_in_schema(20), "max_tokens": 12},
    "a whole surrogate pair": {"prompt": "a \U0001f600 b", "stop": "\U0001f600"},
    "a NUL in the prompt": {"prompt": "a\x00b"},
}


@pytest.fixture(scope="module")
def crowd(engine: Engine) -> Iterator[Crowd]:
    with crowd_on(engine) as made:
        yield made


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "a b c", "max_tokens": 6, **fields}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_fails_with_a_code_and_a_sentence_and_its_neighbours_do_not_notice(name: str, crowd: Crowd) -> None:
    fields, code, says = BAD[name]
    end = crowd.try_row(Endpoint.COMPLETIONS, body_of(fields))
    error = end.error if isinstance(end, JobOutcome) else end
    assert error is not None
    assert error.code == code
    assert says in error.message
    assert len(error.message.encode()) < 600


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_row_runs_and_its_neighbours_do_not_notice(name: str, crowd: Crowd) -> None:
    end = crowd.try_row(Endpoint.COMPLETIONS, body_of(STRANGE[name]))
    assert isinstance(end, JobOutcome), end
    assert end.error is None
    assert end.state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    "body",
    [{"input": []}, {"input": ""}, {"input": [[10**7]]}, {"input": ["a", "\ud83d"]}],
    ids=["none", "empty", "past", "half"],
)
def test_a_bad_row_to_be_embedded_fails_alone(body: dict[str, Any], crowd: Crowd) -> None:
    error = crowd.try_row(Endpoint.EMBEDDINGS, body)
    assert isinstance(error, JobError)
    assert error.code == "invalid_value"
    assert error.message.startswith("input")


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    """A model that has NaN logits after one token, as a damaged weight would give."""
    from safetensors.torch import load_file, save_file

    folder: Path = write_model(tmp_path_factory.mktemp("poisoned"), tiny_llama_config(tie_word_embeddings=False))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # So few blocks that those that held NaN are soon another row's.
    with crowd_on(Engine.load(engine_config(folder, num_gpu_blocks_override=40, max_model_len=256))) as made:
        yield made


@pytest.mark.parametrize("prompt", [[5, 6, POISON], [POISON, *range(20, 60)], [11, 12, 13, POISON]])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.0, "logprobs": 2}, {"n": 3}, {"guided_regex": "[a-z]+"}]
)
def test_a_row_of_nan_logits_fails_alone_and_leaves_nothing_in_the_blocks_it_had(
    prompt: list[int], options: dict[str, Any], poisoned: Crowd
) -> None:
    for _ in range(2):
        end = poisoned.try_row(Endpoint.COMPLETIONS, {"prompt": prompt, "max_tokens": 6, **options})
        assert isinstance(end, JobOutcome)
        assert end.state is JobState.FAILED
        assert end.error is not None
        assert end.error.code == "generation_failed"
        assert "the model computed nan" in end.error.message


def test_an_embedding_of_nan_fails_alone(poisoned: Crowd) -> None:
    end = poisoned.try_row(Endpoint.EMBEDDINGS, {"input": [[5, 6], [5, POISON]]})
    assert isinstance(end, JobOutcome)
    assert end.state is JobState.FAILED
    assert end.error is not None


def test_a_model_whose_weights_are_damaged_is_refused_before_any_job_is_suspected_of_it(
    store: Store, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path, tiny_llama_config())
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.input_layernorm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    batch_id = new_batch(store, [completion(1, {"prompt": "a", "max_tokens": 4})])
    service = WorkerService(store, lambda: Engine.load(engine_config(folder)), options=ServiceOptions(model="tiny"))
    service.start()
    with pytest.raises(ModelError, match=r"computes nan for every token of a trial: its weights are damaged"):
        service.run_until_idle(batch_id)
    service.drain()
    (row,) = store.iter_results(batch_id)
    assert (row.state, row.attempts, row.crashes) == (JobState.QUEUED, 0, 0)


def test_an_engine_that_computes_nothing_but_nan_gives_its_jobs_back_and_says_why(store: Store, tmp_path: Path) -> None:
    folder = write_model(tmp_path, tiny_llama_config())
    engine = Engine.load(engine_config(folder))
    jobs = [completion(i, {"prompt": f"number {i}", "max_tokens": 4, "ignore_eos": True}) for i in range(40)]
    before, batch_id = new_batch(store, jobs[:20]), new_batch(store, [])
    service = WorkerService(store, lambda: engine, options=ServiceOptions(model="tiny"))
    service.start()
    assert service.run_until_idle(before).succeeded == 20
    with torch.no_grad():
        engine._runner._model.network.base_model.embed_tokens.weight.fill_(torch.nan)
    store.insert_jobs(jobs[20:], batch_id=batch_id)
    with pytest.raises(EngineError, match=r"no usable numbers for any prompt \(the model computed nan"):
        service.run_until_idle(batch_id)
    service.drain()
    progress = store.batch_progress(batch_id)
    assert (progress.queued, progress.failed) == (20, 0)
    assert any(row.crashes == 1 for row in store.iter_results(batch_id))


def test_all_of_them_in_one_batch_leave_one_failed_row_each_in_sql(store: Store, make_service: ServiceMaker) -> None:
    good = [completion(i, row) for i, row in enumerate(NEIGHBOURS)]
    alone = _texts(store, make_service, good)
    cases = [case for name, case in BAD.items() if name not in NO_JSON]
    bad = [completion(100 + i, body_of(fields)) for i, (fields, _, _) in enumerate(cases)]
    again = [completion(1000 + i, row) for i, row in enumerate(NEIGHBOURS)]
    third = len(bad) // 3
    texts = _texts(store, make_service, [again[0], *bad[:third], again[1], *bad[third:], *again[2:]])
    assert [texts[job.job_id] for job in again] == [alone[job.job_id] for job in good]
    for job, (_, code, says) in zip(bad, cases, strict=True):
        row = store.job(job.job_id)
        assert row is not None
        assert row.state is JobState.FAILED
        assert row.error is not None
        assert row.error.code == code
        assert says in row.error.message


def completion(number: int, body: dict[str, Any]) -> NewJob:
    return new_job(number, endpoint=Endpoint.COMPLETIONS, body=body)


def _texts(store: Store, make_service: ServiceMaker, jobs: list[NewJob]) -> dict[str, str | None]:
    batch_id = new_batch(store, jobs)
    service = make_service()
    service.start()
    service.run_until_idle(batch_id)
    service.drain(0)
    rows = [store.job(job.job_id) for job in jobs]
    assert all(row is not None and row.finished for row in rows)
    assert store.check_integrity() == []
    return {row.job_id: row.text for row in rows if row is not None}
