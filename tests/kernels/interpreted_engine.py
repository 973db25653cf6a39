"""The whole engine on the Triton kernels against itself on the reference. Run by ``test_interpreted.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvq import LLM, SamplingParams
from kvq.engine import prefix_groups
from kvq.engine.request import RequestOutput
from kvq.kernels import ops
from tests.models import tiny_llama_config, write_model

PROMPTS = [[*range(3, 35), 40 + i] for i in range(4)] + [[9, 8, 7]]
PARAMS = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=2 if i == 1 else 1) for i in range(4)]
PARAMS.append(SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=3, ignore_eos=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tiny_llama_config(num_hidden_layers=1))


def _tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}], ids=str)
def test_the_engine_answers_alike_and_reads_shared_prefixes_once(
    folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(False)  # the network has operations without a deterministic form
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    arguments = {"device": "cpu", "kv_cache_memory": 16 << 20, "max_model_len": 64, **settings}
    expected = _tokens(LLM(str(folder), **arguments).generate(PROMPTS, PARAMS))
    monkeypatch.setattr(ops, "runs_triton_on", lambda device: True)
    monkeypatch.setattr(prefix_groups, "grouping_pays", lambda **group: True)
    llm = LLM(str(folder), **arguments)
    assert _tokens(llm.generate(PROMPTS, PARAMS)) == expected
    assert llm.stats().grouped_decode_steps == llm.stats().steps - 1 == 2
