"""KnownBodies: reads request bodies whose settings were seen before at a fraction of the cost.

Owns a bounded memory of settings (everything but the prompt) that ``parse_body`` has accepted. The lines of a file
mostly differ in their prompt alone, so that is all that is left to check. Knows no rule of its own: what is not plainly
good goes through ``parse_body``, whose verdict and words stand. Invariant: ``read`` gives what ``parse_body`` gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvq.worker.bodies import ParsedBody, parse_body
from kvq.worker.chats import ROLES
from kvq.worker.jobs import Endpoint
from kvq.worker.limits import MAX_PROMPT_BYTES

_MAX_KNOWN = 256
_MAX_SETTINGS_CHARS = 4096
# What a character and a message take at most, written as JSON in UTF-8.
_BYTES_PER_CHAR = 6
_BYTES_PER_MESSAGE = 64


class KnownBodies:
    """For one thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[Endpoint, str], ParsedBody] = {}

    def read(self, endpoint: Endpoint, body: Mapping[str, Any]) -> ParsedBody:
        """What ``parse_body`` returns for this body.

        Raises:
            RowError: as ``parse_body`` does.
        """
        if endpoint is Endpoint.EMBEDDINGS:
            return parse_body(endpoint, body)
        chat = endpoint is Endpoint.CHAT
        prompt_field = "messages" if chat else "prompt"
        settings = {name: value for name, value in body.items() if name != prompt_field}
        try:
            text = json.dumps(settings)
        except (TypeError, ValueError, RecursionError):  # no JSON, or nested without end
            return parse_body(endpoint, body)
        if len(text) > _MAX_SETTINGS_CHARS:
            return parse_body(endpoint, body)
        known = self._known.get((endpoint, text))
        if known is None:
            return self._learn(endpoint, body, text)
        prompt = body.get(prompt_field)
        spare_bytes = MAX_PROMPT_BYTES - _BYTES_PER_CHAR * len(text)
        if not (_plain_messages(prompt, spare_bytes) if chat else _plain_text(prompt, spare_bytes)):
            return parse_body(endpoint, body)
        if chat:
            return replace(known, messages=tuple(map(dict, prompt)))  # type: ignore[arg-type]
        return replace(known, prompt=prompt)

    def _learn(self, endpoint: Endpoint, body: Mapping[str, Any], text: str) -> ParsedBody:
        parsed = parse_body(endpoint, body)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[endpoint, text] = parsed
        return parsed


def _plain_messages(messages: Any, most_bytes: int) -> bool:
    """True for messages of a role and a text each that certainly take no more than ``most_bytes``."""
    if type(messages) is not list or not messages:
        return False
    size = _BYTES_PER_MESSAGE * len(messages)
    for message in messages:
        if type(message) is not dict or len(message) != 2 or message.get("role") not in ROLES:
            return False
        content = message.get("content")
        if type(content) is not str or not _is_text(content):
            return False
        size += _BYTES_PER_CHAR * len(content)
    return size <= most_bytes


def _plain_text(prompt: Any, most_bytes: int) -> bool:
    return type(prompt) is str and prompt != "" and _BYTES_PER_CHAR * len(prompt) <= most_bytes and _is_text(prompt)


def _is_text(value: str) -> bool:
    """False where half of a surrogate pair is in it."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
