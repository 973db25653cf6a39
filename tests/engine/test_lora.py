"""LoRA: rows of several adapters in one batch get PEFT's own answers; bad adapters are refused by name and field."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvq import LLM, LoRARequest, SamplingParams
from kvq.engine.errors import AdapterError, ConfigError, InvalidParameter
from tests.engine.adapters import ALL_LINEARS, adapted_answers, write_adapter
from tests.models import DEMO_MODEL, FAMILY_SIZES, demo_network, demo_tokenizer, tiny_llama_config, write_model

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
_PROMPTS = [[11, 12, 13], [*range(20, 57)], [*range(20, 70)], [7] * 16]


@dataclass(frozen=True)
class Adapted:
    """A model, three adapters of it, and the answers to some prompts by each and by the base model."""

    folder: Path
    paths: dict[str, Path]
    names: list[str | None]
    prompts: list[list[int]]
    expected: list[tuple[int, ...]]

    def llm(self, **settings: Any) -> LLM:
        modules = tuple(f"{name}={path}" for name, path in self.paths.items())
        return LLM(str(self.folder), kv_cache_memory=32 << 20, lora_modules=modules, **settings)

    def requests(self) -> list[LoRARequest | None]:
        return [None if n is None else LoRARequest(n, 1, str(self.paths[n])) for n in self.names]


def _adapted(root: Path, network: Any, folder: Path) -> Adapted:
    paths = {
        "narrow": write_adapter(network, root / "narrow", seed=1),
        "wide": write_adapter(
            network, root / "wide", seed=2, std=0.1, r=8, lora_alpha=16, use_rslora=True, target_modules=ALL_LINEARS
        ),
        "mixed": write_adapter(
            network,
            root / "mixed",
            seed=3,
            r=3,
            target_modules=["k_proj", "up_proj", "down_proj"],
            rank_pattern={"up_proj": 5},
            alpha_pattern={"down_proj": 2},
        ),
    }
    names = [name for _ in _PROMPTS for name in ("narrow", "wide", None, "mixed")]
    prompts = [prompt for prompt in _PROMPTS for _ in range(4)]
    folders = [None if name is None else paths[name] for name in names]
    return Adapted(
        folder=folder,
        paths=paths,
        names=names,
        prompts=prompts,
        expected=adapted_answers(network, folders, prompts, NUM_TOKENS),
    )


def _tiny(root: Path, config: Any) -> Adapted:
    folder = write_model(root / "model", config)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return _adapted(root, network, folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return _tiny(tmp_path_factory.mktemp("llama"), tiny_llama_config())


def _token_ids(llm: LLM, adapted: Adapted) -> list[tuple[int, ...]]:
    outputs = llm.generate(adapted.prompts, GREEDY, lora_request=adapted.requests())
    llm.engine.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def test_the_adapters_of_these_tests_change_the_answers(llama: Adapted) -> None:
    assert all(len(set(llama.expected[i : i + 4])) == 4 for i in range(0, len(llama.expected), 4))


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"max_loras": 1}, {"max_loras": 2, "max_cpu_loras": 2}],
    ids=["together", "chunked", "one-adapter-a-step", "adapters-read-again"],
)
def test_rows_of_three_adapters_and_the_base_in_one_batch(llama: Adapted, settings: dict[str, int]) -> None:
    llm = llama.llm(**settings)
    assert _token_ids(llm, llama) == llama.expected
    assert _token_ids(llm, llama) == llama.expected  # from the cache, which must not mix them up


def test_with_the_plain_pytorch_kernels(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    assert _token_ids(llama.llm(), llama) == llama.expected


@pytest.mark.parametrize("family", ["Qwen2Config", "Qwen3Config", "Olmo2Config"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Biases on q, k and v; norms of heads; modules that the fused layers do not know."""
    config = getattr(transformers, family)(**{**FAMILY_SIZES, "vocab_size": len(demo_tokenizer())})
    adapted = _tiny(tmp_path, config)
    assert _token_ids(adapted.llm(), adapted) == adapted.expected


