"""``kvq run`` with LoRA adapters and embedding rows in one file: answers, names, sharing, reruns and the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.cli.conftest import Kvq
from tests.engine.adapters import adapted_answers, write_adapter
from tests.models import demo_tokenizer

PROMPT = "Once upon a time there was a river that rose in the night and a miller who had not slept. Then " * 2


@pytest.fixture(scope="module")
def adapters(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], list[str]]:
    """Two adapters of the tiny model, and the greedy answers of the base and of each to PROMPT."""
    root = tmp_path_factory.mktemp("adapters")
    network = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_folder, attn_implementation="eager")
    paths = {"tiny-one": write_adapter(network, root / "one", seed=1)}
    paths["two"] = write_adapter(network, root / "two", seed=2, r=2, target_modules=["o_proj", "down_proj"])
    ids = demo_tokenizer()(PROMPT)["input_ids"]
    found = adapted_answers(network, [None, *paths.values()], [ids] * 3, 6)
    return paths, [demo_tokenizer().decode(answer) for answer in found]


def _settings(tiny_model_folder: Path, paths: dict[str, Path]) -> list[object]:
    flags = [part for name, path in paths.items() for part in ("--lora-modules", f"{name}={path}")]
    return ["--model", tiny_model_folder, "--kv-cache-memory", "32MiB", "--device", "cpu", *flags]


def _row(custom_id: str, model: str | None, **fields: Any) -> str:
    row = {"id": custom_id, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    return json.dumps(row if model is None else {**row, "model": model})


def test_rows_choose_adapters_by_model_and_embeddings_run_beside_them(
    kvq: Kvq, tmp_path: Path, tiny_model_folder: Path, adapters: tuple[dict[str, Path], list[str]]
) -> None:
    paths, texts = adapters
    names = [None, "tiny-one", "two"]
    lines = [_row(f"{name}-{i}", name, prompt=PROMPT) for i in range(2) for name in names]
    lines += [json.dumps({"id": f"e-{name}", "input": [PROMPT, "a"], "model": name}) for name in names]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines))
    settings = _settings(tiny_model_folder, paths)
    ran = kvq("run", "jobs.jsonl", "--output", "out.jsonl", *settings)
    assert ran.code == 0, ran.err
    found = {
        row["custom_id"]: row["response"]["body"] for row in map(json.loads, Path("out.jsonl").read_text().splitlines())
    }
    for name, text in zip(names, texts, strict=True):
        for i in range(2):
            body = found[f"{name}-{i}"]
            assert (body["choices"][0]["text"], body["model"]) == (text, name or "tiny")
        assert found[f"e-{name}"]["model"] == (name or "tiny")
    vectors = [found[f"e-{name}"]["data"][0]["embedding"] for name in names]
    assert len({tuple(vector) for vector in vectors}) == 3
    assert all(len(vector) == 64 for vector in vectors)

    assert "2 embeddings" in kvq("results", "latest").out
    rows = [json.loads(line) for line in kvq("results", "latest", "--json").out.splitlines()]
    job_ids = {row["custom_id"]: row["job_id"] for row in rows}
    assert {row["custom_id"]: row["model"] for row in rows}["two-1"] == "two"
    for custom_id in ("two-0", "e-tiny-one"):
        again = kvq("rerun", job_ids[custom_id], *settings)
        assert (again.code, again.out[:6]) == (0, "same: "), again.out + again.err

    plan = kvq("plan", "jobs.jsonl", "--json", *settings)
    document = json.loads(plan.out)
    num_prompt = len(demo_tokenizer()(PROMPT)["input_ids"])
    assert document["bad"] == []
    assert document["sharing"]["distinct_tokens"] == 3 * (num_prompt + 1)
    assert document["sharing"]["total_tokens"] == 3 * (3 * num_prompt + 1)
    taken_whole = json.loads(kvq("plan", "jobs.jsonl", "--json", "--pooling-type", "mean", *settings).out)
    assert taken_whole["sharing"]["distinct_tokens"] == 3 * num_prompt + 3 * (num_prompt + 1)


def test_an_adapter_that_is_not_there_is_a_row_of_a_wrong_model(
    kvq: Kvq, tmp_path: Path, tiny_model_folder: Path, adapters: tuple[dict[str, Path], list[str]]
) -> None:
    """Also where its name contains the model's, which is enough without adapters."""
    (tmp_path / "jobs.jsonl").write_text("\n".join([_row("a", "tiny-three", prompt="x"), _row("b", "two", prompt="x")]))
    settings = _settings(tiny_model_folder, adapters[0])
    ran = kvq("run", "jobs.jsonl", "--skip-invalid", "--errors", "err.jsonl", *settings)
    assert ran.code == 3
    (error,) = map(json.loads, Path("err.jsonl").read_text().splitlines())
    assert (error["custom_id"], error["error"]["code"]) == ("a", "model_not_found")
    assert "adapters: tiny-one, two" in error["error"]["message"]


def test_a_bad_adapter_stops_the_command_with_its_name_and_field(
    kvq: Kvq, tmp_path: Path, tiny_model_folder: Path, adapters: tuple[dict[str, Path], list[str]]
) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    (tmp_path / "jobs.jsonl").write_text(_row("a", None, prompt="x"))
    ran = kvq("run", "jobs.jsonl", *_settings(tiny_model_folder, {"mine": folder}))
    assert (ran.code, "lora_modules: adapter 'mine': use_dora: is True" in ran.err) == (2, True), ran.err
