"""Where the texts of two rows part, and what they have in common after that.

Owns the comparison for people, in characters of the fields they wrote. Knows no tokens: how many rows it concerns is
the trie's to say.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import SequenceMatcher

from kvq.worker.bodies import ParsedBody

_SHOWN_BEFORE = 48
_SHOWN_AFTER = 24
# Shorter agreement is chance, and comparing grows with the square of the length.
_FEWEST_REPEATED_WORDS = 16
_MOST_COMPARED_WORDS = 3_000
_WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSplit:
    """Two texts part in ``field`` at ``character``, counted from 1: ``before`` is common, ``one`` and ``other`` differ.

    An empty ``one`` or ``other``: that text ends there.
    """

    field: str
    character: int
    before: str
    one: str
    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRepeat:
    """A passage of ``num_characters`` that is equal in both texts, ``gap_characters`` after they parted."""

    gap_characters: int
    num_characters: int
    begins: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One field of a body that becomes a part of the prompt."""

    field: str
    text: str


def passages(parsed: ParsedBody) -> tuple[Passage, ...]:
    """The texts of a body in the order in which a prompt has them."""
    if parsed.embedding is not None:
        texts = [item if isinstance(item, str) else " ".join(map(str, item)) for item in parsed.embedding.inputs]
        return tuple(Passage(field=f"input[{i}]", text=text) for i, text in enumerate(texts))
    if parsed.messages is None:
        prompt = parsed.prompt
        return (Passage(field="prompt", text=prompt if isinstance(prompt, str) else " ".join(map(str, prompt or ()))),)
    found = []
    if parsed.tools:
        found.append(Passage(field="tools", text=json.dumps(parsed.tools, ensure_ascii=False)))
    if parsed.template.kwargs:
        found.append(Passage(field="chat_template_kwargs", text=json.dumps(parsed.template.kwargs)))
    for i, message in enumerate(parsed.messages):
        found.append(Passage(field=f"messages[{i}] ({message['role']})", text=message["content"]))
    return tuple(found)


def num_characters(one: tuple[Passage, ...]) -> int:
    """Characters of all passages."""
    return sum(len(passage.text) for passage in one)


def find_split(one: tuple[Passage, ...], other: tuple[Passage, ...]) -> TextSplit | None:
    """Where two bodies part first; None where their texts are equal."""
    for i in range(max(len(one), len(other))):
        a = one[i] if i < len(one) else Passage(field="", text="")
        b = other[i] if i < len(other) else Passage(field="", text="")
        if a == b:
            continue
        same_field = a.field == b.field
        place = _common_length(a.text, b.text) if same_field else 0
        return TextSplit(
            field=a.field or b.field,
            character=place + 1,
            before=a.text[max(0, place - _SHOWN_BEFORE) : place],
            one=a.text[place : place + _SHOWN_AFTER],
            other=b.text[place : place + _SHOWN_AFTER],
        )
    return None


def find_repeat(one: tuple[Passage, ...], other: tuple[Passage, ...]) -> TextRepeat | None:
    """The longest passage that two bodies share after they parted; None where it is too short to matter."""
    a, b = ("\n".join(passage.text for passage in side) for side in (one, other))
    place = _common_length(a, b)
    words_a, words_b = (_WORD.findall(text[place:])[:_MOST_COMPARED_WORDS] for text in (a, b))
    match = SequenceMatcher(None, words_a, words_b, autojunk=False).find_longest_match()
    if match.size < _FEWEST_REPEATED_WORDS:
        return None
    repeated = "".join(words_a[match.a : match.a + match.size])
    gap = max(sum(map(len, words_a[: match.a])), sum(map(len, words_b[: match.b])))
    return TextRepeat(gap_characters=gap, num_characters=len(repeated), begins=repeated[:_SHOWN_BEFORE].strip())


def _common_length(a: str, b: str) -> int:
    """Number of equal leading characters, by bisection over slices (compared at memory speed)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