def test_the_real_demo_model(tmp_path: Path) -> None:
    assert DEMO_MODEL is not None
    llm = LLM(DEMO_MODEL, max_model_len=512, enable_lora=True)
    network = demo_network()
    path = write_adapter(network, tmp_path, seed=5, std=0.08, r=16, target_modules=ALL_LINEARS)
    prompts = [demo_tokenizer()("The capital of France is")["input_ids"]] * 2
    expected = adapted_answers(network, [path, None], prompts, 6)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(prompts, params, lora_request=[LoRARequest("french", 1, str(path)), None])
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert expected[0] != expected[1]


def test_a_row_has_the_same_logprobs_alone_and_among_others(llama: Adapted) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    together = llama.llm().generate(llama.prompts, params, lora_request=llama.requests())
    llm = llama.llm(enable_prefix_caching=False)
    for prompt, request, output in zip(llama.prompts, llama.requests(), together, strict=True):
        (alone,) = llm.generate([prompt], params, lora_request=request)
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_equal_tokens_under_another_adapter_share_nothing(llama: Adapted) -> None:
    llm = llama.llm()
    prompt = [*range(20, 84)]
    for name in (None, "narrow", "wide", None, "narrow"):
        request = None if name is None else LoRARequest(name, 1, str(llama.paths[name]))
        (output,) = llm.generate([prompt], GREEDY, lora_request=request)
        seen_before = name in ("narrow", None) and llm.stats().prompt_tokens > 3 * len(prompt)
        assert (output.metrics.cached_tokens > 0) is seen_before


def test_equal_requests_in_flight_are_computed_for_each_adapter(llama: Adapted) -> None:
    llm = llama.llm()
    requests = [None, *(LoRARequest(name, 1, str(llama.paths[name])) for name in ("narrow", "wide", "narrow"))]
    outputs = llm.generate([_PROMPTS[0]] * 4, GREEDY, lora_request=requests)
    assert [output.served_from is None for output in outputs] == [True, True, True, False]


def test_an_adapter_in_use_too_long_is_put_out_and_read_again(llama: Adapted) -> None:
    llm = llama.llm(max_loras=1, max_cpu_loras=2)
    adapters = llm.engine._adapters
    assert adapters is not None
    assert adapters.held == ("wide", "mixed")
    _ = llm.generate([_PROMPTS[0]], GREEDY, lora_request=LoRARequest("narrow", 1, str(llama.paths["narrow"])))
    assert (adapters.held, adapters.active) == (("mixed", "narrow"), ("narrow",))


def test_an_unknown_adapter_and_one_without_the_setting_are_refused(llama: Adapted) -> None:
    with pytest.raises(InvalidParameter, match="there is no adapter 'nope'"):
        llama.llm().engine.add_request("a", [1, 2], GREEDY, lora="nope")
    llm = LLM(str(llama.folder), kv_cache_memory=32 << 20)
    with pytest.raises(ConfigError, match="enable_lora: is off"):
        llm.generate([[1]], GREEDY, lora_request=LoRARequest("narrow", 1, str(llama.paths["narrow"])))


def _config_of(change: dict[str, Any]) -> Any:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    return spoil


def _tensors_of(change: Any) -> Any:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return spoil


def _renamed(old: str, new: str) -> Any:
    return _tensors_of(lambda tensors: {key.replace(old, new): tensor for key, tensor in tensors.items()})


def _as_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save({}, folder / "adapter_model.bin")


