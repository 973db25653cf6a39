"""Failpoints: off unless asked for, and deadly at the hit that was asked for."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from kvq.worker.errors import SettingsError
from kvq.worker.failpoints import NAMES, Failpoints


def test_without_a_specification_nothing_happens() -> None:
    for name in NAMES:
        Failpoints().hit(name)
        Failpoints("").hit(name)


@pytest.mark.parametrize("spec", ["after_lunch", "after_pop:0", "after_pop:x", "after_pop:-1", "after_pop,:3"])
def test_a_specification_that_makes_no_sense_is_refused(spec: str) -> None:
    with pytest.raises(SettingsError, match="KVQ_FAILPOINTS"):
        Failpoints(spec)


def test_the_process_dies_at_the_hit_that_was_asked_for() -> None:
    program = (
        "from kvq.worker.failpoints import Failpoints\n"
        "failpoints = Failpoints.from_environment()\n"
        "for number in range(9):\n"
        "    print(number, flush=True)\n"
        "    failpoints.hit('after_claim')\n"
        "    failpoints.hit('after_pop')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"KVQ_FAILPOINTS": "after_pop:7, after_claim:3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == -signal.SIGKILL
    assert ran.stdout.split() == ["0", "1", "2"]
