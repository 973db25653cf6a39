"""Intakes under test: opened on one queue, fed by Celery clients or with bytes."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery

from kvq.worker.intake import Intake
from kvq.worker.jobs import JobState
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store

KEYS = QueueKeys(queue="kvq")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


class Doors:
    """Intakes of one queue into one store."""

    def __init__(self, redis_url: str, store: Store) -> None:
        self.redis_url = redis_url
        self.store = store
        self.rings = 0
        self.revoked: set[str] = set()
        self.faults: list[Exception] = []

    def open(
        self,
        *,
        max_queued: int = 1000,
        clock: Callable[[], float] = time.monotonic,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> Intake:
        return Intake(
            self.redis_url,
            self.store,
            keys=KEYS,
            max_queued=max_queued,
            clock=clock,
            on_new=self._ring,
            on_fault=self.faults.append,
            is_revoked=self.revoked.__contains__,
            is_busy=is_busy,
        )

    def _ring(self) -> None:
        self.rings += 1


def send(client: Celery, body: dict[str, Any] | None = None, **options: Any) -> str:
    return str(client.send_task("kvq.generate", kwargs=CHAT if body is None else body, queue="kvq", **options).id)


def error_code(store: Store, job_id: str) -> str:
    row = store.job(job_id)
    assert row is not None
    assert row.state is JobState.FAILED
    assert row.error is not None
    return row.error.code


def assert_nothing_is_left(server: redis.Redis) -> None:
    assert server.exists(*KEYS.waiting, KEYS.unacked, KEYS.unacked_index) == 0


def envelope(headers: dict[str, Any], body: Any, tag: str | None = None, **properties: Any) -> bytes:
    return json.dumps(
        {
            "body": base64.b64encode(json.dumps(body).encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": {"delivery_tag": tag or uuid.uuid4().hex, "body_encoding": "base64", **properties},
        }
    ).encode()
