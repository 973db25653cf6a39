"""Tools: what is offered is shown or refused by name, and calls come out of answers as OpenAI has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvq.engine.engine import Engine
from kvq.worker.bodies import ParsedBody, parse_body
from kvq.worker.errors import RowError
from kvq.worker.inference import Inference
from kvq.worker.jobs import Endpoint, JobOutcome
from kvq.worker.tool_notations import Notation, notation_of
from kvq.worker.tools import ToolUse, tool_answer
from tests.models import engine_config, tiny_model
from tests.worker.crowds import Crowd, crowd_on

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"$ref": "#/$defs/none", "$defs": {"none": {"additionalProperties": False}}},
    },
}
REQUIRED = {"tool_choice": "required"}


def referring(name: str, value: str, where: str = "definitions", **others: Any) -> dict[str, Any]:
    """A tool whose parameters refer to a part of themselves."""
    parameters = {
        "type": "object",
        "properties": {"item": {"$ref": f"#/{where}/Item"}, "again": {"$ref": "#/properties/item"}},
        "required": ["item", "again"],
        "additionalProperties": False,
        where: {"Item": {"const": value}},
        **others,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


HERMES = (
    "{% if tools %}{{ tools | tojson }} write <tool_call>{...}</tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.day }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
ANY = ToolUse(names=("weather", "clock"))


def chat(**fields: Any) -> ParsedBody:
    return parse_body(Endpoint.CHAT, {"messages": HELLO, **fields})


def refused(**fields: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        chat(**fields)
    return caught.value


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# -- what a body may ask ---------------------------------------------------------------------------------


def test_without_a_choice_tools_are_the_models_to_call_and_none_is_plain_text() -> None:
    assert (
        chat(tools=[WEATHER]).tool_use
        == chat(tools=[WEATHER], tool_choice="auto").tool_use
        == ToolUse(names=("weather",))
    )
    plain = chat(tools=[WEATHER], tool_choice="none")
    assert (plain.tools, plain.tool_use) == ((WEATHER,), None)
    assert chat(tools=[]) == chat()


def test_a_forced_choice_is_a_form_of_the_answer() -> None:
    one = chat(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert one.tool_use == ToolUse(names=("weather", "clock"), forced=True, function="weather")
    form = one.params.structured_outputs
    assert form is not None
    assert json.loads(str(form.json)) == WEATHER["function"]["parameters"]  # type: ignore[index]
    some = chat(tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False).params.structured_outputs
    assert some is not None
    schema = json.loads(str(some.json))
    assert (schema["minItems"], schema["maxItems"], len(schema["items"]["anyOf"])) == (1, 1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": "x"}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [referring("f", "a", **{"$id": "x"}), referring("g", "b", **{"$id": "x"})], **REQUIRED}, "tools"),
        ({"tools": [referring("f", "a", **{"$id": 7})], **REQUIRED}, "tools[0].function.parameters.$id"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_cannot_be_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert error.message.startswith(param)


def test_calls_that_are_sent_back_reach_the_template_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"day": 3}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    parsed = chat(messages=messages).messages
    assert parsed is not None
    assert parsed[1]["tool_calls"][0]["function"]["arguments"] == {"day": 3}
    assert parsed[1]["content"] == ""
    call["function"]["arguments"] = "{no json"  # type: ignore[index]
    assert refused(messages=messages).param == "messages[1].tool_calls[0].function.arguments"


# -- reading answers -------------------------------------------------------------------------------------


def test_calls_are_read_with_the_text_before_them() -> None:
    text = f"Let me see.\n{called('weather', day=3)}\n{called('clock')}"
    answer = tool_answer(text, ANY, whole=True, key="j/0")
    assert answer.content == "Let me see."
    assert [call["function"] for call in answer.calls] == [
        {"name": "weather", "arguments": '{"day": 3}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert len({call["id"] for call in answer.calls}) == 2
    assert answer == tool_answer(text, ANY, whole=True, key="j/0")
    assert tool_answer(called("clock"), ANY, whole=True, key="j").content is None


def test_only_the_first_call_counts_where_they_may_not_be_parallel() -> None:
    text = called("clock") + called("weather", day=1)
    (call,) = tool_answer(text, ToolUse(names=("clock",), parallel=False), whole=True, key="j").calls
    assert call["function"]["name"] == "clock"


@pytest.mark.parametrize(
    "text",
    [
        "just text",
        "<tool_call>not json</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    answer = tool_answer(text, ANY, whole=True, key="j")
    assert (answer.content or "", answer.calls) == (text, ())


def test_a_forced_call_that_was_cut_short_is_no_call() -> None:
    one = ToolUse(names=("weather",), forced=True, function="weather")
    assert tool_answer('{"day": 3}', one, whole=True, key="j").calls[0]["function"]["arguments"] == '{"day": 3}'
    assert tool_answer('{"day": 3', one, whole=False, key="j").calls == ()


def test_templates_are_told_apart_by_their_notation() -> None:
    assert notation_of(HERMES) is Notation.HERMES
    assert notation_of("{{ messages }}") is None
    assert notation_of("<tool_call>\n<function=name>") is None
    assert notation_of('{{- "[TOOL_CALLS] [" }}') is Notation.MISTRAL
    assert notation_of('{{- "[TOOL_CALLS]" + name + "[ARGS]" }}') is None
    assert (
        notation_of('{"name": function name, "parameters": dictionary of argument name and its value}')
        is Notation.LLAMA
    )


MISTRAL = ToolUse(names=("weather", "clock"), notation=Notation.MISTRAL)
LLAMA = ToolUse(names=("weather", "clock"), notation=Notation.LLAMA)


def test_calls_in_the_notation_of_mistral_are_read_with_ids_its_template_takes_back() -> None:
    text = 'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"day": 3}}, {"name": "clock", "arguments": {}}]'
    answer = tool_answer(text, MISTRAL, whole=True, key="j/0")
    assert answer.content == "Let me see."
    assert [call["function"] for call in answer.calls] == [
        {"name": "weather", "arguments": '{"day": 3}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert all(re.fullmatch("[a-z0-9]{9}", call["id"]) for call in answer.calls)


@pytest.mark.parametrize("before", ["", "<|python_tag|>", "\n\n"])
def test_a_call_in_the_notation_of_llama_is_the_whole_answer(before: str) -> None:
    text = before + '{"name": "weather", "parameters": {"day": 3}}\n'
    answer = tool_answer(text, LLAMA, whole=True, key="j/0")
    assert answer.content is None
    assert [call["function"] for call in answer.calls] == [{"name": "weather", "arguments": '{"day": 3}'}]


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (MISTRAL, "just text"),
        (MISTRAL, "[TOOL_CALLS] []"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "clock", "arguments": {}}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "clock", "arguments": {}}, 3]'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "clock", "arguments": {}}] and so on'),
        (MISTRAL, '[{"name": "clock", "arguments": {}}]'),
        (LLAMA, "just text"),
        (LLAMA, '{"name": "Berlin", "parameters": {}}'),
        (LLAMA, '{"name": "clock", "parameters": {}, "note": "x"}'),
        (LLAMA, '{"name": "clock", "parameters": "x"}'),
        (LLAMA, 'I call {"name": "clock", "parameters": {}}'),
        (LLAMA, '{"name": "clock", "parameters": {}'),
    ],
)
def test_what_is_no_call_in_a_notation_stays_text(use: ToolUse, text: str) -> None:
    answer = tool_answer(text, use, whole=True, key="j")
    assert (answer.content, answer.calls) == (text, ())


# -- through the engine ----------------------------------------------------------------------------------


def with_template(folder: Path, template: str) -> Engine:
    """A tiny model of another chat template."""
    tiny_model(folder)
    for old in folder.glob("*.jinja"):
        old.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Engine.load(engine_config(folder, max_num_seqs=16))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    with crowd_on(with_template(tmp_path_factory.mktemp("hermes"), HERMES)) as made:
        yield made


def answered(crowd: Crowd, **fields: Any) -> dict[str, Any]:
    end = crowd.try_row(Endpoint.CHAT, {"messages": HELLO, "max_tokens": 200, "seed": 1, **fields})
    assert isinstance(end, JobOutcome), end
    assert end.error is None
    assert end.response is not None
    choice: dict[str, Any] = end.response["choices"][0]
    return choice


def test_a_call_of_the_models_own_accord_comes_back_as_one(hermes: Crowd) -> None:
    form = r'<tool_call>\n\{"name": "weather", "arguments": \{"day": [0-9]\}\}\n</tool_call>'
    choice = answered(hermes, tools=[WEATHER], guided_regex=form)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"])["day"] in range(10)
    plain = answered(hermes, tools=[WEATHER], tool_choice="none", guided_regex=form)
    assert (plain["finish_reason"], "tool_calls" in plain["message"]) == ("stop", False)
    assert plain["message"]["content"].startswith("<tool_call>")


def test_a_row_is_read_in_the_notation_of_its_models_template(tmp_path: Path) -> None:
    template = HERMES.replace("write <tool_call>{...}</tool_call>", "write [TOOL_CALLS] [").replace(
        "tool_call>", "call>"
    )
    with crowd_on(with_template(tmp_path, template)) as mistral:
        form = r'\[TOOL_CALLS\] \[\{"name": "weather", "arguments": \{"day": [0-9]\}\}\]'
        choice = answered(mistral, tools=[WEATHER], guided_regex=form)
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"], len(call["id"])) == ("tool_calls", "weather", 9)


def test_an_answer_without_a_call_is_text(hermes: Crowd) -> None:
    choice = answered(hermes, tools=[WEATHER], guided_regex="no need")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("no need", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_kept_in_its_form(choice: Any, hermes: Crowd) -> None:
    answer = answered(hermes, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, temperature=1.0)
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert set(json.loads(call["function"]["arguments"])) == {"day"}


@pytest.mark.parametrize("where", ["$defs", "definitions"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "second"}}])
def test_references_in_the_parameters_of_a_forced_call_mean_what_they_meant(
    where: str, choice: Any, hermes: Crowd
) -> None:
    tools = [referring("first", "a", where), referring("second", "b", where)]
    value = {"first": "a", "second": "b"}
    answer = answered(hermes, tools=tools, tool_choice=choice, parallel_tool_calls=False, n=4)
    (call,) = answer["message"]["tool_calls"]
    expected = value[call["function"]["name"]]
    assert json.loads(call["function"]["arguments"]) == {"item": expected, "again": expected}


@pytest.mark.parametrize("given", [{}, {"parameters": {"type": "array", "additionalProperties": False}}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_the_arguments_of_a_forced_call_are_an_object_whatever_its_parameters_say(
    choice: Any, given: dict[str, Any], hermes: Crowd
) -> None:
    tools = [{"type": "function", "function": {"name": "f", **given}}]
    answer = answered(hermes, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


def test_parameters_that_refer_to_themselves_can_be_forced(hermes: Crowd) -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "tree", "parameters": tree}}]
    (call,) = answered(hermes, tools=tools, **REQUIRED, parallel_tool_calls=False)["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) <= {"child"}


@pytest.fixture(scope="module")
def crowd(engine: Engine) -> Iterator[Crowd]:
    """The demo model's template: it shows no tools."""
    with crowd_on(engine) as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER]}, "tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_the_template_would_leave_out_is_refused_by_name(crowd: Crowd, fields: dict[str, Any], param: str) -> None:
    error = crowd.try_row(Endpoint.CHAT, {"messages": HELLO, "max_tokens": 2, **fields})
    assert not isinstance(error, JobOutcome)
    assert error.message.startswith(f"{param}: ")


def test_the_prompt_is_what_the_template_makes_of_the_options(hermes: Crowd) -> None:
    inference = Inference(lambda: hermes.engine, on_outcome=lambda _: None, on_change=lambda: None)
    inference.start()
    assert inference.wait_ready(60)

    def prompt(**fields: Any) -> str:
        prepared = inference.prepare(Endpoint.CHAT, {"messages": HELLO, **fields})
        return hermes.engine.tokenizer.decode(prepared.token_ids, skip_special_tokens=False)

    begun = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    assert prompt() == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    assert prompt(messages=begun, continue_final_message=True).endswith("<|im_start|>assistant\nWell, I")
    assert "effort low" in prompt(reasoning_effort="low")
    assert "effort high" in prompt(chat_template_kwargs={"reasoning_effort": "high"}, reasoning_effort="low")
    assert '"weather"' in prompt(tools=[WEATHER], tool_choice="none")
    inference.stop()
