"""KnownBodies: settings that were accepted once are not looked at again, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.worker.bodies import ParsedBody, parse_body
from kvq.worker.errors import RowError
from kvq.worker.jobs import Endpoint
from kvq.worker.known_bodies import KnownBodies
from kvq.worker.limits import MAX_PROMPT_BYTES

_TEXTS = st.sampled_from(["", "Hi", "é", "\ud800", "\x00", "a" * 10_000])
_MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "name", "weather"]),
    st.one_of(_TEXTS, st.sampled_from(["system", "user", "boss", None, 7, [{"type": "text", "text": "x"}], []])),
)
_PROMPTS = st.one_of(_TEXTS, st.lists(_MESSAGES, max_size=3), st.sampled_from([None, 7, [1, 2], {"a": 1}]))
_SETTINGS = st.sampled_from(
    [
        {},
        {"max_tokens": 5},
        {"max_tokens": 5.0, "temperature": 0, "model": "m"},
        {"max_tokens": "5"},
        {"seed": 2**70},
        {"stop": ["\n"], "logit_bias": {"5": 1}},
        {"response_format": {"type": "json_object"}, "metadata": {"a": "b"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"echo": True, "max_tokens": 0},
        {"colour": "red"},
        {"messages": [{"role": "user", "content": "x"}]},
        {"prompt": "x"},
    ]
)


def _verdict(read: Any, endpoint: Endpoint, body: dict[str, Any]) -> ParsedBody | tuple[Any, ...]:
    try:
        parsed: ParsedBody = read(endpoint, body)
    except RowError as err:
        return err.code, err.message, err.param
    return parsed


@given(st.lists(st.tuples(st.sampled_from(list(Endpoint)), _SETTINGS, _PROMPTS), max_size=6))
def test_every_body_gets_the_verdict_of_parse_body(requests: list[tuple[Endpoint, dict[str, Any], Any]]) -> None:
    bodies = KnownBodies()
    for endpoint, settings, prompt in [*requests, *requests]:
        field = "messages" if endpoint is Endpoint.CHAT else "prompt"
        body = {field: prompt, **settings}
        assert _verdict(bodies.read, endpoint, body) == _verdict(parse_body, endpoint, body)


@pytest.mark.parametrize("num_chars", [MAX_PROMPT_BYTES // 6 - 100, MAX_PROMPT_BYTES - 100, MAX_PROMPT_BYTES])
@pytest.mark.parametrize("char", ["a", "\n", "\x01", "€"])
def test_a_prompt_is_bounded_in_bytes_whether_its_settings_are_known_or_not(num_chars: int, char: str) -> None:
    bodies = KnownBodies()
    bodies.read(Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}]})
    body = {"messages": [{"role": "user", "content": char * num_chars}]}
    assert _verdict(bodies.read, Endpoint.CHAT, body) == _verdict(parse_body, Endpoint.CHAT, body)


def test_memory_of_settings_is_bounded() -> None:
    bodies = KnownBodies()
    for seed in range(1000):
        assert bodies.read(Endpoint.COMPLETIONS, {"prompt": "x", "seed": seed}).params.seed == seed
    assert len(bodies._known) <= 256
