"""Any body is answered or refused for itself: nothing a row can say stops the engine or changes its neighbour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvq.engine.engine import Engine
from kvq.worker.errors import ROW_CODES
from kvq.worker.jobs import Endpoint, JobOutcome
from tests.worker.crowds import Crowd, crowd_on


def mostly(tame: st.SearchStrategy[Any], wild: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """``wild`` once in six times, so that most bodies come as far as the engine."""
    return st.integers(0, 5).flatmap(lambda roll: wild if roll == 5 else tame)


WILD_NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([2**63, 10**30, 1e300, 1e-300, 1e-40, 5e-324, None, True, "1", [], {}]),
)
NUMBERS = mostly(st.one_of(st.integers(0, 1), st.floats(0.1, 1.0)), WILD_NUMBERS)
WILD_TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(["", "\ud800", "\x00", "a" * 10_000, "(", None, 3, [[]]]))
TEXTS = mostly(st.sampled_from(["a", "the", "[a-z]{1,9}", "é😀", 'root ::= "a" | "b"']), WILD_TEXTS)
LISTS = mostly(st.lists(TEXTS, min_size=1, max_size=4), st.one_of(TEXTS, NUMBERS))
IDS = mostly(st.lists(st.integers(0, 40_000), min_size=1, max_size=4), st.lists(st.integers(-2, 60_000), max_size=4))
SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from(
            [{}, {"type": "string"}, {"type": "integer"}, {"enum": ["a", 1]}, {"type": "null"}, True, False]
        ),
        st.fixed_dictionaries({"type": TEXTS}),
        st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/x", "http://x"])}),
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": NUMBERS}),
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(TEXTS, inner, max_size=3)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
    ),
    max_leaves=6,
)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"], mostly(st.booleans(), NUMBERS)
    ),
    **dict.fromkeys(
        [
            *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
        ],
        NUMBERS,
    ),
    "n": st.one_of(st.integers(-1, 3), st.sampled_from([1000, None, 1.0])),
    "stop": LISTS,
    "bad_words": LISTS,
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "logit_bias": st.one_of(
        st.dictionaries(st.sampled_from(["5", "x", "-1", "99999999"]), NUMBERS, max_size=2), NUMBERS
    ),
    "guided_choice": LISTS,
    "guided_regex": TEXTS,
    "guided_grammar": TEXTS,
    "guided_json": st.one_of(SCHEMAS, TEXTS),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "x"])},
        optional={
            "json_schema": st.fixed_dictionaries(
                {"name": TEXTS},
                optional={"schema": SCHEMAS, "strict": mostly(st.booleans(), NUMBERS), "description": TEXTS},
            ),
            "schema": SCHEMAS,
        },
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(
            [
                *("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern", "disable_any_whitespace"),
                *("disable_fallback", "structural_tag", "x"),
            ]
        ),
        st.one_of(TEXTS, LISTS, SCHEMAS, st.booleans()),
        max_size=2,
    ),
    "guided_whitespace_pattern": TEXTS,
    "best_of": st.integers(0, 3),
    "max_completion_tokens": mostly(st.integers(1, 6), NUMBERS),
    "model": mostly(st.sampled_from([None, "tiny"]), TEXTS),
    "user": TEXTS,
    "metadata": st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
    "stream": mostly(st.just(False), NUMBERS),
    "suffix": TEXTS,
    "priority": NUMBERS,
}
PROMPTS = mostly(
    st.one_of(st.lists(st.integers(0, 40_000), min_size=1, max_size=40), st.text("abc é😀", min_size=1, max_size=40)),
    st.one_of(TEXTS, st.lists(st.integers(-1, 50_000), max_size=9), NUMBERS, st.lists(TEXTS, max_size=2)),
)
BODIES = st.builds(
    lambda prompt, options, most: {"prompt": prompt, "max_tokens": most, **options},
    PROMPTS,
    st.deferred(lambda: _some_of(OPTIONS)),
    mostly(st.sampled_from([1, 2, 6]), st.one_of(st.just(0), WILD_NUMBERS)),
)
CHAT_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    **{name: option for name, option in OPTIONS.items() if name not in ("echo", "best_of", "suffix")},
    "logprobs": mostly(st.booleans(), NUMBERS),
    "top_logprobs": NUMBERS,
    "tools": mostly(
        st.lists(
            st.fixed_dictionaries(
                {"type": st.just("function")},
                optional={"function": st.fixed_dictionaries({"name": TEXTS}, optional={"parameters": SCHEMAS})},
            ),
            max_size=3,
        ),
        WILD_TEXTS,
    ),
    "tool_choice": st.one_of(
        st.sampled_from(["auto", "none", "required"]),
        st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXTS})}),
        WILD_TEXTS,
    ),
    "parallel_tool_calls": mostly(st.booleans(), NUMBERS),
    "reasoning_effort": mostly(st.sampled_from(["none", "low", "high"]), TEXTS),
    "add_generation_prompt": mostly(st.booleans(), NUMBERS),
    "continue_final_message": mostly(st.booleans(), NUMBERS),
    "chat_template_kwargs": st.one_of(
        st.dictionaries(
            mostly(
                st.sampled_from(
                    ["enable_thinking", "bos_token", "messages", "self", "tools", "loop", "raise_exception"]
                ),
                TEXTS.filter(lambda t: isinstance(t, str)),
            ),
            st.one_of(TEXTS, SCHEMAS, NUMBERS),
            max_size=3,
        ),
        TEXTS,
    ),
}
PARTS = st.lists(
    mostly(
        st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "image_url", "input_audio", "refusal", None, 3])},
            optional={"text": TEXTS, "image_url": TEXTS, "cache_control": SCHEMAS},
        ),
    ),
    max_size=3,
)
MESSAGES = mostly(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": mostly(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), TEXTS),
                "content": st.one_of(TEXTS, PARTS),
            },
            optional={
                "name": TEXTS,
                "tool_call_id": TEXTS,
                "reasoning_content": TEXTS,
                "tool_calls": st.lists(
                    st.fixed_dictionaries(
                        {"function": st.fixed_dictionaries({"name": TEXTS, "arguments": st.one_of(TEXTS, SCHEMAS)})}
                    ),
                    max_size=2,
                ),
            },
        ),
        min_size=1,
        max_size=3,
    ),
    st.one_of(WILD_TEXTS, st.lists(WILD_TEXTS, max_size=2)),
)


def _some_of(options: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: options[name] for name in names})
    )


CHATS = st.builds(
    lambda messages, options, most: {"messages": messages, "max_tokens": most, **options},
    MESSAGES,
    _some_of(CHAT_OPTIONS),
    st.sampled_from([1, 2, 6]),
)
INPUTS = st.builds(
    lambda given, options: {"input": given, **options},
    st.one_of(PROMPTS, st.lists(PROMPTS, max_size=3)),
    st.fixed_dictionaries(
        {}, optional={"dimensions": NUMBERS, "encoding_format": TEXTS, "truncate_prompt_tokens": NUMBERS}
    ),
)
ROWS = st.one_of(
    st.tuples(st.just(Endpoint.COMPLETIONS), BODIES),
    st.tuples(st.just(Endpoint.CHAT), CHATS),
    st.tuples(st.just(Endpoint.EMBEDDINGS), INPUTS),
)
NEIGHBOUR = {"prompt": [11, 12, 13], "temperature": 1.0, "seed": 7, "max_tokens": 6}


@pytest.fixture(scope="module")
def crowd(engine: Engine) -> Iterator[Crowd]:
    with crowd_on(engine, (NEIGHBOUR,)) as made:
        yield made


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(row=ROWS)
def test_any_body_is_answered_or_refused_and_its_neighbour_unchanged(
    crowd: Crowd, row: tuple[Endpoint, dict[str, Any]]
) -> None:
    """About 15 s: each of 150 rows runs on the real engine beside a neighbour."""
    end = crowd.try_row(*row)
    error = end.error if isinstance(end, JobOutcome) else end
    event("run" if isinstance(end, JobOutcome) else "refused")
    if error is None:
        assert isinstance(end, JobOutcome)
        json.dumps(end.response, allow_nan=False).encode()
        return
    assert error.code in {*ROW_CODES, "generation_failed", "context_length_exceeded"}
    assert error.message
    error.message.encode()
