"""What the tests that kill things ask for, and the answers when nobody is killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvq.worker.jobs import Endpoint, NewJob
from tests.models import byte_tokenizer, tiny_llama_config, write_model
from tests.system.forked import fork
from tests.system.processes import START_TIMEOUT_S, Worker
from tests.system.rows import query


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


def write_file(path: Path, bodies: Mapping[str, dict[str, Any]]) -> Path:
    """Bodies by custom id as a file for ``kvq run``, in OpenAI's batch format."""
    with path.open("w", encoding="utf-8") as file:
        for custom_id, body in bodies.items():
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def calm_answers(model: Path, folder: Path, numbers: Iterable[int]) -> dict[int, str | None]:
    """The answers to ``body(number)``, by one ``kvq run`` that nobody disturbs."""
    db = folder / "calm.db"
    file = write_file(folder / "calm.jsonl", {str(number): body(number) for number in numbers})
    settings = {"db": db, "model": model, "device": "cpu", "kv_cache_memory": "16MiB", "enable_dedup": "false"}
    run = Worker(folder / "calm", settings, str(file), command=("run",), start=fork)
    assert run.wait(START_TIMEOUT_S) == 0, run.log
    rows = query(f"sqlite:///{db}", "SELECT j.custom_id, r.text FROM jobs j JOIN results r ON r.seq = j.seq")
    return {int(custom_id): text for custom_id, text in rows}
