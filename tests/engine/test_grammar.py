"""Answers in a form: what is compiled, what is refused, and that every answer has its form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvq.engine import grammar as grammar_module
from kvq.engine.config import EngineConfig
from kvq.engine.errors import InvalidParameter
from kvq.engine.grammar import GrammarCompiler, GrammarFailed, Matcher
from kvq.engine.llm import LLM
from kvq.engine.request import FinishReason, SamplingParams, StructuredOutputsParams
from kvq.engine.tokenizer import Tokenizer
from tests.models import DEMO_MODEL

Form = StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(EngineConfig(model=str(tiny)))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), device="cpu", kv_cache_memory=32 << 20, max_model_len=512)


def params(form: Form, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"structured_outputs": form, "temperature": 1.0, "seed": 1, "max_tokens": 200, **changes})


FORMS = {
    "choice": (Form(choice=("yes", "no", "maybe so")), lambda text: text in ("yes", "no", "maybe so")),
    "odd choices": (
        Form(choice=('a "quoted"\nline', "back\\slash", "/re.*/", "naïve 😀", "<|im_end|>", "nul\x00", "{}")),
        lambda text: text in ('a "quoted"\nline', "back\\slash", "/re.*/", "naïve 😀", "<|im_end|>", "nul\x00", "{}"),
    ),
    "regex": (Form(regex=r"[A-Z][a-z]{2,5}-\d{3}"), re.compile(r"[A-Z][a-z]{2,5}-\d{3}").fullmatch),
    "schema": (
        Form(json=PERSON),
        lambda text: set(json.loads(text)) == {"name", "age"} and json.loads(text)["age"] <= 150,
    ),
    "lark": (Form(grammar='start: "<" /[0-9]{1,4}/ ">"'), re.compile(r"<[0-9]{1,4}>").fullmatch),
    "gbnf": (
        Form(grammar='root ::= item ("," item)? \nitem ::= [a-c] [a-c]'),
        re.compile("[a-c]{2}(,[a-c]{2})?").fullmatch,
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_has_the_form_that_was_asked_for(llm: LLM, name: str, temperature: float) -> None:
    form, holds = FORMS[name]
    (output,) = llm.generate([[5, 6, 7]], params(form, n=6, temperature=temperature))
    for sample in output.outputs:
        assert sample.format_valid, sample.text
        assert sample.finish_reason is FinishReason.STOP
        assert holds(sample.text), sample.text
    if temperature and name != "schema":
        assert len({sample.text for sample in output.outputs}) > 1


def test_a_json_object_is_any_object_and_one_that_is_cut_is_flagged(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], params(Form(json_object=True), max_tokens=60, n=8))
    for sample in output.outputs:
        assert sample.text.startswith("{")
        assert sample.format_valid is (sample.finish_reason is FinishReason.STOP)
        if sample.format_valid:
            assert isinstance(json.loads(sample.text), dict)


def test_a_form_that_a_stop_string_cuts_is_flagged(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], params(Form(regex="[a-z]{5}-[a-z]{5}"), stop=("-",)))
    assert "-" not in output.outputs[0].text
    assert output.outputs[0].format_valid is False


def test_a_form_ends_the_answer_whatever_min_tokens_and_ignore_eos_say(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], params(Form(choice=("yes",)), min_tokens=50, ignore_eos=True))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", FinishReason.STOP)


def test_rows_with_and_without_a_form_do_not_disturb_each_other(llm: LLM) -> None:
    prompts = [[5, 6, 7, i] for i in range(len(FORMS) + 2)]
    asked = [params(form) for form, _ in FORMS.values()] + [SamplingParams(temperature=1, seed=3, max_tokens=20)] * 2
    alone = [llm.generate([prompt], one)[0].outputs[0].token_ids for prompt, one in zip(prompts, asked, strict=True)]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, asked)]
    assert together == alone


def test_a_preempted_answer_keeps_its_place_in_the_form(tiny: Path) -> None:
    form = Form(regex="([a-z]{4} ){60}end")
    prompts = [[5, 6, 7, i] for i in range(12)]
    roomy = LLM(str(tiny), device="cpu", num_gpu_blocks_override=200, max_model_len=192)
    tight = LLM(str(tiny), device="cpu", num_gpu_blocks_override=16, max_model_len=192)
    expected = [output.outputs[0] for output in roomy.generate(prompts, params(form, seed=4))]
    found = tight.generate(prompts, params(form, seed=4))
    assert tight.stats().preemptions > 0
    assert [output.outputs[0].text for output in found] == [sample.text for sample in expected]
    assert all(output.outputs[0].format_valid for output in found)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Form(json={"type": "nonsense"}), "nonsense"),
        (Form(json={"$ref": "#/nowhere"}), "nowhere"),
        (Form(json={"$ref": "#"}), "no answer can satisfy it"),
        (Form(json={"type": "object", "properties": {"a": False}, "required": ["a"]}), "unsatisfiable"),
        (Form(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Form(json={"type": "string", "pattern": "("}), "regex"),
        (Form(json={"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (Form(regex="("), "unclosed"),
        (Form(regex=r"(a)\1"), "backreferences"),
        (Form(grammar="start: missing"), "missing"),
        (Form(grammar='start: "a'), ""),
        (Form(grammar="start: a\na: a"), "no answer can satisfy it"),
        (Form(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
        (Form(regex="(" * 3_000 + "a" + ")" * 3_000), ""),
        (Form(regex="a" * 10_000), "10000 bytes, the limit is 8192"),
        (Form(json={"description": "x" * 200_000}), "the limit is 131072"),
        (Form(choice=tuple(f"{i}" * 20 for i in range(5_000))), "the limit is 65536"),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused_by_name(compiler: GrammarCompiler, form: Form, says: str) -> None:
    for _ in range(2):  # the second time out of the cache
        with pytest.raises(InvalidParameter) as caught:
            compiler.compile(form)
        assert caught.value.param.startswith("structured_outputs.")
        assert says in str(caught.value)
        assert len(str(caught.value)) < 400


LARGE = 123456789012345678  # an id of 64 bits: 123456789012345680 as a float


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LARGE + 1},
        {"enum": ["a", {"ids": [LARGE + 1]}]},
        {"type": "object", "properties": {"enum": {"type": "integer", "minimum": LARGE + 1}}},
        {"type": "array", "items": {"anyOf": [{"exclusiveMaximum": LARGE + 1}, {"type": "null"}]}},
        {"type": "integer", "minimum": 2**63},
        {"type": "integer", "maximum": -(10**20)},
        {"const": 10**400},
    ],
    ids=str,
)
def test_a_number_that_an_answer_could_not_have_as_it_is_written_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameter, match=r"[a-z]: integers beyond .* write them as strings"):
        compiler.compile(Form(json=schema))


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-12}, "exclusiveMinimum"),
        ({"items": {"type": "number", "exclusiveMinimum": 1.0, "exclusiveMaximum": 1.5}}, "exclusiveMinimum"),
        ({"anyOf": [{"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}]}, "exclusiveMaximum"),
        ({"type": "number", "maximum": 0.5, "allOf": [{"exclusiveMinimum": 0}]}, "exclusiveMinimum"),
    ],
    ids=str,
)
def test_an_open_bound_that_would_be_let_in_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any], bound: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"{bound}: .* is not kept out so near the other bound; write a m"):
        compiler.compile(Form(json=schema))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0}, ("0.1", "1", "25"), ("0", "0.0", "-1")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ("0.5", "0.01"), ("0", "0.0", "1", "1.0")),
        ({"exclusiveMinimum": 0, "maximum": 1}, ("0.5", "1"), ("0", "0.0", "1.1")),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, ("-0.5", "-0.9"), ("-1", "-1.0", "0")),
        ({"exclusiveMinimum": 0.5, "maximum": 0.75}, ("0.6", "0.75"), ("0.5", "0.50", "0")),
        ({"minimum": 1e-6, "maximum": 0.5}, ("0.5", "0.000001"), ("0", "0.0", "0.6")),
    ],
    ids=str,
)
def test_bounds_are_kept_to_the_last_digit(
    compiler: GrammarCompiler, schema: dict[str, Any], inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    grammar = compiler.compile(Form(json={"type": "number", **schema}))
    assert [text for text in (*inside, *outside) if grammar.accepts(text)] == list(inside)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1, "maximum": 2**63 - 1, "default": LARGE + 1},
        {"const": 10**20, "examples": [LARGE + 1]},
        {"enum": [2**53, str(LARGE + 1)]},
        {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
        {"type": "integer", "exclusiveMinimum": 0.5, "maximum": 10**300},
    ],
    ids=str,
)
def test_numbers_that_are_kept_exactly_are_taken(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    compiler.compile(Form(json=schema))


def _chain(link: Any, last: Any, length: int) -> Form:
    links = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return Form(json={"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": last}})


EXPLOSIVE = {
    "rules": Form(grammar="start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(4_000)) + 'r4000: "b"'),
    "terminals": Form(grammar="start: R0\n" + "".join(f'R{i}: "a" R{i + 1}\n' for i in range(4_000)) + 'R4000: "b"'),
    "references": _chain(lambda ref: {"$ref": ref}, {"type": "string"}, 3_000),
    "all-of": _chain(lambda ref: {"allOf": [{"$ref": ref}]}, {"type": "string"}, 2_500),
    "nested-plus": Form(regex="(x+x+)+y"),
    "nested-counts": Form(regex="(a{1,1000}){1,1000}"),
    "dots": Form(regex="(.*a){30}.*"),
    "counted-tail": Form(regex=".*a.{200}"),
    "classes": Form(regex=r"[\p{L}]{1,1000}\P{Lu}{1,500}"),
    "intersection": Form(json={"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, 12)]}),
    "ambiguous": Form(grammar='start: s\ns: s s | "a" | s s s'),
    "pattern": Form(json={"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$"}),
    "items": Form(json={"type": "array", "items": {"type": "integer"}, "minItems": 10_000, "maxItems": 20_000}),
    "long": Form(json={"type": "string", "minLength": 900_000, "maxLength": 1_000_000}),
    "properties": Form(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_000)}}),
}


def _spell(compiler: GrammarCompiler, form: Form, num_tokens: int) -> None:
    """Take the first allowed token again and again, until that cannot go on."""
    try:
        matcher = compiler.compile(form).matcher()
        output: list[int] = []
        while len(output) < num_tokens and not matcher.is_complete(output):
            mask = matcher.mask(output)
            output.append(next(8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1))
    except (InvalidParameter, GrammarFailed):
        pass


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_an_explosive_form_is_refused_or_bounded_and_never_takes_the_process_down(
    compiler: GrammarCompiler, name: str
) -> None:
    """Peak resident memory of the whole process, as the kernel keeps it; measured: 30 MB at most."""
    compiler.compile(Form(regex="a"))  # the vocabulary as a trie is made once
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    before = _peak_bytes()
    _spell(compiler, EXPLOSIVE[name], 60)
    assert _peak_bytes() - before < 512 << 20


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_form_that_takes_too_long_to_compile_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.0)
    with pytest.raises(InvalidParameter, match="to compile; simplify it"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(Form(regex="a?" * 2_000))


def test_a_row_whose_form_fails_on_the_way_ends_with_an_error_and_its_neighbours_go_on(llm: LLM) -> None:
    explosive = Form(json={"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$"})
    plain = SamplingParams(temperature=1, seed=3, max_tokens=20)
    (expected,) = llm.generate([[9, 8, 7]], plain)
    failed, neighbour = llm.generate([[5, 6, 7], [9, 8, 7]], [params(explosive, max_tokens=100), plain])
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert "form that was asked for" in failed.error
    assert neighbour.outputs[0].token_ids == expected.outputs[0].token_ids
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_integrity()


def test_a_refused_form_leaves_the_engine_as_it_was(llm: LLM) -> None:
    with pytest.raises(InvalidParameter):
        llm.engine.add_request("bad", [5, 6, 7], params(Form(regex="(")))
    assert not llm.engine.has_unfinished_requests


def test_equal_forms_are_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiler.compile(Form(json=PERSON)) is compiler.compile(Form(json=json.dumps(PERSON, ensure_ascii=False)))


def test_a_matcher_shown_fewer_tokens_starts_again(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Form(choice=("yes", "no")))
    matcher = grammar.matcher()
    start = matcher.mask([])
    assert matcher.is_complete(tokenizer.encode("yes"))
    assert matcher.mask([]) == start
    assert isinstance(matcher, Matcher)


def test_two_matchers_of_one_grammar_are_apart(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Form(choice=("yes", "no")))
    one, other = grammar.matcher(), grammar.matcher()
    before = other.mask([])
    assert one.is_complete(tokenizer.encode("no"))
    assert other.mask([]) == before
    assert not other.is_complete([])


def test_whitespace_in_json_is_bounded_or_off(compiler: GrammarCompiler) -> None:
    spaced = compiler.compile(Form(json=PERSON))
    assert spaced.accepts('{\n    "name": "Bo",\n    "age": 7\n}')
    assert not spaced.accepts('{"name":' + " " * 500 + '"Bo", "age": 7}')
    tight = compiler.compile(Form(json=PERSON, disable_any_whitespace=True))
    assert tight.accepts('{"name":"Bo","age":7}')
    assert not tight.accepts('{"name": "Bo","age":7}')


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"json_object": False},
        {"choice": []},
        {"choice": "yes"},
        {"json": "[1]"},
        {"json": False},
        {"json": {"enum": ["\ud83d"]}},
        {"regex": "\ud83d"},
        {"choice": ["\ud83d"]},
    ],
)
def test_a_form_is_exactly_one(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="structured_outputs"):
        Form(**settings)


def test_the_demo_model_fills_a_form() -> None:
    llm = LLM(DEMO_MODEL or "", max_model_len=512)
    messages = [{"role": "user", "content": "Is Paris the capital of France? Answer yes or no."}]
    (choice,) = llm.chat(messages, SamplingParams(temperature=0, structured_outputs=Form(choice=("yes", "no"))))
    assert choice.outputs[0].text in ("yes", "no")
    messages = [{"role": "user", "content": "Give a person named Bo, aged 7, as JSON."}]
    (person,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60, structured_outputs=Form(json=PERSON)))
    assert person.outputs[0].format_valid
    assert set(json.loads(person.outputs[0].text)) == {"name", "age"}
