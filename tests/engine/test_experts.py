"""Routers and experts on the compiled kernels: they stand for the network's own, told by what those hold."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformers

from kvq.engine.compiled_modules import compile_modules
from kvq.engine.experts import ExpertsModule, RouterModule
from kvq.kernels.cpu import CpuKernels
from tests.models import FAMILY_SIZES, LATENT

_SIZES: dict[str, Any] = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3}
_LATENT = {**LATENT, "n_routed_experts": 8}
# 96: gates and what they gate in one product; 100: not a multiple of what a vector register holds.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "weights over their sum": ("MixtralConfig", {"intermediate_size": 96}),
    "not a multiple": ("MixtralConfig", {"intermediate_size": 100}),
    "another activation": ("MixtralConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "an activation that is not ours": ("MixtralConfig", {"hidden_act": "relu"}),
    "weights as they are": ("Qwen3MoeConfig", {"moe_intermediate_size": 48}),
    "weights of the chosen": ("GraniteMoeConfig", {}),
    "biases, mixed gates, limits": ("GptOssConfig", {"swiglu_limit": 1.5}),
    "grouped": ("DeepseekV3Config", _LATENT),
    "grouped, weights as they are": ("DeepseekV3Config", {**_LATENT, "norm_topk_prob": False}),
}


def _network(family: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, family)(**{**FAMILY_SIZES, "vocab_size": 64, **_SIZES, **sizes})
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for tensor in (*network.parameters(), *(b for n, b in network.named_buffers() if "correction_bias" in n)):
        torch.nn.init.normal_(tensor, std=0.3)
    return network


def _routed(network: Any) -> Any:
    """The last layer's experts and what is around them."""
    layer = network.model.layers[-1]
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_routed_layers_give_what_the_networks_own_give_and_no_row_depends_on_the_others(case: str) -> None:
    network = _network(*CASES[case])
    x = torch.randn(1, 67, 64)
    block = _routed(network)

    def routed(x: torch.Tensor) -> torch.Tensor:
        answer = block(x)
        return answer[0] if isinstance(answer, tuple) else answer  # gpt-oss has the router's weights beside it

    expected = routed(x)
    compile_modules(network, CpuKernels(block_size=16, head_dim=16), longest=None)
    kinds = [type(module) for module in block.children()]
    assert kinds.count(ExpertsModule) == kinds.count(RouterModule) == 1
    found = routed(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for part in (slice(0, 1), slice(1, 4), slice(4, 67)):
        assert torch.equal(routed(x[:, part]), found[:, part])


@torch.inference_mode()
def test_a_router_that_gives_one_expert_all_the_weight_is_not_taken_for_another() -> None:
    kernels = CpuKernels(block_size=16, head_dim=16)
    for normed in (True, False):
        router = _network("Qwen3MoeConfig", {"norm_topk_prob": normed}).model.layers[0].mlp.gate
        router.weight.mul_(100)
        compiled = RouterModule.of(kernels, router)
        assert compiled is not None
        x = torch.randn(9, 64) / 100
        torch.testing.assert_close(compiled(x)[1], router(x)[1])


@torch.inference_mode()
def test_what_is_of_another_kind_is_left_alone() -> None:
    kernels = CpuKernels(block_size=16, head_dim=16)
    layer = _network("MixtralConfig", {}).model.layers[0].mlp
    experts, router = layer.experts, layer.gate
    for module in (torch.nn.Linear(4, 4), layer):
        assert (ExpertsModule.of(kernels, module), RouterModule.of(kernels, module)) == (None, None)
    experts.forward = lambda x, chosen, weights: x * weights.sum(1, keepdim=True)
    assert ExpertsModule.of(kernels, experts) is None
    router.forward = lambda x: (x @ router.weight.T, *(x @ router.weight.T).topk(router.top_k))
    assert RouterModule.of(kernels, router) is None
    router.forward = lambda x: x @ router.weight.T
    assert RouterModule.of(kernels, router) is None
    router.forward = lambda x, token_ids: x
    assert RouterModule.of(kernels, router) is None


@torch.inference_mode()
def test_the_weights_of_experts_are_held_once() -> None:
    network = _network("MixtralConfig", {})
    held = [weakref.ref(parameter) for parameter in _routed(network).parameters()]
    assert len(held) == 3
    compile_modules(network, CpuKernels(block_size=16, head_dim=16), longest=None)
    assert not any(ref() for ref in held)
