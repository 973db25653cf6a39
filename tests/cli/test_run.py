"""``kvq run`` with a tiny model, from the file to the exit code."""

from __future__ import annotations

import json
import resource
import shlex
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvq.worker.service import WorkerService
from tests.cli.conftest import Kvq, Ran, start
from tests.models import tiny_model
from tests.waiting import wait_until


def chat(custom_id: str, text: str = "Hello", **body: Any) -> str:
    messages = [{"role": "user", "content": text}]
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages, "temperature": 0, "max_tokens": 4, **body},
        }
    )


class Runner:
    """``kvq run`` on the tiny model."""

    def __init__(self, kvq: Kvq, model: Path) -> None:
        self._kvq = kvq
        self.settings = ("--model", model, "--kv-cache-memory", "32MiB", "--device", "cpu")

    def __call__(self, *args: object) -> Ran:
        return self._kvq("run", *args, *self.settings)


@pytest.fixture
def run(kvq: Kvq, tiny_model_folder: Path) -> Runner:
    return Runner(kvq, tiny_model_folder)


def write(path: str, *lines: str) -> str:
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def results(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def query(sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect("kvq.db") as connection:
        rows = connection.execute(sql).fetchall()
    connection.close()
    return rows


def test_a_file_becomes_results_in_sql_and_in_a_file(run: Runner) -> None:
    write("a.jsonl", chat("one"), chat("two", n=3, temperature=1, seed=1), json.dumps({"prompt": "x", "max_tokens": 2}))
    ran = run("a.jsonl", "--output", "out.jsonl", "--errors", "err.jsonl")
    assert ran.code == 0, ran.err
    lines = results("out.jsonl")
    assert [line["custom_id"] for line in lines] == ["one", "two", "line-3"]
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    assert [len(line["response"]["body"]["choices"]) for line in lines] == [1, 3, 1]
    assert lines[0]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert Path("err.jsonl").read_text() == ""
    assert query("SELECT custom_id, state FROM job_results ORDER BY line_no") == [
        ("one", "succeeded"),
        ("two", "succeeded"),
        ("line-3", "succeeded"),
    ]


def test_the_summary_says_what_was_done_what_it_cost_and_where_it_is(run: Runner) -> None:
    write("a.jsonl", *(chat(f"row-{i}", "Tell me about the sea. " * 20 + str(i)) for i in range(6)))
    out = run("a.jsonl", "--output", "out.jsonl").out
    for word in ("6 succeeded", "prompt tokens", "reused (", "output tokens", "tokens/s", "p50", "p95", "out.jsonl"):
        assert word in out
    assert "row-0" in out  # an answer, as an example
    command = next(line for line in out.splitlines() if "SELECT" in line)
    sql = command.partition('"')[2].rpartition('"')[0]
    assert len(query(sql)) == 5


def test_progress_is_talk_and_the_summary_is_data(run: Runner) -> None:
    write("a.jsonl", chat("one"))
    ran = run("a.jsonl", "--json")
    summary = json.loads(ran.out)
    assert summary["progress"]["succeeded"] == 1
    assert "1/1 rows" in ran.err


def test_results_can_go_to_stdout_and_then_the_summary_does_not(run: Runner) -> None:
    write("a.jsonl", chat("one"))
    ran = run("a.jsonl", "--output", "-")
    assert json.loads(ran.out)["custom_id"] == "one"
    assert "1 succeeded" in ran.err


def test_the_same_command_again_runs_nothing_and_writes_the_same_files(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.jsonl", chat("one"), chat("two"))
    run("a.jsonl", "--output", "out.jsonl")
    first = results("out.jsonl")
    monkeypatch.setattr(WorkerService, "from_settings", None)  # no model is loaded
    ran = run("a.jsonl", "--output", "out.jsonl")
    assert ran.code == 0
    assert "done before" in ran.err
    assert results("out.jsonl") == first
    assert query("SELECT count(*), max(attempts) FROM job_results") == [(2, 1)]


def test_bom_crlf_and_blank_lines_lose_no_row(run: Runner) -> None:
    Path("a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + "\r\n".join([chat("a"), "", "  ", chat("b"), chat("c")]).encode() + b"\r\n\r\n"
    )
    assert run("a.jsonl").code == 0
    assert query("SELECT line_no, custom_id, state FROM job_results ORDER BY line_no") == [
        (1, "a", "succeeded"),
        (4, "b", "succeeded"),
        (5, "c", "succeeded"),
    ]


BAD = ["[1,2,3]", '"hello"', "null", '{"custom_id":"x"}', "{bad", chat("good")]


def test_bad_lines_are_all_reported_and_nothing_is_enqueued(run: Runner) -> None:
    write("a.jsonl", chat("good"), *BAD)
    ran = run("a.jsonl", "--output", "out.jsonl")
    assert ran.code == 2
    assert ran.out == ""
    for line_no in range(2, 8):
        assert f"line {line_no}: " in ran.err
    assert "line 1: " not in ran.err
    assert "already used on line 1" in ran.err
    assert not Path("kvq.db").exists()
    assert not Path("out.jsonl").exists()


def test_skip_invalid_runs_the_good_rows_and_records_the_bad_ones(run: Runner) -> None:
    write("a.jsonl", chat("good"), *BAD)
    ran = run("a.jsonl", "--skip-invalid", "--output", "out.jsonl", "--errors", "err.jsonl")
    assert ran.code == 3
    assert [line["custom_id"] for line in results("out.jsonl")] == ["good"]
    errors = results("err.jsonl")
    assert [line["custom_id"] for line in errors] == ["line-2", "line-3", "line-4", "x", "line-6", "good"]
    assert [line["error"]["code"] for line in errors] == [
        *["not_an_object"] * 3,
        "missing_field",
        "invalid_json",
        "duplicate_custom_id",
    ]
    assert "1 succeeded, 6 failed" in ran.out
    assert "not_an_object" in ran.out


def test_one_row_too_long_fails_alone_with_both_numbers(run: Runner) -> None:
    rows = [chat(f"row-{i}") for i in range(9)]
    write("a.jsonl", *rows[:4], chat("long", "word " * 300), *rows[4:])
    ran = run("a.jsonl", "--max-model-len", "128", "--errors", "err.jsonl")
    assert ran.code == 3
    assert "9 succeeded, 1 failed" in ran.out
    (line,) = results("err.jsonl")
    assert line["custom_id"] == "long"
    assert line["error"]["code"] == "context_length_exceeded"
    assert "128" in line["error"]["message"]
    (num_tokens,) = [word for word in line["error"]["message"].split() if word.isdigit() and int(word) > 300]
    assert int(num_tokens) > 300


def test_a_model_that_is_not_served_is_found_before_it_is_loaded(run: Runner) -> None:
    write("a.jsonl", chat("one", model="gpt-4o"), chat("two", model="tiny"))
    ran = run("a.jsonl")
    assert ran.code == 2
    assert "line 1: model 'gpt-4o' is not served here" in ran.err
    assert run("a.jsonl", "--served-model-name", "gpt-4o").code == 0


def test_another_model_or_file_is_another_batch(run: Runner) -> None:
    write("a.jsonl", chat("one"))
    write("b.jsonl", chat("one"), "")
    assert run("a.jsonl").code == 0
    assert run("b.jsonl").code == 0
    assert run("a.jsonl", "--seed", "5").code == 0
    assert query("SELECT count(DISTINCT batch_id), count(*) FROM job_results") == [(3, 3)]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["none.jsonl"], "none.jsonl: No such file"),
        (["empty.jsonl"], "holds no rows"),
        (["a.jsonl", "--output", "no/such/folder/out.jsonl"], "does not exist"),
        (["a.jsonl", "--output", "."], "is a folder"),
        (["a.jsonl", "--gpu-memory-utilization", "1.0"], "gpu_memory_utilization"),
        (["a.jsonl", "--block-size", "7"], "block_size"),
        (["a.jsonl", "--db", "mysql://x/y"], "mysql"),
        (["a.jsonl", "--db", "junk.db"], "junk.db"),
    ],
)
def test_what_cannot_work_is_refused_at_once(run: Runner, args: list[str], word: str) -> None:
    write("a.jsonl", chat("one"))
    write("empty.jsonl")
    write("junk.db", "this is no database, but long enough to be taken for one" * 40)
    ran = run(*args)
    assert ran.code == 2
    assert ran.out == ""
    assert word in ran.err
    assert "Traceback" not in ran.err


