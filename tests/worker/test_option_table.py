"""docs/options.md says what the code does: every option of it is taken, or refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvq.worker import answer_forms, bodies, embeddings
from kvq.worker.bodies import parse_body
from kvq.worker.errors import RowError
from kvq.worker.jobs import Endpoint

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
SUPPORTED, REFUSED = (PAGE.split(f"## {title}")[1].split("\n## ")[0] for title in ("Supported", "Refused by name"))
BODY = {Endpoint.CHAT: {"messages": [{"role": "user", "content": "x"}]}, Endpoint.COMPLETIONS: {"prompt": "x"}}


def options_of(table: str) -> dict[str, str]:
    """The options of a table's first column, with the row's last one."""
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    return {name: row[-1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def off_values() -> list[tuple[str, Any]]:
    return [
        (name, json.loads(value))
        for name, last in options_of(REFUSED).items()
        for value in re.findall(r"`([^`]+)`", last)
    ]


def test_the_page_names_every_field_that_is_read() -> None:
    read = {*bodies._SAMPLING_FIELDS, *bodies._CHAT_FIELDS, *bodies._COMPLETION_FIELDS, *bodies._LABELS}
    read |= answer_forms.FIELDS | embeddings.FIELDS
    assert set(options_of(SUPPORTED)) == read - {"best_of"}  # told in the row of n


def test_the_page_names_every_field_that_is_known_and_refused() -> None:
    assert set(options_of(REFUSED)) == set(bodies._OFF_VALUES)


@pytest.mark.parametrize("endpoint", BODY)
@pytest.mark.parametrize("name", options_of(REFUSED))
@pytest.mark.parametrize(
    "value", ["something", 7, True, ["x"], {"a": 1}], ids=["text", "number", "true", "list", "object"]
)
def test_an_unsupported_option_is_refused_by_its_name(endpoint: Endpoint, name: str, value: Any) -> None:
    if (name, value) in [(given, off) for given, off in off_values() if type(off) is type(value)]:
        assert parse_body(endpoint, {**BODY[endpoint], name: value})
        return
    with pytest.raises(RowError) as caught:
        parse_body(endpoint, {**BODY[endpoint], name: value})
    assert caught.value.code in ("unsupported_field", "stream_unsupported", "invalid_type")
    assert caught.value.message.startswith(f"{name}:")
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), off_values())
def test_a_value_that_asks_for_nothing_changes_nothing(name: str, value: Any) -> None:
    for endpoint, body in BODY.items():
        assert parse_body(endpoint, {**body, name: value}) == parse_body(endpoint, body)
