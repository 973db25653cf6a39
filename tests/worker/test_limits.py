"""One row can be only so large, and is told by how much it is larger."""

from __future__ import annotations

from typing import Any

import pytest

from kvq.worker import limits
from kvq.worker.errors import RowError
from kvq.worker.formats import parse_body
from kvq.worker.jobs import Endpoint


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "é" * (limits.MAX_PROMPT_BYTES // 2 + 1)}, "prompt: has 8,388,610 bytes, the limit is 8,388,608"),
        ({"max_completion_tokens": 0}, "^max_completion_tokens: must be at least 1, got 0"),
        ({"max_tokens": 0}, "^max_tokens: must be at least 1, got 0"),
        ({"n": 129}, "n: must be between 1 and 128, got 129"),
        ({"n": 1025}, "n: must be between 1 and 128, got 1025"),
        ({"stop": "x" * 10_000}, "stop: has 10,000 characters in a string, the limit is 1,024"),
        ({"stop": ["x"] * 65}, "stop: has 65 strings"),
        ({"guided_json": {"enum": ["x" * limits.MAX_FORM_BYTES]}}, "guided_json: has"),
        ({"guided_regex": "x" * 10_000}, "guided_regex: has 10,000 characters"),
        ({"structured_outputs": {"regex": "x" * 10_000}}, "structured_outputs.regex: has 10,000 characters"),
        ({"logit_bias": {str(i): 1 for i in range(10_001)}}, "logit_bias: has 10,001 entries"),
        ({"metadata": deep(limits.MAX_DEPTH + 1)}, "nested more than 64 levels deep"),
        ({"metadata": deep(10_000)}, "nested more than 64 levels deep"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_part_over_its_limit_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_body(Endpoint.COMPLETIONS, {"prompt": "x", **fields})


def test_what_is_within_the_limits_is_accepted() -> None:
    body = {"prompt": "x", "stop": ["x" * 1024], "n": 128, "metadata": deep(20)}
    assert parse_body(Endpoint.COMPLETIONS, body).params.n == 128
