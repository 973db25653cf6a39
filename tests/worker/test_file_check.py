"""FileCheck: the same report in one piece or many, and memory that does not grow with the custom_ids."""

from __future__ import annotations

import io
import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.worker.files import FileReport, InputFile

_LINES = st.lists(
    st.one_of(
        st.integers(0, 5).map(lambda number: json.dumps({"id": number, "prompt": "x"})),
        st.sampled_from(["", "{", '{"id": 1}', '{"prompt": ""}', '{"custom_id": "line-2", "prompt": "x"}']),
    ),
    max_size=40,
)


def _report(lines: list[str], *, pieces: bool) -> FileReport:
    # Blank lines in front, so that the clock is looked at within so short a file.
    content = "\n".join(['{"id": "first", "prompt": "x"}', *[""] * 250, *lines]).encode()
    source = InputFile("fuzz", io.BytesIO(content))
    check = source.begin_check()
    if pieces:
        clock = itertools.count()
        check._clock = lambda: float(next(clock))
        while not check.run(0.0):
            assert check.flawless in (True, False)
    check.run()
    return source.end_check(check)


@settings(max_examples=40)
@given(_LINES)
def test_a_check_in_pieces_reports_the_same(lines: list[str]) -> None:
    assert _report(lines, pieces=True) == _report(lines, pieces=False)


@settings(max_examples=40)
@given(_LINES)
def test_a_repeated_custom_id_is_bad_on_every_line_but_its_first(lines: list[str]) -> None:
    report = _report(lines, pieces=False)
    first_by_id: dict[str, int] = {}
    repeated = {}
    for line_no, line in enumerate(lines, start=252):
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = {}
        custom_id = str(row.get("custom_id", row.get("id", f"line-{line_no}")))
        if first_by_id.setdefault(custom_id, line_no) != line_no and row.get("prompt"):
            repeated[line_no] = first_by_id[custom_id]
    found = {row.line_no: row.message for row in report.bad if row.code == "duplicate_custom_id"}
    assert found.keys() == repeated.keys()
    assert all(found[line_no].endswith(f"on line {first}") for line_no, first in repeated.items())
