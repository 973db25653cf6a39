"""Jobs with secrets in them, and a look at all that a database holds of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from kvq.migrations.url import database_url
from kvq.worker.jobs import Endpoint
from kvq.worker.store import Store
from tests.factories import claim_all, new_job, new_worker, outcome_of

Sql = Callable[..., list[Any]]
# Opens the test's database under the keys and wishes that are given.
OpenStore = Callable[..., Store]

MARK = "the-secret-of-the-prompt"
ANSWER = "the-secret-of-the-answer"
KEYS = [bytes([number]) * 32 for number in range(3)]


def text_of(*keys: bytes) -> str:
    return ",".join(base64.b64encode(key).decode() for key in keys)


def secret_job(number: int = 1, **changes: Any) -> Any:
    body = {"prompt": f"{MARK} {number}", "echo": True, "max_tokens": 4, **changes.pop("body", {})}
    return new_job(number, endpoint=Endpoint.COMPLETIONS, body=body, **changes)


def answered(job: Any, **changes: Any) -> Any:
    response = {"id": job.job_id, "choices": [{"text": ANSWER}]}
    return outcome_of(job, **{"text": ANSWER, "response": response, **changes})


def everything(store_url: str) -> str:
    """All that the database holds, as text: every table, and SQLite's file and its log byte by byte."""
    engine = sa.create_engine(database_url(store_url), poolclass=sa.pool.NullPool)
    held = []
    with engine.connect() as connection:
        for table in sa.inspect(connection).get_table_names():
            rows = connection.execute(sa.text(f'SELECT * FROM "{table}"')).all()
            held.append(json.dumps([list(row) for row in rows], default=str, ensure_ascii=False))
    engine.dispose()
    path = database_url(store_url).database
    if store_url.startswith("sqlite") and path:
        held += [file.read_bytes().decode("latin-1") for file in (Path(path), Path(f"{path}-wal")) if file.exists()]
    return "\n".join(held)


def succeed(store: Store) -> None:
    worker_id = new_worker(store)
    store.finish(worker_id, [answered(job) for job in claim_all(store, worker_id)])
