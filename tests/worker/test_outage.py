"""What the log is told of a server that is away."""

from __future__ import annotations

import logging

import pytest

from kvq.worker.outage import Outage


def test_the_same_reason_is_told_once_a_minute_and_another_at_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    outage = Outage("the broker is away", logging.getLogger(__name__), clock=lambda: now)
    for _ in range(90):
        outage.met(ConnectionError("refused"))
        now += 1
    outage.met(ConnectionError("wrong password"))
    assert [record.getMessage().partition(", ")[0] for record in caplog.records] == ["the broker is away"] * 3
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "refused",
        "refused",
        "wrong password",
    ]
