"""Malformed lines, bodies and messages by the thousand: none ends a thread, none is lost, none is left half done."""

from __future__ import annotations

import base64
import bz2
import json
import lzma
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from kvq.engine.errors import InvalidParameter
from kvq.engine.sampling_params import SamplingParams
from kvq.worker.client import Client
from kvq.worker.errors import BrokerError, RowError
from kvq.worker.formats import parse_body
from kvq.worker.intake import Intake
from kvq.worker.jobs import Endpoint
from kvq.worker.keys import QueueKeys
from kvq.worker.limits import MAX_DEPTH
from kvq.worker.messages import read_message
from kvq.worker.store import Store

KEYS = QueueKeys(queue="kvq")
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ],
    "max_tokens": 5,
    "temperature": 0.5,
    "stop": ["END"],
    "logit_bias": {"7": 1.5},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
}
# Out of UTC's years in UTC, without a zone, in no calendar, no text at all.
TIMES = (
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00", "9999-12-31T23:59:59.999999Z"),
    *(
        "2026-11-30T06:00:00",
        "2026-11-30",
        "2026-W49-1",
        "2026-02-30T00:00:00Z",
        "10000-01-01T00:00:00Z",
        "",
        "tomorrow",
    ),
    *(True, False, 0, -1, 1796018400, 1e18, [], {}),
)
# As JSON may spell them: no float holds the first two, and Python reads no integer as long as the third.
NUMBERS = (
    "1e999",
    "-1e999",
    "9" * 5000,
    "1" + "0" * 400,
    "1e-999",
    "-0",
    "-0.0",
    "1E5",
    "5.0",
    "true",
    "18446744073709551616",
)
CODECS: dict[str, Callable[[bytes], bytes]] = {
    **{"application/x-gzip": zlib.compress, "gzip": zlib.compress, "zlib": zlib.compress},
    **{"application/x-bz2": bz2.compress, "bzip2": bz2.compress},
    **{"application/x-lzma": lzma.compress, "xz": lzma.compress},
}


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def strange_value(draw: random.Random) -> Any:
    """Something of any type, most of it unfit for where it is put."""
    return draw.choice(
        [
            lambda: None,
            lambda: draw.choice([True, False]),
            lambda: draw.choice([0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30]),
            lambda: draw.choice([0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf")]),
            lambda: draw.choice(["", "\x00", "\ud800", "a" * 5000, "DROP TABLE jobs", "\u202e", "😀" * 9, "user"]),
            lambda: nested(draw.choice([1, MAX_DEPTH - 3, MAX_DEPTH + 1, 400])),
            lambda: {"type": strange_value(draw)},
            lambda: [strange_value(draw) for _ in range(draw.randrange(4))],
            lambda: {draw.choice(["task", "role", "content", "id", "\x00", ""]): strange_value(draw)},
        ]
    )()


def mutate(value: Any, draw: random.Random) -> Any:
    """The value with one place in it replaced, removed or added."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        changed = dict(value)
        key = draw.choice(list(changed))
        action = draw.random()
        if action < 0.1:
            del changed[key]
        elif action < 0.2:
            changed[draw.choice(["n", "tools", "prompt", "seed", "echo", "x", "guided_regex"])] = strange_value(draw)
        else:
            changed[key] = mutate(changed[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        return [*value[:place], mutate(value[place], draw), *value[place + 1 :]]
    return strange_value(draw)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes cut off, repeated or overwritten."""
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.randrange(1, 40))
    noise = bytes(draw.randrange(256) for _ in range(draw.randrange(6)))
    return draw.choice([data[:start], data[start:], data[:start] + noise + data[end:], data + noise])


def line(draw: random.Random) -> bytes:
    row = {"custom_id": f"row-{draw.random()}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    for _ in range(draw.randrange(1, 3)):
        row = mutate(row, draw)
    raw = encoded(row, draw)
    return (damaged(raw, draw) if draw.random() < 0.3 else raw).replace(b"\n", b" ")


def encoded(value: Any, draw: random.Random) -> bytes:
    """The value as JSON, now and then with one of its numbers in a strange spelling."""
    text = json.dumps(value)
    numbers = list(re.finditer(r"(?<=[:\[,] )-?[0-9]+(\.[0-9]+)?(?=[,}\]])", text))
    if numbers and draw.random() < 0.2:
        number = draw.choice(numbers)
        text = text[: number.start()] + draw.choice(NUMBERS) + text[number.end() :]
    return text.encode()


def packed(body: bytes, headers: dict[str, Any], draw: random.Random) -> bytes:
    """The body compressed as its header says, or not quite so."""
    codec = draw.choice(list(CODECS))
    headers["compression"] = codec if draw.random() < 0.8 else draw.choice([*CODECS, "zstd", strange_value(draw)])
    body = CODECS[codec](body)
    return damaged(body, draw) if draw.random() < 0.3 else body


def message(number: int, draw: random.Random) -> bytes:
    """What kombu puts into Redis for a Celery task, with something wrong with it."""
    links: dict[str, Any] = {"callbacks": None, "errbacks": [{"task": "t", "args": [], "kwargs": {}}], "chain": None}
    call = [[], CHAT, links]
    envelope: dict[str, Any] = {
        "body": "",
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"id": f"id-{number}", "task": "kvq.generate", "eta": None, "expires": None, "timelimit": [None, 1]},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": f"tag-{number}",
            "delivery_info": {"exchange": "", "routing_key": "kvq"},
            "priority": 0,
        },
    }
    place = draw.random()
    body = encoded(mutate(call, draw) if place < 0.5 else call, draw)
    if 0.5 <= place < 0.6:
        body = damaged(body, draw)
    if draw.random() < 0.2:
        body = packed(body, envelope["headers"], draw)
    if draw.random() < 0.2:
        envelope["headers"][draw.choice(["eta", "expires"])] = draw.choice(TIMES)
    envelope["body"] = base64.b64encode(body).decode()
    if place >= 0.6:
        envelope = mutate(envelope, draw)
    raw = encoded(envelope, draw)
    return damaged(raw, draw) if place > 0.9 else raw


