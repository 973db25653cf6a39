"""What may be asked for: SamplingParams, StructuredOutputsParams, PoolingParams.

Owns the options of a request, their bounds and the words that refuse what is outside. Knows no model: whether it can
honour them is said in request_limits.py and grammar.py. Spelling follows vLLM where the meaning is the same.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any

from kvq.engine.errors import InvalidParameter

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1_000
_GREEDY_BELOW = 1e-5
# What a request may leave to the model's generation_config.
MODEL_DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form an answer must have; exactly one of the first five is given. Spelling is vLLM's.

    Args:
        json: a JSON schema, as a mapping or as its JSON text; kept as text, in the order it was written.
        regex: a regular expression the whole answer matches (Rust's syntax: no look-around, no back references).
        choice: the answer is one of these strings.
        grammar: a context-free grammar, in Lark or in GBNF/EBNF (``root ::= ...``) notation.
        json_object: True: the answer is any JSON object.
        disable_any_whitespace: JSON without whitespace between its parts.
        whitespace_pattern: a regular expression for the whitespace between the parts of JSON.

    Raises:
        InvalidParameter: when none or several are given, or one is empty or of a wrong type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        _check(
            len(given) == 1,
            "structured_outputs",
            f"needs exactly one of {', '.join(_CONSTRAINTS)}, got {' and '.join(given) or 'none'}",
        )
        name = "structured_outputs." + given[0]
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        _check(self.json_object in (None, True), name, "must be true where it is given")
        for text in (self.regex, self.grammar):
            _check(text is None or (isinstance(text, str) and bool(text)), name, "must be a string that is not empty")
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            _check(is_list and bool(self.choice), name, "must be a list of at least one string")
            object.__setattr__(self, "choice", tuple(self.choice))
            _check(
                all(isinstance(text, str) and text for text in self.choice),
                name,
                "must hold strings that are not empty",
            )
        pattern = "structured_outputs.whitespace_pattern"
        _check(isinstance(self.whitespace_pattern, str | None), pattern, "must be a string")
        _switch("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        for text in (self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ())):
            if text is not None:
                _check_text(name, text)


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


def _schema_text(schema: str | Mapping[str, Any] | bool) -> str:
    name = "structured_outputs.json"
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError as err:
        raise InvalidParameter(name, "is nested too deeply") from err
    except (TypeError, ValueError) as err:
        raise InvalidParameter(name, f"is not JSON: {err}") from err
    _check(isinstance(parsed, Mapping | bool), name, "must be a JSON schema: an object (or true)")
    _check(parsed is not False, name, "is false: no answer can satisfy it")
    _check_text(name, text)
    return "{}" if parsed is True else text


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise InvalidParameter(name, "holds half of a surrogate pair, which is no text") from err


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Args:
        n: number of independent samples; sample ``i`` draws from the stream (seed, i).
        temperature: 0 is greedy, and so is anything below 1e-5.
        top_p: nucleus mass in (0, 1].
        top_k: number of candidates; 0, -1 or None means all.
        min_p: candidates below ``min_p * max probability`` are dropped.
        seed: None draws one, which is then reported with the result.
        max_tokens: most output tokens per sample; None is the room left in max_model_len.
        min_tokens: no end-of-sequence or stop before this many tokens.
        stop: strings that end a sample; the text is cut before them unless include_stop_str_in_output.
        stop_token_ids: token ids that end a sample.
        ignore_eos: go on past the end-of-sequence token.
        presence_penalty, frequency_penalty: OpenAI's additive penalties on generated tokens, in [-2, 2].
        repetition_penalty: multiplicative penalty on prompt and generated tokens (CTRL, section 4.1), > 0.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        bad_words: strings that are not generated: a token that would complete the token sequence of one is barred.
        allowed_token_ids: the only tokens that may be generated; None allows all.
        logprobs: number of top log-probabilities returned per token; None returns none.
        prompt_logprobs: the same for the tokens of the prompt (which are then computed, never taken from the cache).
        skip_special_tokens: leave special tokens out of the text.
        truncate_prompt_tokens: keep only this many of the prompt's last tokens; -1: as many as leave room for
            max_tokens.
        structured_outputs: the form the answer must have.

    Raises:
        InvalidParameter: naming the parameter that is of a wrong type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, read in _READERS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        _check(1 <= self.n <= 128, "n", f"must be between 1 and 128, got {self.n}")
        _check(0 <= self.temperature <= 100, "temperature", f"must be between 0 and 100, got {self.temperature}")
        _check(0 < self.top_p <= 1, "top_p", f"must be in (0, 1], got {self.top_p}")
        _check(self.top_k is None or self.top_k >= 0, "top_k", f"must be 0 (all) or positive, got {self.top_k}")
        _check(0 <= self.min_p <= 1, "min_p", f"must be in [0, 1], got {self.min_p}")
        _check(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"must be in [0, {MAX_SEED}], got {self.seed}")
        _check(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            f"must be at least 1, got {self.max_tokens}",
        )
        _check(self.min_tokens >= 0, "min_tokens", f"must not be negative, got {self.min_tokens}")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})",
        )
        _check(all(self.stop), "stop", "must not contain an empty string")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(-2 <= value <= 2, name, f"must be in [-2, 2], got {value}")
        _check(
            0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            f"must be positive and finite, got {self.repetition_penalty}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must be between 0 and 20, got {value}")
        _check(
            all(word.strip() for word in self.bad_words),
            "bad_words",
            "must not contain an empty string, nor mere space",
        )
        _check(
            len(self.bad_words) <= MAX_BAD_WORDS,
            "bad_words",
            f"has {len(self.bad_words)} words, the limit is {MAX_BAD_WORDS}",
        )
        _check(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")
        _check_truncation(self.truncate_prompt_tokens)
        for token_id, bias in self.logit_bias.items():
            _check(-100 <= bias <= 100, "logit_bias", f"token {token_id}: must be in [-100, 100], got {bias}")

    @property
    def greedy(self) -> bool:
        """True where the most probable token is always taken: at temperature 0, and so near it that dividing by it
        would leave the range of fp32 (vLLM's bound)."""
        return self.temperature < _GREEDY_BELOW


def _integer(name: str, value: Any) -> int:
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError as err:
        raise InvalidParameter(name, f"must be an integer, got {value!r}") from err


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _top_k(name: str, value: Any) -> int | None:
    top_k = _integer_or_none(name, value)
    return None if top_k == -1 else top_k  # vLLM's other spelling of "all"


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    _check(isinstance(value, Real) and not isinstance(value, bool), name, f"must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError as err:  # an integer beyond all floats
        raise InvalidParameter(name, "is too large") from err


def _form(name: str, value: Any) -> StructuredOutputsParams | None:
    _check(
        isinstance(value, StructuredOutputsParams | None),
        name,
        f"must be a StructuredOutputsParams, got {value!r:.100}",
    )
    return value  # type: ignore[no-any-return]


def _switch(name: str, value: Any) -> bool:
    _check(isinstance(value, bool), name, f"must be True or False, got {value!r}")
    return bool(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _items(name, value)
    _check(all(isinstance(text, str) for text in strings), name, "must hold strings only")
    return strings


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """The items of a list, of none where it is None (vLLM's spelling of an empty one)."""
    try:
        return () if value is None else tuple(value)
    except TypeError as err:
        raise InvalidParameter(name, f"must be a list, got {value!r}") from err


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_integer(name, token_id) for token_id in _items(name, value))


def _biases(name: str, value: Any) -> dict[int, float]:
    _check(isinstance(value, Mapping | None), name, f"must be a mapping of token ids to numbers, got {value!r}")
    return {_integer(name, token_id): _number(name, bias) for token_id, bias in (value or {}).items()}


_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("n", "min_tokens"), _integer),
    **dict.fromkeys(
        ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
        _integer_or_none,
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), _number
    ),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), _switch),
    **dict.fromkeys(("stop", "bad_words"), _strings),
    "top_k": _top_k,
    "stop_token_ids": _token_ids,
    "allowed_token_ids": lambda name, value: None if value is None else _token_ids(name, value),
    "logit_bias": _biases,
    "structured_outputs": _form,
}


def _check_truncation(num_tokens: int | None) -> None:
    _check(
        num_tokens is None or num_tokens == -1 or num_tokens >= 1,
        "truncate_prompt_tokens",
        f"must be at least 1, or -1 for as many as fit, got {num_tokens}",
    )


def _check(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise InvalidParameter(param, message)


class PoolingType(StrEnum):
    """What an embedding is made of: the hidden state of the last token, or the mean of all."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one prompt is embedded.

    Args:
        dimensions: keep only this many of the vector's first values; for models trained for that.
        normalize: scale the vector to length 1; None is the engine's setting.
        truncate_prompt_tokens: as in SamplingParams; -1: as many as fit.

    Raises:
        InvalidParameter: naming the parameter that is out of range.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "truncate_prompt_tokens"):
            object.__setattr__(self, name, _integer_or_none(name, getattr(self, name)))
        _check(self.normalize in (None, True, False), "normalize", f"must be True or False, got {self.normalize!r}")
        _check(
            self.dimensions is None or self.dimensions >= 1,
            "dimensions",
            f"must be at least 1, got {self.dimensions}",
        )
        _check_truncation(self.truncate_prompt_tokens)
