"""Messages that would end whoever reads them: their senders are answered, and the readers go on."""

from __future__ import annotations

import base64
import bz2
import json
import lzma
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import redis

from kvq.worker import intake, messages
from kvq.worker.intake import Intake
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import read_message
from kvq.worker.poison import PoisonList
from kvq.worker.store import Store

KEYS = QueueKeys(queue="kvq")
CALL = json.dumps([[], {"prompt": "hi", "max_tokens": 2}, {}]).encode()


def message(body: bytes = CALL, **headers: Any) -> bytes:
    envelope = {
        "body": base64.b64encode(body).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"lang": "py", "task": "kvq.generate", "id": "task-1", **headers},
        "properties": {"body_encoding": "base64", "delivery_tag": "tag-1"},
    }
    return json.dumps(envelope).encode()


def test_a_name_given_twice_in_the_body_fails_the_job() -> None:
    error = read_message(message(b'[[], {"prompt": "hi", "max_tokens": 2, "max_tokens": 3}, {}]'), "kvq").error
    assert error is not None
    assert (error.code, "max_tokens: is given twice" in error.message) == ("invalid_json", True)


@pytest.mark.parametrize("header", ["eta", "expires"])
@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026", 5, "never"])
def test_a_time_that_is_none_in_utc_fails_the_job(header: str, time: object) -> None:
    error = read_message(message(**{header: time}), "kvq").error
    assert error is not None
    assert (error.code, error.message) == ("invalid_value", f"{header}: must be an ISO 8601 time, got {time!r}")


@pytest.mark.parametrize(("given", "priority"), [(True, 1), (-4, 0), (99, 9), (3.5, 0), ("1", 0), (None, 0)])
def test_a_priority_is_an_integer_whatever_was_sent(given: object, priority: int) -> None:
    raw = json.dumps({**json.loads(message()), "properties": {"body_encoding": "base64", "priority": given}}).encode()
    found = read_message(raw, "kvq").priority
    assert (found, type(found)) == (priority, int)


ALONE = lzma.compress(CALL, format=lzma.FORMAT_ALONE)
# Says that it needs a dictionary of 1.5 GiB.
HUNGRY = ALONE[:1] + (1536 * 2**20).to_bytes(4, "little") + ALONE[5:]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "application/x-gzip": zlib.compress,
    "application/x-bz2": bz2.compress,
    "application/x-lzma": lzma.compress,
    "zlib": zlib.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("codec", PACKERS)
def test_a_compressed_body_is_read_and_a_bomb_costs_no_more_memory_than_a_body_may(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 2**20)
    pack = PACKERS[codec]
    assert read_message(message(pack(CALL), compression=codec), "kvq").body == {"prompt": "hi", "max_tokens": 2}
    bomb = message(pack(bytes(32 * 2**20)), compression=codec)
    tracemalloc.start()
    try:
        error = read_message(bomb, "kvq").error
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error is not None
    assert error.message == "the body: is larger than 1 MiB once it is decompressed"
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    ("body", "codec", "told"),
    [
        (zlib.compress(CALL)[:-6], "application/x-gzip", "it ends too early"),
        (CALL, "application/x-gzip", "cannot be decompressed"),
        (CALL, "application/x-bz2", "cannot be decompressed"),
        (CALL, "application/x-lzma", "cannot be decompressed"),
        (HUNGRY, "application/x-lzma", "Memory usage limit exceeded"),
        (CALL, "application/x-brotli", "is none of application/x-gzip, application/x-bz2, application/x-lzma"),
        (CALL, ["gzip"], "is none of"),
    ],
)
def test_a_body_that_cannot_be_decompressed_says_why(body: bytes, codec: object, told: str) -> None:
    error = read_message(message(body, compression=codec), "kvq").error
    assert error is not None
    assert error.code == "invalid_value"
    assert told in error.message


def test_a_message_whose_reader_stumbles_is_set_aside_and_holds_nobody_up(
    redis_url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(raw: bytes, queue: str) -> Any:
        if b"stumble" in raw:
            raise OverflowError("nobody foresaw it")
        return read_message(raw, queue)

    monkeypatch.setattr(intake, "read_message", stumble)
    bad, good = message(stumble=1), message(id="task-2").replace(b"tag-1", b"tag-2")
    with redis.Redis.from_url(redis_url) as server:
        server.lpush(KEYS.queue, bad, good)
        Intake(redis_url, store, keys=KEYS, max_queued=9, on_new=lambda: None, on_fault=lambda _: None).take_once()
        assert [job.job_id for job in store.peek("kvq", limit=9)] == ["task-2"]
        assert server.lrange(KEYS.poison, 0, -1) == [bad]
        assert server.hlen(KEYS.unacked) == 0
    with PoisonList(redis_url, "kvq") as poison:
        (listed,) = poison.messages(9)
        assert listed.reason == "it can be read now, or the database refused it: try it again"
