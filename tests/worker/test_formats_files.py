"""Input files: how lines are read, which are refused, and that both passes agree."""

from __future__ import annotations

import gzip
import io
import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.worker.errors import FileInvalid, FileUnreadable
from kvq.worker.files import FileReport, InputFile, open_input, open_requests
from kvq.worker.jobs import Endpoint, NewJob
from kvq.worker.submission import describe_bad_rows, require_good

BATCH = str(uuid.UUID(int=1))


def line(custom_id: str | None, **body: Any) -> str:
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "Hello"}], **body},
        }
    )


def check(path: Path, served: list[str] | None = None) -> FileReport:
    with open_input(str(path)) as source:
        return source.check(served)


def read(path: Path) -> list[NewJob]:
    with open_input(str(path)) as source:
        source.check()
        return list(source.jobs(batch_id=BATCH, queue="q", priority=2))


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in lines))
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"id": "a", "prompt": "x", "max_tokens": 3, "max_tokens": 5}', "max_tokens"),
        ('{"id": "a", "prompt": "x", "prompt": "x"}', "prompt"),
        ('{"id": "a", "prompt": "x", "guided_json": {"type": "object", "type": "array"}}', "type"),
        ('{"id": "a", "messages": [{"role": "user", "role": "system", "content": "x"}]}', "role"),
        (line("a").replace('"method"', '"url": "/v1/completions", "method"'), "url"),
    ],
)
def test_a_name_given_twice_is_refused_and_the_row_still_known_by_its_id(tmp_path: Path, text: str, name: str) -> None:
    (bad,) = check(write(tmp_path / "a.jsonl", text)).bad
    assert (bad.custom_id, bad.code, bad.message) == ("a", "invalid_value", f"{name}: is given twice")


def test_the_openai_form_becomes_jobs(tmp_path: Path) -> None:
    (job,) = read(write(tmp_path / "a.jsonl", line("a", model="m", max_tokens=3)))
    assert job.custom_id == "a"
    assert job.line_no == 1
    assert job.endpoint is Endpoint.CHAT
    assert job.body == {"messages": [{"role": "user", "content": "Hello"}], "model": "m", "max_tokens": 3}
    assert (job.queue, job.priority, job.model, job.error) == ("q", 2, "m", None)


def test_the_short_form_becomes_jobs(tmp_path: Path) -> None:
    rows = [
        {"prompt": "One", "max_tokens": 3},
        {"id": "two", "messages": [{"role": "user", "content": "Two"}]},
        {"id": 3, "prompt": "Three"},
        {"custom_id": "four", "prompt": "Four"},
    ]
    jobs = read(write(tmp_path / "a.jsonl", *map(json.dumps, rows)))
    assert [job.custom_id for job in jobs] == ["line-1", "two", "3", "four"]
    assert [job.endpoint for job in jobs] == [
        Endpoint.COMPLETIONS,
        Endpoint.CHAT,
        Endpoint.COMPLETIONS,
        Endpoint.COMPLETIONS,
    ]
    assert jobs[0].body == {"prompt": "One", "max_tokens": 3}
    assert not any(job.error for job in jobs)


def test_bom_crlf_and_blank_lines_lose_no_row_and_shift_no_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([line("a"), "", "   \t", line("b"), line("c")]).encode())
    report = check(path)
    assert (report.num_lines, report.num_rows, report.bad) == (5, 3, ())
    assert [(job.line_no, job.custom_id) for job in read(path)] == [(1, "a"), (4, "b"), (5, "c")]


def test_gzip_is_read_by_name_and_by_content_and_is_the_same_file(tmp_path: Path) -> None:
    text = (line("a") + "\n" + line("b") + "\n").encode()
    plain, named, unnamed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"
    plain.write_bytes(text)
    named.write_bytes(gzip.compress(text))
    unnamed.write_bytes(gzip.compress(text))
    assert {check(path).sha256 for path in (plain, named, unnamed)} == {check(plain).sha256}
    assert [job.custom_id for job in read(named)] == ["a", "b"]


