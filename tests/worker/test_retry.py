"""What becomes of a job whose worker died."""

from __future__ import annotations

import pytest

from kvq.worker.jobs import JobState
from kvq.worker.retry import after_crash


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_job_is_tried_again_until_the_last_crash(crashes: int) -> None:
    assert after_crash(crashes=crashes, max_crashes=3).state is JobState.QUEUED


def test_the_last_crash_makes_a_dead_letter_that_says_why() -> None:
    verdict = after_crash(crashes=3, max_crashes=3)
    assert verdict.state is JobState.DEAD
    assert verdict.error is not None
    assert verdict.error.code == "worker_lost"
    assert "3 workers" in verdict.error.message


def test_a_cancel_request_survives_the_worker() -> None:
    for crashes in (1, 3):
        assert after_crash(crashes=crashes, cancel_requested=True, expired=True).state is JobState.CANCELLED


def test_a_passed_deadline_ends_the_job_but_a_poison_job_is_still_named_so() -> None:
    assert after_crash(crashes=1, expired=True).state is JobState.EXPIRED
    assert after_crash(crashes=3, expired=True).state is JobState.DEAD


def test_only_a_job_that_ends_carries_an_error() -> None:
    for cancel_requested in (False, True):
        for expired in (False, True):
            for crashes in (1, 2, 3, 4):
                verdict = after_crash(crashes=crashes, cancel_requested=cancel_requested, expired=expired)
                assert (verdict.error is None) == (verdict.state is JobState.QUEUED)
