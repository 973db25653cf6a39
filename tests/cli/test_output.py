"""Printing and writing: files appear whole or not at all, and numbers read well."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvq.cli.output import atomic_file, count, json_line, milliseconds, print_table, seconds, shorten
from kvq.cli.progress import Rate
from kvq.worker.jobs import JobError, JobState


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    with atomic_file(str(target)) as stream:
        stream.write("new ☃")
        assert target.read_text(encoding="utf-8") == "old"
    assert target.read_text(encoding="utf-8") == "new ☃"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_file_whose_writing_breaks_off_is_as_before(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("old", encoding="utf-8")
    with pytest.raises(UnicodeEncodeError), atomic_file(str(target)) as stream:
        stream.writelines(["half", "\ud83d"])
    assert target.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_file_that_no_room_is_left_for_is_as_before_and_named(tmp_path: Path) -> None:
    """A limit on the size of files fails writes as a full disk does."""
    code = f"""
import click, resource, signal
from kvq.cli.output import atomic_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with atomic_file({str(tmp_path / "out.jsonl")!r}) as stream:
        stream.write("x" * 100_000)
except click.ClickException as err:
    print(err.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot write {tmp_path}/out.jsonl: File too large; the results are in the database")
    assert os.listdir(tmp_path) == []


def test_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    with atomic_file(str(link)) as stream:
        stream.write("new")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"


def test_a_device_is_written_to_not_replaced() -> None:
    with atomic_file("/dev/null") as stream:
        stream.write("x")
    assert not Path("/dev/null").is_file()


def test_a_table_too_wide_for_the_terminal_becomes_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns, rows = (
        ("line", "custom id", "state", "text"),
        [(1, "classify-01", "succeeded", "praise " * 10), (2, None, "dead", "")],
    )

    def shown(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(columns, rows, right=("line",))
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    wide, narrow = shown(60), shown(30)
    assert wide[0].split() == ["line", "custom", "id", "state", "text"]
    assert narrow[:3] == ["line       1", "custom id  classify-01", "state      succeeded"]
    assert narrow[3].startswith("text       praise praise")
    assert max(map(len, narrow)) <= 30
    assert narrow[-3:] == ["line   2", "state  dead", ""]


def test_json_lines_hold_records_times_and_states() -> None:
    value = {"e": JobError(code="c", message="ü"), "t": datetime(2026, 1, 2, tzinfo=UTC), "s": JobState.DEAD, "l": (1,)}
    assert json_line(value) == (
        '{"e": {"code": "c", "message": "ü"}, "t": "2026-01-02T00:00:00+00:00", "s": "dead", "l": [1]}'
    )


def test_numbers_read_well() -> None:
    assert (count(1, "row"), count(0, "row"), count(2500, "row")) == ("1 row", "0 rows", "2,500 rows")
    assert (milliseconds(None), milliseconds(12.4), milliseconds(1500)) == ("-", "12 ms", "1.5 s")
    assert (seconds(59.94), seconds(200), seconds(7500)) == ("59.9 s", "3 min 20 s", "2 h 5 min")
    assert shorten("a\n b\t c", 10) == "a b c"
    assert shorten("a" * 20, 5) == "aaaa…"


def test_the_rate_is_of_the_last_seconds() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    assert rate.add(0) == 0
    for now in range(1, 31):
        shown = rate.add(100 * now)
    assert shown == pytest.approx(100)
    now = 60.0
    assert rate.add(3000) < 100