def test_a_model_that_is_not_there_is_refused_and_the_rows_wait(kvq: Kvq) -> None:
    write("a.jsonl", chat("one"))
    ran = kvq("run", "a.jsonl", "--model", "/no/such/model")
    assert ran.code == 2
    assert "/no/such/model" in ran.err
    assert query("SELECT state FROM job_results") in ([], [("queued",)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_the_same_command_finishes_it(
    run: Runner, tmp_path: Path, number: signal.Signals
) -> None:
    write("a.jsonl", *(chat(f"row-{i}", f"{i}", max_tokens=400, ignore_eos=True) for i in range(24)))
    process = start("run", "a.jsonl", *run.settings, "--max-num-seqs", "2", folder=tmp_path)
    wait_until(lambda: Path("kvq.db").exists() and finished() > 0, timeout_s=60, what="the first result")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command resumes" in err
    before = query("SELECT custom_id, text FROM job_results WHERE state = 'succeeded' ORDER BY line_no")
    assert 0 < len(before) < 24
    assert query("SELECT count(*) FROM job_results WHERE state NOT IN ('succeeded', 'queued')") == [(0,)]

    ran = run("a.jsonl")
    assert ran.code == 0, ran.err
    assert f"{len(before)} done before" in ran.err
    after = query("SELECT custom_id, text, attempts FROM job_results ORDER BY line_no")
    assert len(after) == 24
    assert set(before) <= {(custom_id, text) for custom_id, text, _ in after}
    assert all(attempts == 1 for _, _, attempts in after)


def test_an_interrupt_just_after_a_run_has_stopped_is_no_traceback(run: Runner, tmp_path: Path) -> None:
    write("a.jsonl", *(chat(f"row-{i}", f"{i}", max_tokens=400, ignore_eos=True) for i in range(24)))
    with start("run", "a.jsonl", *run.settings, "--max-num-seqs", "2", folder=tmp_path) as process:
        assert process.stderr is not None
        said = ""
        for line in ("loading the model\n", "the same command resumes with the others\n"):
            while not said.endswith(line):
                said += process.stderr.readline() or pytest.fail(f"it ended: {said}")
            process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    # Where Python has given its handlers back already, the system ends the process, which a shell calls 130 too.
    assert process.returncode in (130, -signal.SIGINT), rest
    assert rest in ("", "\nkvq: interrupted\n")


def finished() -> int:
    try:
        ((number,),) = query("SELECT count(*) FROM job_results WHERE state = 'succeeded'")
    except sqlite3.OperationalError:  # the tables are being made
        return 0
    return int(number)


def test_a_run_whose_database_has_no_room_ends_after_a_lease_and_goes_on_when_there_is(
    run: Runner, tmp_path: Path
) -> None:
    Path("kvq.toml").write_text("lease_s = 2\nheartbeat_s = 0.5\n", encoding="utf-8")
    write("a.jsonl", *(chat(f"row-{i}", f"{i}", max_tokens=400, ignore_eos=True) for i in range(24)))
    with start("run", "a.jsonl", *run.settings, "--max-num-seqs", "2", folder=tmp_path) as process:
        wait_until(lambda: Path("kvq.db").exists() and finished() > 0, timeout_s=120, what="the first result")
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, 1))  # as a full disk
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert err.splitlines()[-1].startswith("kvq: error: the database ")
    assert 0 < finished() < 24
    ran = run("a.jsonl")
    assert ran.code == 0, ran.err


