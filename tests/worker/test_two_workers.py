"""Two workers give the answers of one: what a job gets does not depend on which of them it ran on, or beside what."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kvq.engine.engine import Engine
from kvq.engine.request import SamplingParams
from kvq.worker.jobs import Endpoint
from kvq.worker.service import WorkerService
from kvq.worker.service_options import ServiceOptions
from kvq.worker.store import Store
from tests.factories import new_batch, new_job
from tests.models import engine_config

NUM_ROWS = 64


def _body(number: int) -> dict[str, Any]:
    beginning = f"a beginning shared by every fifth row {number % 5} " * (number % 3)
    how = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
    return {"prompt": f"{beginning}and row {number}", "max_tokens": 10, "ignore_eos": True, **how}


def _alone(engine: Engine, number: int) -> str:
    body = _body(number)
    prompt = body.pop("prompt")
    engine.add_request(str(number), prompt, SamplingParams(**body))
    while engine.has_unfinished_requests:
        for output in engine.step():
            return output.outputs[0].text
    raise AssertionError("no answer")


def test_two_workers_give_every_row_the_answer_that_it_gets_alone(
    store: Store, engine: Engine, tiny_model_folder: Path
) -> None:
    expected = {str(number): _alone(engine, number) for number in range(NUM_ROWS)}
    engines = [engine, Engine.load(engine_config(tiny_model_folder, max_num_seqs=16, max_num_batched_tokens=32))]
    options = ServiceOptions(model="tiny", max_claimed=16)
    services = [WorkerService(store, lambda one=one: one, options=options) for one in engines]  # type: ignore[misc]
    rows = [
        new_job(n, custom_id=str(n), endpoint=Endpoint.COMPLETIONS, body=_body(n)) for n in reversed(range(NUM_ROWS))
    ]
    batch_id = new_batch(store, rows)
    try:
        for service in services:
            service.start()
        assert services[0].run_until_idle(batch_id).succeeded == NUM_ROWS
    finally:
        for service in services:
            service.drain(0)
    done = list(store.iter_results(batch_id))
    assert {row.custom_id: row.text for row in done} == expected
    assert len(Counter(row.worker_id for row in done)) == 2