def test_standard_input_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO((line("a") + "\n").encode())

    monkeypatch.setattr("sys.stdin", Stdin)
    with open_input("-") as source:
        assert source.check().num_good == 1
        assert [job.custom_id for job in source.jobs(batch_id=BATCH, queue="q")] == ["a"]


def test_the_same_line_has_the_same_job_id_and_another_batch_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("a"), line("b"))
    first, again = read(path), read(path)
    assert [job.job_id for job in first] == [job.job_id for job in again]
    with open_input(str(path)) as source:
        source.check()
        other = list(source.jobs(batch_id=str(uuid.UUID(int=2)), queue="q"))
    assert len({job.job_id for job in [*first, *other]}) == 4


BAD_LINES: list[tuple[str | bytes, str, str]] = [
    ("[1,2,3]", "not_an_object", "an array"),
    ('"hello"', "not_an_object", "a string"),
    ("null", "not_an_object", "null"),
    ("7", "not_an_object", "a number"),
    ("{bad", "invalid_json", "column 2"),
    ('{"prompt": "x", "temperature": NaN}', "invalid_json", "NaN"),
    ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "invalid_json", "digits"),
    ("[" * 100_000, "invalid_json", "recursion"),
    (b'{"prompt": "\xff"}', "invalid_json", "UTF-8"),
    ('{"custom_id":"x"}', "missing_field", "method, url, body"),
    ('{"custom_id":"x","method":"POST","url":"/v1/chat/completions"}', "missing_field", "body"),
    ('{"custom_id":"x","method":"GET","url":"/v1/chat/completions","body":{}}', "invalid_value", "POST"),
    ('{"custom_id":"x","method":"POST","url":"/v1/images","body":{}}', "unknown_url", "/v1/images"),
    ('{"custom_id":"x","method":"POST","url":7,"body":{}}', "invalid_type", "url"),
    ('{"custom_id":"x","method":"POST","url":"/v1/completions","body":[]}', "invalid_type", "body"),
    ('{"custom_id":"x","method":"POST","url":"/v1/completions","body":{}}', "missing_field", "prompt"),
    ('{"custom_id":5,"method":"POST","url":"/v1/completions","body":{"prompt":"x"}}', "invalid_type", "custom_id"),
    ('{"custom_id":"","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}', "invalid_value", "empty"),
    (json.dumps({"custom_id": "y" * 513, "prompt": "x"}), "invalid_value", "513"),
    (json.dumps({"custom_id": "a\0b", "prompt": "x"}), "invalid_value", "NUL"),
    ('{"custom_id":"x\\ud83d","prompt":"x"}', "invalid_value", "surrogate"),
    ('{"id":"x","custom_id":"y","prompt":"x"}', "unknown_field", "custom_id"),
    ('{"id":"x"}', "missing_field", "messages, prompt or input"),
    ('{"id":"x","max_tokens":3}', "missing_field", "prompt: is missing"),
    ('{"id":"x","method":"POST"}', "unknown_field", "id: is not a field"),
    ('{"prompt":"x","messages":[]}', "unknown_field", "prompt"),
    ('{"prompt":"x","body":{}}', "unknown_field", "body"),
    ('{"custom_id":"x","method":"POST","url":"/v1/completions","body":{},"extra":1}', "unknown_field", "extra"),
    ("{}", "missing_field", "custom_id"),
    ('{"prompt":"x","stream":true}', "stream_unsupported", "stream"),
]


@pytest.mark.parametrize(("bad", "code", "word"), BAD_LINES)
def test_a_bad_line_is_reported_and_hurts_no_other(tmp_path: Path, bad: str | bytes, code: str, word: str) -> None:
    path = write(tmp_path / "a.jsonl", line("first"), bad, line("last"))
    report = check(path)
    assert report.num_good == 2
    (row,) = report.bad
    assert (row.line_no, row.code) == (2, code)
    assert word in row.message
    row.message.encode()
    jobs = read(path)
    assert [job.error and job.error.code for job in jobs] == [None, code, None]
    assert jobs[1].error is not None
    assert jobs[1].error.message == row.message