def test_a_run_may_keep_its_results_in_postgresql(run: Runner, kvq: Kvq, pg_db_url: str) -> None:
    write("a.jsonl", chat("one"), chat("two"))
    ran = run("a.jsonl", "--db", pg_db_url)
    assert ran.code == 0, ran.err
    assert "psql postgresql://" in ran.out.replace("'", "")
    assert not Path("kvq.db").exists()
    rows = kvq("results", "latest", "--db", pg_db_url, "--json").out.splitlines()
    assert [json.loads(row)["state"] for row in rows] == ["succeeded", "succeeded"]


def test_a_run_on_an_old_postgresql_database_says_what_to_run(run: Runner, pg_empty_url: str) -> None:
    write("a.jsonl", chat("one"))
    ran = run("a.jsonl", "--db", pg_empty_url)
    assert ran.code == 2
    assert "kvq db upgrade" in ran.err


def test_a_wrong_path_of_the_model_is_not_blamed_on_rows_that_name_the_right_one(kvq: Kvq) -> None:
    write("a.jsonl", chat("one", model="SmolLM2-135M-Instruct"))
    ran = kvq("run", "a.jsonl", "--model", "./smollm3")
    assert (ran.code, ran.err) == (2, "kvq: error: model: there is no folder smollm3\n"), ran.err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "there is no folder"),
        ("nowhere.gguf", "there is no file nowhere.gguf"),
        ("not a model", "give a folder with config.json"),
        ("empty", "holds no config.json"),
        ("adapter", "lora_modules NAME=adapter"),
        ("quantised", "such as quantised/a.gguf"),
        ("package:nowhere", "'nowhere' is not installed"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan", "worker"])
def test_a_model_that_is_not_there_is_one_clear_line_and_nothing_is_queued_for_it(
    kvq: Kvq, command: str, model: str, message: str
) -> None:
    write("a.jsonl", chat("one"))
    for folder, file in (("empty", None), ("adapter", "adapter_config.json"), ("quantised", "a.gguf")):
        Path(folder).mkdir()
        if file is not None:
            (Path(folder) / file).touch()
    ran = kvq(command, *(["--no-broker"] if command == "worker" else ["a.jsonl"]), "--model", model)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1, ran.err
    assert ran.err.startswith("kvq: error: model: ")
    assert message in ran.err
    assert not Path("kvq.db").exists() or query("SELECT count(*) FROM jobs") == [(0,)]


def test_a_finished_run_needs_its_model_no_longer(run: Runner, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "moved")
    write("a.jsonl", chat("one"))
    asked = ("a.jsonl", "--model", model)
    assert run(*asked).code == 0
    model.joinpath("config.json").unlink()
    assert run(*asked).code == 0


def test_refused_rows_are_not_called_done_before(run: Runner) -> None:
    write("a.jsonl", chat("one"), "null", "[]")
    assert "3 rows, 2 refused; batch" in run("a.jsonl", "--skip-invalid").err
    assert "all 3 rows were done before" in run("a.jsonl", "--skip-invalid").err
    write("b.jsonl", "null")
    ran = run("b.jsonl", "--skip-invalid")
    assert (ran.code, "none of 1 row can be run" in ran.err) == (3, True)


def test_the_commands_that_a_summary_shows_work_as_they_stand(run: Runner, kvq: Kvq) -> None:
    write("a.jsonl", chat("one"))
    shown = run("a.jsonl", "--db", "my jobs.db", "--output", "-").err
    (line,) = [line for line in shown.splitlines() if "kvq results" in line]
    ran = kvq(*shlex.split(line)[3:])
    assert (ran.code, "one" in ran.out) == (0, True)
    assert "standard output" in shown
    (line,) = [line for line in shown.splitlines() if "sqlite3" in line]
    _, path, sql = shlex.split(line.partition("ask for them")[2])
    with sqlite3.connect(path) as connection:
        assert [row[:2] for row in connection.execute(sql)] == [("one", "succeeded")]
    connection.close()
