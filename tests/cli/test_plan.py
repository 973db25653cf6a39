"""``kvq plan``: what it says of a file is what the file holds, and what a run of it would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvq.worker.store import Store
from tests.cli.conftest import Kvq, Ran
from tests.factories import claim_all, new_batch, new_job, new_worker, outcome_of

WORKLOADS = Path(__file__).parents[2] / "bench" / "workloads"
HEAD = "You sort letters from customers into one of five kinds and answer with the name of the kind alone. " * 6


@pytest.fixture
def plan(kvq: Kvq, tiny_model_folder: Path) -> Any:
    """Plan a file of these rows (or an existing file) and give back the document and what was run."""

    def run(rows: list[dict[str, Any]] | Path, *args: object) -> tuple[dict[str, Any], Ran]:
        path = Path("jobs.jsonl")
        if isinstance(rows, Path):
            path = rows
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        given = ("plan", path, "--model", tiny_model_folder, "--served-model-name", "SmolLM2-135M-Instruct", *args)
        ran = kvq(*given, "--json")
        assert ran.out, ran.err
        return json.loads(ran.out), kvq(*given)

    return run


def chat(system: str, user: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, "max_tokens": 8, **options}


@pytest.mark.parametrize(
    ("workload", "total", "distinct"), [("W1q", 92_623, 9_219), ("W2q", 64_831, 6_293)]
)  # fmt: skip
def test_the_distinct_tokens_of_known_files_are_counted_exactly(
    plan: Any, workload: str, total: int, distinct: int
) -> None:
    document, ran = plan(WORKLOADS / f"{workload}.jsonl")
    assert ran.code == 0
    sharing = document["sharing"]
    assert (sharing["total_tokens"], sharing["distinct_tokens"]) == (total, distinct)
    assert sharing["shared_tokens"] == total - distinct
    assert f"{distinct:,}" in ran.out


def test_the_groups_of_a_file_are_its_documents(plan: Any) -> None:
    document, _ = plan(WORKLOADS / "W2q.jsonl")
    assert [group["num_rows"] for group in document["sharing"]["groups"]] == [12] * 6 + [72]
    assert document["sharing"]["breaks"] == []


def test_a_timestamp_in_the_middle_is_named_with_its_place_and_its_price(plan: Any) -> None:
    rows = [chat(f"Be brief. It is {i // 60:02}:{i % 60:02} now. {HEAD}", f"letter {i}") for i in range(0, 720, 24)]
    document, ran = plan(rows)
    (broken,) = document["sharing"]["breaks"]
    assert broken["num_rows"] == broken["num_variants"] == len(rows)
    assert broken["split"]["field"] == "messages[0] (system)"
    assert 17 <= broken["split"]["character"] <= 18  # "Be brief. It is " has 16 characters, and the hours begin 0 or 1
    assert broken["split"]["before"].startswith("Be brief. It is ")
    assert broken["lost_tokens"] > 0.7 * document["sharing"]["total_tokens"]
    assert "what keeps rows from sharing more" in ran.out
    moved, _ = plan([chat(HEAD, f"letter {i}, at {i // 60:02}:{i % 60:02}") for i in range(0, 720, 24)])
    assert moved["sharing"]["breaks"] == []
    gained = document["sharing"]["distinct_tokens"] - moved["sharing"]["distinct_tokens"]
    assert broken["lost_tokens"] == pytest.approx(gained, rel=0.15)


def test_equal_prompts_are_counted(plan: Any) -> None:
    document, ran = plan([chat("a", "b")] * 3 + [chat("a", "c")])
    assert document["sharing"]["num_repeats"] == 2
    assert "their prompts are equal" in ran.out


def test_every_row_that_will_fail_is_listed_with_its_reason(plan: Any, kvq: Kvq, tiny_model_folder: Path) -> None:
    rows = [
        {"prompt": "fine", "max_tokens": 2},
        {"prompt": "x " * 3000},
        {"prompt": "x", "strem": True},
        {"prompt": [1, 2, 10_000_000]},
        {
            "prompt": "x",
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 7}}},
        },
        {"prompt": "x", "model": "another"},
        {"prompt": "x", "logit_bias": {"10000000": 1}},
    ]
    document, ran = plan(rows)
    assert ran.code == 3
    assert [row["line_no"] for row in document["bad"]] == [2, 3, 4, 5, 6, 7]
    codes = [row["code"] for row in document["bad"]]
    assert codes == [
        "context_length_exceeded",
        "unknown_field",
        "invalid_value",
        "invalid_value",
        "model_not_found",
        "invalid_value",
    ]
    # The promise: a run with these settings fails the same rows.
    names = ("--model", tiny_model_folder, "--served-model-name", "SmolLM2-135M-Instruct")
    run = kvq("run", "jobs.jsonl", "--skip-invalid", *names, "--kv-cache-memory", "64MiB")
    assert run.code == 3, run.err
    with Store.open("kvq.db") as store:
        (batch,) = store.list_batches()
        failed = {r.line_no: r.error for r in store.iter_results(batch.batch_id) if r.error is not None}
    assert {line: error.code for line, error in failed.items()} == dict(zip([2, 3, 4, 5, 6, 7], codes, strict=True))
    assert [error.message for error in failed.values()] == [row["message"] for row in document["bad"]]


def test_a_file_of_bad_rows_alone_is_still_reported(plan: Any) -> None:
    document, ran = plan([{"prompt": ""}])
    assert ran.code == 3
    assert (document["advice"], document["time"]) == (None, None)
    assert "0 can run, 1 will fail" in ran.out


def test_the_suggested_settings_fit_the_rows_and_the_memory(plan: Any) -> None:
    document, ran = plan([chat(HEAD, f"letter {i}", max_tokens=40) for i in range(20)], "--kv-cache-memory", "1MiB")
    memory, advice = document["memory"], document["advice"]
    assert memory["bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert memory["num_tokens"] == (1 << 20) // memory["bytes_per_token"]
    assert advice["max_model_len"] == -(-(document["longest_prompt"] + 40) // 16) * 16
    assert 1 <= advice["num_full_sequences"] < advice["max_num_seqs"] <= 20
    assert f"--max-model-len {advice['max_model_len']}" in ran.out
    assert "the longest row needs" in ran.out


def test_rows_without_max_tokens_keep_the_models_own_length(plan: Any) -> None:
    document, ran = plan([{"prompt": "x"}])
    assert document["num_open_ended"] == 1
    assert document["advice"]["max_model_len"] == 2048
    assert "1 row sets no max_tokens" in ran.out


def test_a_gpu_is_planned_for_without_having_one(plan: Any) -> None:
    document, _ = plan([{"prompt": "x"}], "--memory", "10GB", "--weights", "2GB", "--gpu-memory-utilization", "0.8")
    memory = document["memory"]
    assert (memory["on_gpu"], memory["dtype"]) == (True, "bfloat16")
    logits = 128 * 16 * 49_152
    assert memory["kv_bytes"] == 8 * 10**9 - 2 * 10**9 - 5 * 10**8 - logits


def test_weights_in_int8_are_counted_as_such_where_the_engine_takes_them(plan: Any) -> None:
    cpu = ("--device", "cpu", "--memory", "1GiB")
    whole, _ = plan([{"prompt": "x"}], *cpu)
    small, ran = plan([{"prompt": "x"}], *cpu, "--quantization", "int8")
    attention, mlp, norms = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 128, 2 * 64
    saved = whole["memory"]["weight_bytes"] - small["memory"]["weight_bytes"]
    assert saved == 2 * (attention + mlp + norms) * (4 - 1)
    assert small["memory"]["problem"] is None, ran.out
    assert "int8 in the layers, float32 besides" in ran.out
    for wrong, reason in (
        (("--dtype", "bfloat16"), "needs dtype float32"),
        (("--kv-cache-dtype", "int8"), "must be auto"),
    ):
        refused, _ = plan([{"prompt": "x"}], *cpu, "--quantization", "int8", *wrong)
        assert reason in refused["memory"]["problem"]
    gpu, _ = plan([{"prompt": "x"}], "--memory", "80GB", "--quantization", "int8")
    assert "leave it out for a GPU" in gpu["memory"]["problem"]


def test_settings_with_which_the_engine_would_not_start_are_told_with_what_would_do(plan: Any) -> None:
    document, ran = plan([{"prompt": "x"}], "--kv-cache-memory", "100000", "--max-model-len", 2048)
    assert "set max_model_len to" in document["memory"]["problem"]
    assert "the engine would not start" in ran.out


def test_a_gpu_of_unknown_memory_is_refused(kvq: Kvq, tiny_model_folder: Path) -> None:
    Path("jobs.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    ran = kvq("plan", "jobs.jsonl", "--model", tiny_model_folder, "--device", "cuda")
    assert ran.code == 2
    assert "--memory 80GiB" in ran.err


def test_earlier_batches_of_the_model_tell_the_time(plan: Any, store: Store, store_url: str) -> None:
    new_batch(store, [new_job(i) for i in range(4)])
    worker_id = new_worker(store)
    jobs = claim_all(store, worker_id)
    store.finish(worker_id, [outcome_of(job, model="SmolLM2-135M-Instruct") for job in jobs])
    document, ran = plan([{"prompt": "x", "max_tokens": 4}], "--db", store_url)
    assert document["time"]["num_batches"] == 1
    assert document["time"]["seconds"] > 0
    assert "1 earlier batch of this model" in ran.out


def test_without_history_no_time_is_told_and_no_database_is_made(plan: Any) -> None:
    document, _ = plan([{"prompt": "x"}])
    assert document["time"] is None
    assert not Path("kvq.db").exists()
