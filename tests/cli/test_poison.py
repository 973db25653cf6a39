"""Messages that nobody could read are kept, shown, tried again or deleted, by a person."""

from __future__ import annotations

import json

import redis

from kvq.worker.intake import Intake
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import MAX_MESSAGE_BYTES
from kvq.worker.store import Store
from tests.cli.conftest import Kvq

KEYS = QueueKeys(queue="kvq")


def test_unreadable_messages_are_listed_retried_and_dropped(kvq: Kvq, redis_url: str, store: Store) -> None:
    intake = Intake(redis_url, store, keys=KEYS, max_queued=10, on_new=lambda: None, on_fault=lambda _: None)
    huge = b" " * (MAX_MESSAGE_BYTES + 1)
    with redis.Redis.from_url(redis_url) as server:
        server.lpush(KEYS.queue, b"not json", b'{"properties": {}}', huge)
        while server.llen(KEYS.queue):
            assert intake.take_once() == 0
        listed = json.loads(kvq("poison", "list", "--broker", redis_url, "--json").out)
        assert [message["num_bytes"] for message in listed] == [len(huge), 18, 8]
        assert ["larger than 48 MiB" in listed[0]["reason"], "JSON" in listed[2]["reason"]] == [True, True]
        assert "not json" in kvq("poison", "list", "--broker", redis_url).out
        assert kvq("poison", "retry", "--broker", redis_url).err == "3 messages put back into queue kvq\n"
        assert (server.llen(KEYS.queue), server.llen(KEYS.poison)) == (3, 0)
        while server.llen(KEYS.queue):
            intake.take_once()
        assert kvq("poison", "drop", "--broker", redis_url, "--yes").err == "3 messages deleted\n"
        assert server.exists(KEYS.poison) == 0
    intake.stop()


def test_without_a_broker_there_is_no_poison_list(kvq: Kvq) -> None:
    ran = kvq("poison", "list")
    assert ran.code == 2
    assert "broker: is not set" in ran.err
