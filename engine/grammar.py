"""Grammars: answers that must have a form, by llguidance.

Owns compiling (bounded in size, stack and time, cached), the state of one sequence inside its grammar, and the check
of a finished text. Knows nothing of batches. Invariants: bad input raises InvalidParameter and nothing else; a matcher
is a function of the tokens it is shown, so a sequence that was preempted or computed again goes on where it was.
Source: Earley parsing over token tries, llguidance (github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvq.engine.errors import InvalidParameter
from kvq.engine.request import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from kvq.engine.step import SampleSpec
    from kvq.engine.tokenizer import Tokenizer

# llguidance's compiler recurses along references and is quadratic in long regular expressions: within these sizes
# and on this stack every grammar tried compiles in seconds or is refused (tests/engine/test_grammar.py).
MAX_BYTES = {"json": 128 << 10, "regex": 8 << 10, "choice": 64 << 10, "grammar": 64 << 10, "whitespace_pattern": 256}
COMPILE_TIMEOUT_S = 10.0
_COMPILE_STACK_BYTES = 512 << 20  # of address space; touched only as deep as the recursion goes
_MAX_CACHED = 256
_MAX_LEXER_STATES = 50_000  # about 2 kB each
# Small models write blanks for ever where a grammar lets them; deeper indentation than this is rare.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_ANY_OBJECT = '{"type": "object"}'
# llguidance holds numbers as float64, and bounds of integers as int64 after that: beyond, they become other numbers.
_INT64 = 1 << 63
_LOWER_BOUNDS, _UPPER_BOUNDS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_NOTES = ("default", "examples")


class GrammarFailed(Exception):
    """A matcher can say no more: a limit was reached, or the tokens do not fit its grammar."""


class Grammar:
    """A compiled form. Make one with ``GrammarCompiler.compile``."""

    def __init__(self, spec: StructuredOutputsParams, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self.spec = spec
        self._matcher = matcher
        self._tokenizer = tokenizer

    def matcher(self) -> Matcher:
        """The state of one sequence, at its beginning."""
        return Matcher(self._matcher)

    def accepts(self, text: str) -> bool:
        """True when a whole text has the form; looks at the text, not at how it came to be."""
        if self.spec.choice is not None:
            return text in self.spec.choice
        if self.spec.json is not None or self.spec.json_object is not None:
            try:
                json.loads(text, parse_int=str, strict=False)
            except (ValueError, RecursionError):
                return False
        matcher = self._matcher.deep_copy()
        return matcher.consume_tokens(self._tokenizer.tokenize_str(text)) and matcher.is_accepting()


class Matcher:
    """Where one sequence is in its grammar. ``output_ids`` are always all tokens generated so far."""

    def __init__(self, fresh: LLMatcher) -> None:
        self._fresh = fresh
        self._state = fresh.deep_copy()
        self._num_consumed = 0

    def mask(self, output_ids: Sequence[int]) -> bytes:
        """Which tokens may come next: a bit per token id, the lowest first.

        Raises:
            GrammarFailed: none can, or a limit was reached.
        """
        self._advance(output_ids)
        bits = self._state.compute_bitmask()
        if self._state.is_error():
            raise GrammarFailed(_shorten(self._state.get_error()))
        return bits

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """True when nothing can follow."""
        try:
            self._advance(output_ids)
        except GrammarFailed:
            return False
        return self._state.is_stopped()

    def _advance(self, output_ids: Sequence[int]) -> None:
        if len(output_ids) < self._num_consumed:
            self._state, self._num_consumed = self._fresh.deep_copy(), 0
        new = list(output_ids[self._num_consumed :])
        self._num_consumed = len(output_ids)
        if new and not self._state.consume_tokens(new):
            raise GrammarFailed(_shorten(self._state.get_error()))


class GrammarCompiler:
    """Compiles forms for one model's vocabulary. Thread safe.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: columns of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[StructuredOutputsParams, Grammar | InvalidParameter] = OrderedDict()

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """The grammar of ``spec``, from the cache where it is there; so are refusals.

        Raises:
            InvalidParameter: it is too big, is not understood, cannot be satisfied, or takes too long.
        """
        with self._lock:
            known = self._cache.get(spec)
            if known is not None:
                self._cache.move_to_end(spec)
        if known is None:
            try:
                known = self._compile(spec)
            except InvalidParameter as err:
                known = err
            with self._lock:
                self._cache[spec] = known
                while len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
        if isinstance(known, InvalidParameter):
            raise InvalidParameter(known.param, known.message)
        return known

    def _compile(self, spec: StructuredOutputsParams) -> Grammar:
        from llguidance import LLMatcher

        name = _param(spec)
        _check_sizes(spec)
        if isinstance(spec.json, str):
            _check_numbers(spec.json, name)
        tokenizer = self._load_tokenizer(name)
        source = _source(spec, name)

        def compile_and_try() -> tuple[LLMatcher, str]:
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
            trial = matcher.deep_copy()
            if not trial.is_error():
                trial.compute_bitmask()
            return matcher, trial.get_error()

        matcher, error = _on_deep_stack(compile_and_try, name)
        if matcher.is_error():
            raise InvalidParameter(name, _shorten(error))
        if error:
            raise InvalidParameter(name, f"no answer can satisfy it ({_shorten(error)})")
        return Grammar(spec, matcher, tokenizer)

    def _load_tokenizer(self, name: str) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._ll_tokenizer is None:
                num_tokens = max(self._vocab_size, self._tokenizer.vocab_size)
                eos: Any = sorted(self._tokenizer.eos_token_ids) or None
                try:
                    self._ll_tokenizer = from_tokenizer(self._tokenizer.hf, n_vocab=num_tokens, eos_token=eos)
                except ValueError as err:
                    raise InvalidParameter(name, f"is not supported with this model's tokenizer: {err}") from err
            return self._ll_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """The tokens a row may take (``bits``, as ``Matcher.mask``), or why that cannot be said (``failure``)."""

    bits: bytes = b""
    failure: str | None = None

    def allowed(self, vocab_size: int) -> np.ndarray:
        """bool [vocab_size]."""
        bits = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8), bitorder="little")
        return bits[:vocab_size].astype(bool)


