"""Filters pick by bound values; what cannot be understood is refused with a way out."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.worker.errors import FilterError
from kvq.worker.filters import Condition, Operator, parse_filter


def test_conditions_are_joined_by_and_and_quoted_where_they_hold_spaces() -> None:
    assert parse_filter("error_code = engine_error AND line_no<=100 and custom_id like 'a and ''b'' %'") == (
        Condition(field="error_code", operator=Operator.EQUAL, value="engine_error"),
        Condition(field="line_no", operator=Operator.LESS_OR_EQUAL, value=100),
        Condition(field="custom_id", operator=Operator.LIKE, value="a and 'b' %"),
    )
    assert parse_filter('state <> "failed"')[0].operator is Operator.NOT_EQUAL


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "write conditions like"),
        ("line_no", "write conditions like"),
        ("line_no = 1 or line_no = 2", "write conditions like"),
        ("line_no = 1; DROP TABLE jobs", "write conditions like"),
        ("line_no = 1 and", "write conditions like"),
        ("body = x", "is not a field"),
        ("line_no = x", "is a number"),
        ("line_no like 1", "is a number"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(FilterError, match=reason):
        parse_filter(text)


@given(st.text(alphabet="abline_no=<>!'\" \n0;-%", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with suppress(FilterError):
        assert parse_filter(text)
