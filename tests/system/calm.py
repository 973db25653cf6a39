"""What the tests that kill things ask for, and the answers when nobody is killed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvq.engine.engine import Engine
from kvq.worker.jobs import Endpoint, NewJob
from kvq.worker.service import ServiceOptions, WorkerService
from kvq.worker.store import Store
from tests.models import byte_tokenizer, engine_config, tiny_llama_config, write_model


def dummy_model(folder: Path) -> Path:
    """A tiny Llama over single bytes: its answers are noise, the same every time, and cost next to nothing."""
    tokenizer = byte_tokenizer()
    return write_model(folder, tiny_llama_config(vocab_size=len(tokenizer)), tokenizer=tokenizer)


def body(number: int) -> dict[str, Any]:
    """Prompts that share beginnings; half of the answers are drawn at random, from a seed of their own."""
    prompt = f"a prefix shared by every fifth prompt {number % 5} " * 4 + f"and number {number}"
    drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": 4 + number % 13, "ignore_eos": True, **drawn}


def job(job_id: str, number: int) -> NewJob:
    """The job with ``body(number)``; its custom id is its id, as that of a job sent by Celery is."""
    return NewJob(job_id=job_id, custom_id=job_id, endpoint=Endpoint.COMPLETIONS, body=body(number))


def calm_answers(model: Path, folder: Path, numbers: Iterable[int]) -> dict[int, str | None]:
    """The answers to ``body(number)``, from one engine in this process that nobody disturbs."""
    with Store.open(str(folder / "calm.db"), create=True) as store:
        store.create_batch(batch_id="calm")
        store.insert_jobs([job(str(number), number) for number in numbers], batch_id="calm")
        config = engine_config(model, max_num_seqs=16)
        service = WorkerService(store, lambda: Engine.load(config), options=ServiceOptions(model=model.name))
        service.start()
        service.run_until_idle("calm")
        service.drain(0)
        return {int(row.custom_id): row.text for row in store.iter_results("calm")}