class MaskWorker:
    """Computes masks on a thread of its own while the model runs (llguidance lets go of the interpreter lock)."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, rows: Iterable[tuple[int, tuple[SampleSpec, ...]]]) -> Future[dict[int, TokenMask]]:
        """Masks by sequence id, of the rows that have a matcher. Wait for it before the matchers are used again."""
        wanted = [(seq_id, specs[0]) for seq_id, specs in rows if specs[0].matcher is not None]
        if not wanted:
            nothing: Future[dict[int, TokenMask]] = Future()
            nothing.set_result({})
            return nothing
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvq-masks")
        return self._pool.submit(lambda: {seq_id: _mask(spec) for seq_id, spec in wanted})


def _mask(spec: SampleSpec) -> TokenMask:
    assert spec.matcher is not None
    try:
        return TokenMask(bits=spec.matcher.mask(spec.token_ids[spec.num_prompt : spec.position]))
    except GrammarFailed as err:
        return TokenMask(failure=f"the answer cannot be kept in the form that was asked for: {err}")


def _param(spec: StructuredOutputsParams) -> str:
    given = next(n for n in ("json", "regex", "choice", "grammar", "json_object") if getattr(spec, n) is not None)
    return f"structured_outputs.{given}"


def _check_sizes(spec: StructuredOutputsParams) -> None:
    for name, limit in MAX_BYTES.items():
        value = getattr(spec, name)
        text = "".join(value) if isinstance(value, tuple) else value
        size = 0 if text is None else len(text.encode("utf-8", "surrogatepass"))
        if size > limit:
            raise InvalidParameter(f"structured_outputs.{name}", f"has {size} bytes, the limit is {limit}")


def _check_numbers(schema: str, name: str) -> None:
    """Refuse integers that an answer would not have as they are written, and bounds that it would not keep."""
    waiting = [json.loads(schema)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            _check_open_bound(part, name)
        for key, value in part.items() if isinstance(part, dict) else ():
            if key in ("const", "enum"):
                inexact = next((number for number in _integers(value) if not _is_float64(number)), None)
            elif key in _LOWER_BOUNDS and isinstance(value, int):
                inexact = value if value > -_INT64 and not (_is_float64(value) and value < _INT64) else None
            elif key in _UPPER_BOUNDS and isinstance(value, int):
                inexact = value if value < _INT64 - 1 and not (_is_float64(value) and value >= -_INT64) else None
            else:
                inexact = None
                if key in _NAMED_SCHEMAS and isinstance(value, dict):
                    waiting += value.values()
                elif key not in _NOTES:
                    waiting.append(value)
            if inexact is not None:
                why = f"{key}: integers beyond 2^53 are not kept exactly; write them as strings, not {inexact}"
                raise InvalidParameter(name, _shorten(why))


def _check_open_bound(schema: dict[str, Any], name: str) -> None:
    """Refuse an open bound that is an integer where the other bound has the same integer part: it would be let in."""
    both = schema.get("allOf")
    parts = [schema, *(both if isinstance(both, list) else ())]
    for bound, closed, others, sign in (
        ("exclusiveMinimum", "minimum", _UPPER_BOUNDS, 1),
        ("exclusiveMaximum", "maximum", _LOWER_BOUNDS, -1),
    ):
        for edge in _numbers(parts, bound):
            first, last = sorted((edge, edge + sign))
            near = any(first < end < last for end in _numbers(parts, *others))
            if near and edge % 1 == 0 and sign * edge >= 0:
                why = f"{bound}: {edge} is not kept out so near the other bound; write a {closed}"
                raise InvalidParameter(name, why)


def _numbers(schemas: list[Any], *keys: str) -> list[float]:
    found = [schema.get(key) for schema in schemas if isinstance(schema, dict) for key in keys]
    return [value for value in found if isinstance(value, int | float) and not isinstance(value, bool)]


def _integers(value: Any) -> Iterator[int]:
    """Those in a JSON value, at any depth."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, int):
            yield part
        elif isinstance(part, list | dict):
            waiting += part.values() if isinstance(part, dict) else part


