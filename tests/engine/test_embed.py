"""Embeddings: pooled hidden states equal transformers' own, however the prompts are cut and batched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kvq import LLM, LoRARequest, PoolingParams, SamplingParams
from kvq.engine.errors import ConfigError, InvalidParameter, PromptTooLong, RequestError
from kvq.engine.request import EmbeddingRequestOutput
from tests.engine.adapters import write_adapter
from tests.models import DEMO_MODEL, demo_network, demo_tokenizer, tiny_llama_config, write_model

_PROMPTS = [[11, 12, 13], [*range(20, 57)], [*range(20, 70)], [7] * 16, [*range(20, 120)], [5]]


def _llm(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), kv_cache_memory=32 << 20, **settings)


def _vectors(outputs: list[EmbeddingRequestOutput]) -> np.ndarray:
    assert all(output.outputs.error is None for output in outputs)
    return np.array([output.outputs.embedding for output in outputs])


def _expected(network: torch.nn.Module, prompts: list[list[int]], pooling_type: str) -> np.ndarray:
    """Normalised; each prompt alone."""
    vectors = []
    with torch.inference_mode():
        for prompt in prompts:
            hidden = network.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            vectors.append(hidden[-1] if pooling_type == "last" else hidden.mean(dim=0))
    return torch.nn.functional.normalize(torch.stack(vectors), dim=1).numpy()


@pytest.fixture(scope="module")
def network(tiny: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_embeddings_are_the_models_hidden_states(tiny: Path, network: torch.nn.Module, pooling_type: str) -> None:
    llm = _llm(tiny, pooling_type=pooling_type.upper())
    for _ in range(2):  # the second time the cache holds the prompts
        np.testing.assert_allclose(_vectors(llm.embed(_PROMPTS)), _expected(network, _PROMPTS, pooling_type), atol=2e-6)
    llm.engine.check_integrity()
    assert (llm.stats().cached_prompt_tokens > 0) is (pooling_type == "last")


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_chunks_preemption_and_neighbours_change_no_bit(tiny: Path, pooling_type: str) -> None:
    settings = {"pooling_type": pooling_type, "max_model_len": 150, "enable_prefix_caching": False, "block_size": 4}
    whole = _vectors([_llm(tiny, **settings).embed([prompt])[0] for prompt in _PROMPTS])
    chunked = _llm(tiny, max_num_batched_tokens=8, max_num_seqs=8, **settings)
    assert (_vectors(chunked.embed(_PROMPTS)) == whole).all()
    small = _llm(tiny, num_gpu_blocks_override=40, max_num_batched_tokens=32, max_num_seqs=32, **settings)
    for number in range(6):
        small.engine.add_request(
            f"g{number}", [3, number], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        )
    assert (_vectors(small.embed(_PROMPTS)) == whole).all()
    assert small.stats().preemptions > 0


def test_the_plain_pytorch_path(tiny: Path, network: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    llm = _llm(tiny, pooling_type="mean", max_num_batched_tokens=16, max_num_seqs=8)
    np.testing.assert_allclose(_vectors(llm.embed(_PROMPTS)), _expected(network, _PROMPTS, "mean"), atol=2e-6)


def test_text_and_answers_beside_embeddings(tiny: Path, network: torch.nn.Module) -> None:
    llm = _llm(tiny)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (alone,) = llm.generate([_PROMPTS[1]], params)
    llm.engine.add_request("beside", _PROMPTS[1], params)
    answers = []
    outputs = llm._finish
    llm._finish = lambda ids, on_output: outputs(ids, answers.append)  # type: ignore[method-assign]
    (embedded,) = llm.embed("The capital of France")
    ids = demo_tokenizer()("The capital of France")["input_ids"]
    np.testing.assert_allclose(_vectors([embedded]), _expected(network, [ids], "last"), atol=2e-6)
    (beside,) = [output for output in answers if output.request_id == "beside"]
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert embedded.metrics.completion_tokens == 0


def test_an_adapter_has_embeddings_of_its_own(tiny: Path, network: torch.nn.Module, tmp_path: Path) -> None:
    path = write_adapter(network, tmp_path, seed=4)
    llm = _llm(tiny, enable_lora=True)
    adapted, base = llm.embed([_PROMPTS[1]] * 2, lora_request=[LoRARequest("a", 1, str(path)), None])
    np.testing.assert_allclose(_vectors([base]), _expected(network, [_PROMPTS[1]], "last"), atol=2e-6)
    assert np.abs(_vectors([adapted]) - _vectors([base])).max() > 0.01


def test_equal_prompts_in_flight_are_embedded_once_and_apart_from_answers(tiny: Path) -> None:
    llm = _llm(tiny)
    llm.engine.add_request("answer", _PROMPTS[0], SamplingParams(temperature=0, max_tokens=1))
    one, other = llm.embed([_PROMPTS[0]] * 2)
    assert one.outputs.embedding == other.outputs.embedding != ()
    assert llm.stats().deduplicated_requests == 1


def test_without_normalisation(tiny: Path) -> None:
    llm = _llm(tiny, normalize_embeddings=False)
    (raw,) = _vectors(llm.embed([_PROMPTS[0]]))
    (unit,) = _vectors(llm.embed([_PROMPTS[0]], pooling_params=PoolingParams(normalize=True)))
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-6)


def test_dimensions_are_for_models_trained_for_them(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="dimensions: is 8, but the model's embeddings have 64"):
        _llm(tiny).embed([_PROMPTS[0]], pooling_params=PoolingParams(dimensions=8))
    folder = write_model(tmp_path, tiny_llama_config(matryoshka_dimensions=[8, 16]))
    llm = _llm(folder)
    (whole,) = _vectors(llm.embed([_PROMPTS[0]]))
    (cut,) = _vectors(llm.embed([_PROMPTS[0]], pooling_params=PoolingParams(dimensions=8)))
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    for wrong in (9, 65):
        with pytest.raises(InvalidParameter, match=f"dimensions: is {wrong}"):
            llm.embed([_PROMPTS[0]], pooling_params=PoolingParams(dimensions=wrong))


def test_prompts_that_cannot_be_embedded_start_nothing(tiny: Path) -> None:
    llm = _llm(tiny, max_model_len=32)
    for prompts, error in (
        ([[1], []], RequestError),
        ([[1], [1] * 40], PromptTooLong),
        ([[1], [-1]], InvalidParameter),
    ):
        with pytest.raises(error):
            llm.embed(prompts)
    assert not llm.engine.has_unfinished_requests
    (cut,) = llm.embed([[1] * 40], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 31


@pytest.mark.parametrize(
    ("pooling", "modules", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ["Transformer", "Pooling"], "mean"),
        ({"pooling_mode_lasttoken": True}, ["Transformer", "Pooling", "Normalize"], "last"),
        ({"pooling_mode": "lasttoken"}, ["Transformer", "Pooling"], "last"),
        ({"pooling_mode_cls_token": True}, ["Transformer", "Pooling"], None),
        ({"pooling_mode_mean_tokens": True}, ["Transformer", "Pooling", "Dense"], None),
    ],
)
def test_the_models_own_configuration_is_the_default(
    tiny: Path, tmp_path: Path, pooling: dict[str, object], modules: list[str], expected: str | None
) -> None:
    from kvq.engine.config import EngineConfig
    from kvq.engine.pooling import Pooler

    kinds = [{"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(modules)]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    hf_config = tiny_llama_config()
    if expected is None:
        with pytest.raises(ConfigError, match=r"pooling_type: the model's .* set pooling_type"):
            Pooler.load(EngineConfig(model=str(tmp_path)), hf_config)
        expected = "mean"
        assert Pooler.load(EngineConfig(model=str(tmp_path), pooling_type="mean"), hf_config).type == "mean"
    else:
        assert Pooler.load(EngineConfig(model=str(tmp_path)), hf_config).type == expected


def test_the_real_demo_model() -> None:
    assert DEMO_MODEL is not None
    llm = LLM(DEMO_MODEL, max_model_len=512, pooling_type="mean")
    network = demo_network()
    prompts = [demo_tokenizer()(text)["input_ids"] for text in ("a cat sat on the mat", "stock markets fell", "a dog")]
    np.testing.assert_allclose(_vectors(llm.embed(prompts)), _expected(network, prompts, "mean"), atol=1e-5)
