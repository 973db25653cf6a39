"""Answers given again: equal deterministic requests are computed once, across batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq.engine.config import EngineConfig
from kvq.engine.engine import Engine
from kvq.engine.request import SamplingParams
from kvq.worker.inference import Prepared
from kvq.worker.jobs import Endpoint, NewJob
from kvq.worker.request_key import model_identity, request_key
from kvq.worker.service import WorkerService
from kvq.worker.store import Store
from kvq.worker.store_records import ResultRow
from tests.factories import new_batch, new_job
from tests.models import engine_config
from tests.worker.conftest import ServiceMaker


def completion(number: int, **body: Any) -> NewJob:
    fields = {"prompt": f"question {number}", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **body}
    return new_job(number, endpoint=Endpoint.COMPLETIONS, body=fields)


def run(store: Store, service: WorkerService, jobs: list[NewJob]) -> list[ResultRow]:
    batch_id = new_batch(store, jobs)
    service.feeder.ring()
    service.run_until_idle(batch_id)
    return list(store.iter_results(batch_id))


@pytest.fixture
def service(make_service: ServiceMaker) -> WorkerService:
    made = make_service()
    made.start()
    assert made.wait_ready(60)
    return made


def test_the_second_submission_of_a_file_computes_nothing_and_gives_the_same_answers(
    store: Store, service: WorkerService, engine: Engine
) -> None:
    def file() -> list[NewJob]:
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0, "n": 2}
        jobs = [completion(i) for i in range(1, 6)]
        jobs.append(completion(6, temperature=0.9, seed=11, logprobs=2, echo=True))
        return [*jobs, new_job(7, body=chat)]

    first = run(store, service, file())
    assert all(row.metrics.served_from is None for row in first)
    before = engine.stats()
    second = run(store, service, file())
    assert engine.stats().generated_tokens == before.generated_tokens
    for old, new in zip(first, second, strict=True):
        assert (new.text, new.finish_reason, new.custom_id) == (old.text, old.finish_reason, old.custom_id)
        assert (new.metrics.served_from, new.metrics.computed_tokens) == (old.job_id, 0)
        assert new.metrics.cached_tokens == new.metrics.prompt_tokens == old.metrics.prompt_tokens
        assert new.metrics.completion_tokens == old.metrics.completion_tokens
        assert new.response is not None
        assert old.response is not None
        assert new.response["choices"] == old.response["choices"]
        assert new.response["id"].endswith(new.job_id)
        assert new.response["usage"]["prompt_tokens_details"] == {"cached_tokens": new.metrics.prompt_tokens}
    assert store.check_integrity() == []
    assert sum(row.used_tokens for row in store.tenants()) == sum(
        row.metrics.computed_tokens + row.metrics.completion_tokens for row in first
    )


def test_what_is_drawn_without_a_seed_or_asked_otherwise_is_computed(store: Store, service: WorkerService) -> None:
    def changed(**body: Any) -> list[NewJob]:
        return [completion(1, **body)]

    run(store, service, changed())
    run(store, service, changed(temperature=0.8, seed=3))
    for body in ({"temperature": 0.8}, {"temperature": 0.8}, {"temperature": 0.8, "seed": 4}, {"max_tokens": 5}):
        (row,) = run(store, service, changed(**body))
        assert row.metrics.served_from is None, body
    (row,) = run(store, service, changed(temperature=0.8, seed=3))
    assert row.metrics.served_from is not None


def test_an_answer_that_is_no_longer_kept_is_computed_again(
    store: Store, service: WorkerService, sql: Callable[..., list[Any]]
) -> None:
    (first,) = run(store, service, [completion(1)])
    sql("UPDATE results SET text = NULL, response = NULL")
    (second,) = run(store, service, [completion(1)])
    assert second.metrics.served_from is None
    assert second.text is not None
    assert len(second.text) > 0
    assert first.job_id != second.job_id


def test_with_the_setting_off_everything_is_computed(store: Store, make_service: ServiceMaker) -> None:
    service = make_service(serve_answers=False)
    service.start()
    assert service.wait_ready(60)
    for _ in range(2):
        (row,) = run(store, service, [completion(1)])
        assert row.metrics.served_from is None


def test_a_row_with_a_known_dedup_key_gets_the_answer_of_another_prompt(store: Store, service: WorkerService) -> None:
    jobs = [dataclasses.replace(completion(i, temperature=1.0), dedup_key="same") for i in (1, 2, 3)]
    first, *others = run(store, service, jobs)
    assert {row.text for row in others} == {first.text}
    assert {row.metrics.served_from for row in others} == {first.job_id}
    assert [row.custom_id for row in others] == ["row-2", "row-3"]


def prepared(**params: Any) -> Prepared:
    return Prepared(token_ids=(1, 2, 3), params=SamplingParams(**{"temperature": 0, **params}), model="tiny")


def test_a_key_holds_all_that_an_answer_depends_on_and_nothing_else() -> None:
    def key(identity: str = "i", endpoint: Endpoint = Endpoint.CHAT, **params: Any) -> str | None:
        return request_key(identity, endpoint, prepared(**params))

    assert key() == key(seed=5) == key(top_p=0.3), "greedy draws nothing"
    others = [key("j"), key(endpoint=Endpoint.COMPLETIONS), key(max_tokens=4), key(stop=("x",)), key(logprobs=1)]
    seeded = [key(temperature=0.5, seed=1), key(temperature=0.5, seed=2), key(temperature=0.6, seed=1)]
    longer = request_key("i", Endpoint.CHAT, dataclasses.replace(prepared(), token_ids=(1, 2, 3, 4)))
    assert len({key(), longer, *others, *seeded}) == 10
    assert key(temperature=0.5) is None


def test_the_identity_of_a_model_is_its_content_and_settings_not_its_place(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    def identity(folder: Path = tiny_model_folder, max_model_len: int = 64, **settings: Any) -> str | None:
        config: EngineConfig = engine_config(folder, **settings)
        return model_identity(config, max_model_len=max_model_len)

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_model_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert identity() is not None
    assert identity() == identity(copy) == identity(max_num_seqs=3, kv_cache_memory=1 << 20)
    others = [identity(dtype="bfloat16"), identity(quantization="int8"), identity(kv_cache_dtype="int8")]
    others += [identity(max_model_len=65), identity(load_format="dummy")]
    with (copy / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)
        weights.seek(-1, 2)
        weights.write(bytes([last[0] ^ 1]))
    assert len({identity(), identity(copy), *others}) == 7