def _is_float64(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


def _source(spec: StructuredOutputsParams, name: str) -> str:
    """The form in llguidance's notation."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if spec.regex is not None:
            return LLMatcher.grammar_from_regex(spec.regex)
        if spec.choice is not None:
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
            )
        if spec.grammar is not None:
            return LLMatcher.grammar_from_lark(any_to_lark(spec.grammar))
        schema = _ANY_OBJECT if spec.json is None else str(spec.json)
        options: Any = {"whitespace_pattern": spec.whitespace_pattern or _WHITESPACE}
        if spec.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except Exception as err:  # the converter of grammars is plain Python and raises whatever it stumbles over
        raise InvalidParameter(name, _shorten(str(err) or type(err).__name__)) from err


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


# threading.stack_size is the process's: whoever changes it holds this.
_stack_size_lock = threading.Lock()


def _on_deep_stack(call: Callable[[], tuple[LLMatcher, str]], name: str) -> tuple[LLMatcher, str]:
    """Call on a thread whose stack holds any recursion that the size limits leave, and wait only so long.

    A thread that takes longer is left behind; what it was given bounds how long it goes on.
    """
    done: Future[tuple[LLMatcher, str]] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as err:  # noqa: BLE001  a panic of the library is none of Exception; it is this form's
            done.set_exception(InvalidParameter(name, _shorten(str(err) or type(err).__name__)))

    thread = threading.Thread(target=run, name="kvq-grammar", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(_COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    try:
        return done.result(COMPILE_TIMEOUT_S)
    except TimeoutError as err:
        raise InvalidParameter(name, f"takes more than {COMPILE_TIMEOUT_S:g} s to compile; simplify it") from err


def _shorten(message: str) -> str:
    """The first lines of an error of llguidance, which quotes whole grammars."""
    text = " ".join(line.strip() for line in message.split("\n")[:6] if line.strip())
    return text if len(text) <= 300 else text[:297] + "..."
