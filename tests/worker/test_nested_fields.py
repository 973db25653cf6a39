"""What a body says inside a field is used, or refused by its full name: nothing nested is dropped silently."""

from __future__ import annotations

from typing import Any

import pytest

from kvq.worker.bodies import parse_body
from kvq.worker.errors import RowError
from kvq.worker.jobs import Endpoint

HELLO = [{"role": "user", "content": "hello"}]


def refused(body: dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as caught:
        parse_body(Endpoint.CHAT, body)
    return caught.value


@pytest.mark.parametrize(
    ("given", "blamed"),
    [
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "text", "json_schema": {"schema": {}}}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "root": {}}}, "response_format.json_schema.root"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
    ],
)
def test_nothing_that_a_response_format_says_is_dropped(given: dict[str, Any], blamed: str) -> None:
    assert refused({"messages": HELLO, "response_format": given}).param == blamed


def test_a_schema_is_kept_strict_or_not() -> None:
    schema = {"name": "n", "description": "d", "strict": False, "schema": {"type": "object"}}
    body = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": schema, "schema": None}}
    assert parse_body(Endpoint.CHAT, body).params.structured_outputs is not None


@pytest.mark.parametrize("name", ["messages", "self", "conversation", "tokenize", "sanitize_control_tokens"])
def test_what_is_no_variable_of_a_template_is_refused_by_name(name: str) -> None:
    error = refused({"messages": HELLO, "chat_template_kwargs": {name: []}})
    assert (error.code, error.param) == ("unsupported_field", f"chat_template_kwargs.{name}")
