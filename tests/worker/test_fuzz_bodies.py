"""Any body is answered or refused for itself: nothing a row can say stops the engine or changes its neighbour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvq.engine.engine import Engine
from kvq.engine.request import SamplingParams
from kvq.worker.errors import ROW_CODES, RowError
from kvq.worker.inference import Inference, Prepared
from kvq.worker.jobs import Endpoint


def mostly(tame: st.SearchStrategy[Any], wild: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """``wild`` once in six times, so that most bodies come as far as the engine."""
    return st.integers(0, 5).flatmap(lambda roll: wild if roll == 5 else tame)


WILD_NUMBERS = st.one_of(st.floats(), st.integers(), st.sampled_from([2**63, 10**30, None, True, "1", [], {}]))
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
        optional={"json_schema": st.fixed_dictionaries({"name": TEXTS}, optional={"schema": SCHEMAS})},
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "json_object", "x"]), TEXTS, max_size=2
    ),
}
PROMPTS = mostly(
    st.one_of(st.lists(st.integers(0, 40_000), min_size=1, max_size=40), st.text("abc é😀", min_size=1, max_size=40)),
    st.one_of(TEXTS, st.lists(st.integers(-1, 50_000), max_size=9), NUMBERS, st.lists(TEXTS, max_size=2)),
)
BODIES = st.builds(
    lambda prompt, options, most: {"prompt": prompt, "max_tokens": most, **options},
    PROMPTS,
    st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: OPTIONS[name] for name in names})
    ),
    st.sampled_from([1, 2, 6]),
)
NEIGHBOUR = SamplingParams(temperature=1.0, seed=7, max_tokens=6)


@pytest.fixture(scope="module")
def inference(engine: Engine) -> Iterator[Inference]:
    made = Inference(lambda: engine, on_outcome=lambda _: None, on_change=lambda: None)
    made.start()
    assert made.wait_ready(60)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> tuple[int, ...]:
    return _run(engine, {"neighbour": ([11, 12, 13], NEIGHBOUR)})["neighbour"]


def _run(engine: Engine, requests: dict[str, tuple[Any, SamplingParams]]) -> dict[str, tuple[int, ...]]:
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    tokens = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
    engine.check_integrity()
    assert set(tokens) == set(requests)
    return tokens


def _prepare(inference: Inference, body: dict[str, Any]) -> Prepared | RowError:
    try:
        return inference.prepare(Endpoint.COMPLETIONS, body)
    except RowError as err:
        return err


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(body=BODIES)
def test_any_body_is_answered_or_refused_and_its_neighbour_unchanged(
    inference: Inference, engine: Engine, undisturbed: tuple[int, ...], body: dict[str, Any]
) -> None:
    prepared = _prepare(inference, body)
    if isinstance(prepared, RowError):
        assert prepared.code in ROW_CODES
        assert prepared.message
        prepared.message.encode()
        event("refused")
        return
    event("run")
    found = _run(engine, {"it": (prepared.token_ids, prepared.params), "neighbour": ([11, 12, 13], NEIGHBOUR)})
    assert found["neighbour"] == undisturbed