def test_any_body_is_parsed_or_refused() -> None:
    draw = random.Random(1)
    refused = 0
    for _ in range(8_000):
        body = CHAT
        for _ in range(draw.randrange(1, 4)):
            body = mutate(body, draw)
        if not isinstance(body, dict):
            continue
        try:
            parse_body(draw.choice(list(Endpoint)), body)
        except RowError:
            refused += 1
    assert refused > 4_000


def test_an_integer_beyond_all_floats_is_refused_by_name() -> None:
    with pytest.raises(RowError, match="temperature: must be a finite number"):
        parse_body(Endpoint.CHAT, {**CHAT, "temperature": 10**400})
    with pytest.raises(InvalidParameter, match="temperature"):
        SamplingParams(temperature=10**400)


def test_any_message_is_a_job_or_poison() -> None:
    draw = random.Random(2)
    jobs = poison = 0
    for number in range(6_000):
        try:
            read_message(message(number, draw), "kvq")
            jobs += 1
        except BrokerError:
            poison += 1
    assert jobs > 2_000
    assert poison > 200


def test_any_message_in_redis_ends_in_sql_or_in_the_poison_list(
    redis_url: str, store: Store, sql: Callable[..., list[Any]]
) -> None:
    draw = random.Random(3)
    number = 2_000
    faults: list[Exception] = []
    raws = [message(i, draw) for i in range(number)]
    intake = Intake(redis_url, store, keys=KEYS, max_queued=10**6, on_new=lambda: None, on_fault=faults.append)
    with redis.Redis.from_url(redis_url) as server:
        server.lpush(KEYS.queue, *raws)
        while server.llen(KEYS.queue):
            intake.take_once()
        assert server.exists(KEYS.unacked, KEYS.unacked_index) == 0
        num_poison = int(server.llen(KEYS.poison))
    intake.stop()
    ((num_jobs,),) = sql("SELECT count(*) FROM jobs")
    # Two messages may have come to bear the same id, or the same delivery tag; none is missing otherwise.
    assert number - 20 <= num_jobs + num_poison <= number
    assert num_jobs > number // 2
    assert num_poison > 0
    assert faults == []
    assert store.check_integrity() == []


def test_any_file_is_checked_to_its_end_and_its_good_rows_can_be_run(tmp_path: Path, store_url: str) -> None:
    draw = random.Random(4)
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(b"\n".join(line(draw) for _ in range(2_000)))
    with Client(db=store_url) as client:
        (batch,) = client.submit_files([str(path)], skip_invalid=True)
        progress = client.status(batch)
        assert progress.total == batch.report.num_rows
        assert progress.failed == len(batch.report.bad) > 500
        assert progress.queued == progress.total - progress.failed > 0
        rows = list(client.results(batch))
    assert all((row.error is not None) == (row.state == "failed") for row in rows)
    with Store.open(store_url) as store:
        assert store.check_integrity() == []
