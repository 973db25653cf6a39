"""A rerun gives the answer that a row had in a crowd, whatever it asked for, or says where it differs."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvq.engine.engine import Engine
from kvq.worker.embeddings import vector_of
from kvq.worker.jobs import Endpoint, JobState, NewJob
from kvq.worker.rerun import Verdict, rerun
from kvq.worker.service import ServiceOptions, WorkerService
from kvq.worker.store import Store
from kvq.worker.store_records import ResultRow
from tests.engine.adapters import write_adapter
from tests.factories import new_batch, new_job
from tests.models import engine_config

ASKS = {"logprobs", "prompt_logprobs"}
HELLO = [{"role": "user", "content": "hello"}]
ROWS: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "drawn without a seed": (Endpoint.COMPLETIONS, {"prompt": "tell me", "temperature": 1.3, "max_tokens": 12}),
    "drawn with a seed": (Endpoint.COMPLETIONS, {"prompt": "tell me", "seed": 9, "max_tokens": 12, "top_p": 0.9}),
    "of five samples": (Endpoint.COMPLETIONS, {"prompt": "tell me", "n": 5, "max_tokens": 9}),
    "with log-probabilities": (
        Endpoint.CHAT,
        {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 9},
    ),
    "with the prompt's log-probabilities": (
        Endpoint.COMPLETIONS,
        {"prompt": "tell me", "echo": True, "logprobs": 2, "max_tokens": 5},
    ),
    "of a chat's prompt": (Endpoint.CHAT, {"messages": HELLO, "prompt_logprobs": 2, "max_tokens": 3}),
    "of an adapter": (Endpoint.COMPLETIONS, {"prompt": "tell me", "model": "mine", "n": 2, "max_tokens": 9}),
    "in a form": (Endpoint.CHAT, {"messages": HELLO, "guided_regex": "[a-f]{9}", "max_tokens": 20}),
    "of penalties": (Endpoint.COMPLETIONS, {"prompt": "a a a", "presence_penalty": 1.5, "max_tokens": 16}),
    "embedded": (Endpoint.EMBEDDINGS, {"input": ["tell me", [5, 6, 7]]}),
    "embedded by an adapter": (Endpoint.EMBEDDINGS, {"input": "tell me", "model": "mine", "encoding_format": "base64"}),
}


@pytest.fixture(scope="module")
def adapted(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    network = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_folder, attn_implementation="eager")
    adapter = write_adapter(network, tmp_path_factory.mktemp("adapter"), seed=1)
    return Engine.load(
        engine_config(tiny_model_folder, max_num_seqs=16, enable_lora=True, lora_modules=(f"mine={adapter}",))
    )


@pytest.fixture
def store_url(sqlite_url: str) -> str:
    """One database is enough: what is stored is tried elsewhere."""
    return sqlite_url


@pytest.fixture
def answered(store: Store, adapted: Engine) -> dict[str, tuple[NewJob, ResultRow]]:
    """The rows, each run three times in one batch."""
    jobs = {
        (name, i): new_job(10 * i + place, endpoint=endpoint, body=body)
        for i in range(3)
        for place, (name, (endpoint, body)) in enumerate(ROWS.items())
    }
    batch_id = new_batch(store, list(jobs.values()))
    service = WorkerService(store, lambda: adapted, options=ServiceOptions(model="tiny"))
    service.start()
    service.run_until_idle(batch_id)
    service.drain(0)
    found = {}
    for name in ROWS:
        row = store.job(jobs[name, 1].job_id)
        assert row is not None
        assert row.state is JobState.SUCCEEDED, (name, row.error)
        found[name] = (jobs[name, 1], row)
    return found


def test_every_kind_of_row_gives_the_same_answer_alone(
    answered: dict[str, tuple[NewJob, ResultRow]], adapted: Engine
) -> None:
    for name, (job, row) in answered.items():
        again = rerun(row, job.body, lambda: adapted)
        assert again.verdict is Verdict.SAME, (name, again.differences)
        assert again.num_choices == job.body.get("n", 2 if name == "embedded" else 1)
        assert again.logprob_difference == (0.0 if job.body.keys() & ASKS else None), name
        assert again.vector_difference == (0.0 if "embedded" in name else None), name


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("with log-probabilities", ("choices", 0, "logprobs", "content", 2, "logprob")),
        ("with log-probabilities", ("choices", 0, "logprobs", "content", 2, "top_logprobs", 1, "logprob")),
        ("with the prompt's log-probabilities", ("choices", 0, "logprobs", "token_logprobs", 2)),
        ("of a chat's prompt", ("prompt_logprobs", 3, None, "logprob")),
    ],
)
def test_log_probabilities_are_part_of_an_answer_but_for_rounding(
    name: str, path: tuple[Any, ...], answered: dict[str, tuple[NewJob, ResultRow]], adapted: Engine
) -> None:
    job, row = answered[name]
    for by, verdict in ((0.25, Verdict.OTHER_LOGPROBS), (2e-5, Verdict.SAME)):
        changed = json.loads(json.dumps(row.response))
        place = changed
        for key in path[:-1]:
            place = place[next(iter(place)) if key is None else key]
        place[path[-1]] -= by
        again = rerun(replace(row, response=changed), job.body, lambda: adapted)
        assert again.verdict is verdict
        assert again.logprob_difference == pytest.approx(by)


@pytest.mark.parametrize("name", ["embedded", "embedded by an adapter"])
def test_vectors_are_the_same_but_for_rounding_in_either_encoding(
    name: str, answered: dict[str, tuple[NewJob, ResultRow]], adapted: Engine
) -> None:
    job, row = answered[name]
    for by, verdict in ((2e-5, Verdict.SAME), (0.25, Verdict.DIFFERENT)):
        changed = json.loads(json.dumps(row.response))
        values = list(vector_of(changed["data"][0]))
        values[7] -= by
        encoded = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        changed["data"][0]["embedding"] = encoded if job.body.get("encoding_format") == "base64" else values
        again = rerun(replace(row, response=changed), job.body, lambda: adapted)
        assert again.verdict is verdict
        assert again.vector_difference == pytest.approx(by, rel=1e-2)
        assert [(one.choice, one.position) for one in again.differences] == [(0, 7)] * (verdict is Verdict.DIFFERENT)


def test_the_first_place_that_differs_is_named(answered: dict[str, tuple[NewJob, ResultRow]], adapted: Engine) -> None:
    job, row = answered["of five samples"]
    changed = json.loads(json.dumps(row.response))
    changed["choices"][3]["text"] = changed["choices"][3]["text"][:4] + "\x00"
    (difference,) = rerun(replace(row, response=changed), job.body, lambda: adapted).differences
    assert (difference.choice, difference.position) == (3, 4)
    job, row = answered["embedded"]
    changed = json.loads(json.dumps(row.response))
    changed["data"][1]["embedding"][7] += 1.0
    (difference,) = rerun(replace(row, response=changed), job.body, lambda: adapted).differences
    assert (difference.choice, difference.position) == (1, 7)


def test_a_call_of_a_tool_is_compared_as_what_is_called(
    answered: dict[str, tuple[NewJob, ResultRow]], adapted: Engine
) -> None:
    job, row = answered["in a form"]
    text = row.response["choices"][0]["message"]["content"]  # type: ignore[index]
    changed = json.loads(json.dumps(row.response))
    changed["choices"][0]["message"] = {
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": text, "arguments": "{}"}}],
    }
    (difference,) = rerun(replace(row, response=changed), job.body, lambda: adapted).differences
    assert (difference.position, difference.before) == (len(text), "({})")
