"""Values that a database would refuse, made acceptable without touching the others."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvq.worker.store_rows import clean_text, is_encodable, json_text

ANY_TEXT = st.text(st.characters(codec=None))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
    max_leaves=10,
)


def without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return value


@given(ANY_JSON)
def test_json_comes_back_as_it_went_in_but_for_nan(value: Any) -> None:
    text = json_text(value)
    assert is_encodable(text)
    assert "\x00" not in text
    assert json.loads(text, parse_constant=_refuse) == without_nan(value)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@given(ANY_TEXT)
def test_text_is_changed_only_where_no_database_could_hold_it(text: str) -> None:
    cleaned = clean_text(text)
    assert cleaned is not None
    assert is_encodable(cleaned)
    assert "\x00" not in cleaned
    if is_encodable(text) and "\x00" not in text:
        assert cleaned == text


def test_readable_text_stays_readable_in_json() -> None:
    assert json_text({"a": "żółć 中文"}) == '{"a":"żółć 中文"}'