def test_a_repeated_custom_id_names_both_lines_and_spares_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("a"), "", line("b"), line("a"), line("a"))
    report = check(path)
    assert [(row.line_no, row.code) for row in report.bad] == [(4, "duplicate_custom_id"), (5, "duplicate_custom_id")]
    assert all("line 1" in row.message for row in report.bad)
    assert [job.custom_id for job in read(path) if job.error is None] == ["a", "b"]


def test_a_repeated_custom_id_is_found_even_where_the_first_line_is_bad(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("a", stream=True), line("a"))
    assert [row.code for row in check(path).bad] == ["stream_unsupported", "duplicate_custom_id"]


def test_every_bad_line_is_in_the_report_for_people(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(text for text, _, _ in BAD_LINES), line("good"))
    report = check(path)
    assert len(report.bad) == len(BAD_LINES)
    with pytest.raises(FileInvalid) as caught:
        require_good(report)
    text = str(caught.value)
    assert f"{len(BAD_LINES)} of {len(BAD_LINES) + 1} rows" in text
    for row in report.bad:
        (told,) = (line for line in text.splitlines() if line.endswith(f": {row.message} [{row.code}]"))
        assert re.search(rf"\b{row.line_no}\b", told.split(":")[0])


def test_lines_with_the_same_fault_share_a_line_of_the_report(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *["null"] * 150, line("good"), "null", *["[]"] * 3)
    text = describe_bad_rows(check(path))
    assert "lines 1-150, 152: is null, not an object [not_an_object]" in text
    assert "lines 153-155: is an array" in text


def test_models_are_checked_when_it_is_known_what_is_served(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("a", model="smollm2"), line("b", model="gpt-4o"), line("c"))
    assert check(path).bad == ()
    (row,) = check(path, ["SmolLM2-135M-Instruct"]).bad
    assert (row.line_no, row.custom_id, row.code) == (2, "b", "model_not_found")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "holds no rows"),
        (b"\n \r\n\n", "holds no rows"),
        (b"\xef\xbb\xbf", "holds no rows"),
        ("\ufeff{}".encode("utf-16-le"), "UTF-16"),
        (gzip.compress(b'{"prompt": "x"}\n' * 1000, mtime=0)[:-20], "decompressed"),
    ],
)
def test_a_file_that_is_no_list_of_rows_is_refused(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileUnreadable, match=word):
        check(path)


def test_text_named_gz_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileUnreadable, match="decompressed"):
        check(write(tmp_path / "a.jsonl.gz", line("a")))


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileUnreadable, match=r"none\.jsonl: No such file"):
        check(tmp_path / "none.jsonl")
    with pytest.raises(FileUnreadable, match="directory"):
        check(tmp_path)


def test_a_file_that_changes_between_the_passes_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("a"))
    with open_input(str(path)) as source:
        source.check()
        write(path, "{bad" + " " * 200)
        with pytest.raises(FileUnreadable, match="line 1 changed"):
            list(source.jobs(batch_id=BATCH, queue="q"))


def test_python_requests_are_read_like_lines() -> None:
    with open_requests([{"prompt": "One"}, {"prompt": ""}, 7]) as source:
        report = source.check()
    assert report.num_good == 1
    assert [(row.line_no, row.code) for row in report.bad] == [(2, "invalid_value"), (3, "not_an_object")]


@given(st.lists(st.binary(max_size=40)))
def test_no_bytes_make_reading_fail_or_the_passes_disagree(lines: list[bytes]) -> None:
    content = b"\n".join([b'{"prompt": "x"}', *lines])
    source = InputFile("fuzz", io.BytesIO(content))
    report = source.check()
    jobs = list(source.jobs(batch_id=BATCH, queue="q"))
    assert len(jobs) == report.num_rows
    assert sum(job.error is None for job in jobs) == report.num_good
    assert len({job.job_id for job in jobs}) == len(jobs)
