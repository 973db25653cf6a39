"""The company rule: suspects never run beside jobs that have not crashed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvq.worker.company import MAX_FIRST_OFFENDERS, Admission, Company, admission, company_of

FRESH, FIRST, SECOND = Company.FRESH, Company.FIRST_OFFENDERS, Company.SECOND_OFFENDERS


def test_fresh_jobs_start_without_limit_beside_fresh_jobs() -> None:
    assert admission([FRESH] * 40, [FRESH, FIRST, SECOND]) == Admission(company=FRESH)


def test_no_suspect_starts_while_a_fresh_job_waits_or_runs() -> None:
    assert admission([], [FRESH, FIRST]) == Admission(company=FRESH)
    assert admission([FRESH], [FIRST]) is None
    assert admission([FRESH], [SECOND]) is None


def test_four_first_offenders_run_together_at_most() -> None:
    assert admission([], [FIRST]) == Admission(company=FIRST, limit=4)
    assert admission([FIRST] * 3, [FIRST]) == Admission(company=FIRST, limit=1)
    assert admission([FIRST] * 4, [FIRST]) is None


def test_a_second_offender_runs_alone() -> None:
    assert admission([], [SECOND]) == Admission(company=SECOND, limit=1)
    assert admission([SECOND], [SECOND]) is None
    assert admission([FIRST], [SECOND]) is None


def test_a_fresh_job_waits_for_running_suspects_to_end() -> None:
    assert admission([FIRST], [FRESH, FIRST]) is None


def test_overdue_suspects_go_before_fresh_jobs_once_those_that_run_have_ended() -> None:
    assert admission([FRESH], [FRESH, FIRST], suspects_overdue=True) is None
    assert admission([], [FRESH, FIRST], suspects_overdue=True) == Admission(company=FIRST, limit=4)


def test_something_starts_whenever_nothing_runs_and_something_waits() -> None:
    for waiting in ([FRESH], [FIRST], [SECOND], [FIRST, SECOND], [FRESH, SECOND]):
        for overdue in (False, True):
            assert admission([], waiting, suspects_overdue=overdue) is not None


@given(
    running=st.lists(st.sampled_from(Company)),
    waiting=st.lists(st.sampled_from(Company)),
    overdue=st.booleans(),
)
def test_whoever_is_admitted_keeps_the_company_it_belongs_to(
    running: list[Company], waiting: list[Company], overdue: bool
) -> None:
    allowed = admission(running, waiting, suspects_overdue=overdue)
    if allowed is None:
        return
    assert allowed.company in waiting
    assert set(running) <= {allowed.company}
    if allowed.company is FIRST:
        assert allowed.limit is not None
        assert 1 <= allowed.limit <= MAX_FIRST_OFFENDERS - len(running)
    if allowed.company is SECOND:
        assert allowed.limit == 1
        assert not running


def test_the_number_of_crashes_decides_the_company() -> None:
    assert [company_of(crashes) for crashes in (0, 1, 2, 7)] == [FRESH, FIRST, SECOND, SECOND]