BAD: dict[str, tuple[Any, str]] = {
    "dora": (_config_of({"use_dora": True}), "use_dora: is True"),
    "bias": (_config_of({"bias": "lora_only"}), "bias: must be none"),
    "lora-bias": (_config_of({"lora_bias": True}), "lora_bias: is True"),
    "modules-to-save": (_config_of({"modules_to_save": ["lm_head"]}), "modules_to_save: is"),
    "not-lora": (_config_of({"peft_type": "IA3"}), "peft_type: must be LORA, got 'IA3'"),
    "pissa": (_config_of({"init_lora_weights": "pissa"}), "init_lora_weights: 'pissa' changes"),
    "unheard-of": (_config_of({"use_newest_idea": True}), "use_newest_idea: is True"),
    "rank-is-text": (_config_of({"r": "4"}), "r: must be a positive integer, got '4'"),
    "rank-differs": (_config_of({"r": 6}), "lora_. is .* was trained for another model"),
    "rank-too-high": (_config_of({"r": 65}), "r: is 65 .* max_lora_rank is 64"),
    "bad-pattern": (_config_of({"rank_pattern": {"(": 4}}), "rank_pattern: '\\(' is not a regular expression"),
    "no-json": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json is not JSON"),
    "no-config": (lambda folder: (folder / "adapter_config.json").unlink(), "cannot read .*adapter_config.json"),
    "no-weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "pickle": (_as_pickle, "adapter_model.bin is a pickle, save it as safetensors"),
    "garbage": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99),
        "adapter_model.safetensors cannot be read",
    ),
    "no-folder": (shutil.rmtree, "there is no folder"),
    "half": (
        _tensors_of(lambda tensors: {k: t for k, t in tensors.items() if "lora_A" in k}),
        "has only one of lora_A and lora_B",
    ),
    "nan": (_tensors_of(lambda tensors: {k: t * float("nan") for k, t in tensors.items()}), "not finite"),
    "embeddings": (_renamed("lora_A.weight", "lora_embedding_A"), "adapters of embeddings are not supported"),
    "magnitude": (_renamed("lora_A.weight", "lora_magnitude_vector"), "DoRA is not supported"),
    "head": (_renamed("model.layers.0.self_attn.q_proj", "lm_head"), "target_modules: lm_head is not a linear layer"),
    "other-layer": (_renamed("layers.1.", "layers.7."), "target_modules: model.layers.7"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_adapter_is_refused_by_name_and_field(fault: str, llama: Adapted, tmp_path: Path) -> None:
    spoil, message = BAD[fault]
    folder = shutil.copytree(llama.paths["narrow"], tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(AdapterError, match=f"adapter 'spoilt': .*{message}"):
        _LOADED.setdefault("llm", llama.llm()).engine.add_lora(LoRARequest("spoilt", 1, str(folder)))


_LOADED: dict[str, LLM] = {}


@pytest.mark.parametrize("entry", ["", "name", "name=", "=path"])
def test_an_entry_that_is_not_name_and_path_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules: must be NAME=PATH"):
        LLM("any", lora_modules=(entry,))


def test_experts_cannot_be_adapted(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **{**FAMILY_SIZES, "vocab_size": len(demo_tokenizer())},
    )
    folder = write_model(tmp_path / "model", config)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapter = write_adapter(network, tmp_path / "adapter", seed=1, target_modules=["q_proj", "o_proj"])
    prompts = [_PROMPTS[1], _PROMPTS[3]]
    expected = adapted_answers(network, [adapter, None], prompts, NUM_TOKENS)
    llm = LLM(str(folder), kv_cache_memory=32 << 20, lora_modules=(f"moe={adapter}",))
    outputs = llm.generate(prompts, GREEDY, lora_request=[LoRARequest("moe", 1, str(adapter)), None])
    assert [output.outputs[0].token_ids for output in outputs] == expected
    _renamed("self_attn.q_proj", "mlp.experts.gate_up_proj")(adapter)
    with pytest.raises(AdapterError, match=r"target_modules: .*experts"):
        llm.engine.add_lora(LoRARequest("experts", 2, str(shutil.copytree(adapter, tmp_path / "experts"))))
