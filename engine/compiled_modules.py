"""Compiled modules: parts of a network on the compiled CPU kernels, where it is not fused as a whole.

Owns what takes the place of linear layers, norms, activations and rotary embeddings, and the walk through the network
(experts: experts.py). Knows a family only by the name of its layers. Invariant: each gives what the module gave that it
stands for, and a row's bits depend on that row alone. What is left to PyTorch in the families of ``EXACT`` has that
property too (sums over a row, exact arithmetic, lookups).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvq.engine.experts import ExpertsModule, RouterModule
from kvq.engine.rotary import RotaryTable
from kvq.kernels.cpu import CpuKernels, Gate

# Layers in which nothing but these modules and such arithmetic computes; a trial at load confirms it.
EXACT = frozenset(
    {
        "DeepseekV3DecoderLayer",
        "GemmaDecoderLayer",
        "Gemma2DecoderLayer",
        "Gemma3DecoderLayer",
        "GPT2Block",
        "GPTNeoXLayer",
        "GptOssDecoderLayer",
        "GraniteDecoderLayer",
        "GraniteMoeDecoderLayer",
        "MixtralDecoderLayer",
        "Olmo2DecoderLayer",
        "Phi3DecoderLayer",
        "Qwen3MoeDecoderLayer",
        "SmolLM3DecoderLayer",
        "StableLmDecoderLayer",
    }
)
# torch's own differ in the last bits between the elements of a vector and those that are left over at the end.
_GATES = {
    "SiLUActivation": Gate.SILU,
    "SiLU": Gate.SILU,
    "GELUTanh": Gate.GELU_TANH,
    "NewGELUActivation": Gate.GELU_TANH,
    "QuickGELUActivation": Gate.GELU_QUICK,
}


class PackedModule(nn.Module):
    """A linear layer: ``weight`` [N, K]."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed = kernels.pack_linear(weight, bias)
        self.weight = weight.detach().to("meta")  # Hunyuan's router asks for its type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        return self._packed(rows).view(*x.shape[:-1], self._packed.out_features)


class NormModule(nn.Module):
    """RMSNorm by ``weight``."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._kernels = kernels
        self._weight = weight.detach().float().contiguous()
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.rms_norm(rows, self._weight, self._eps).view(x.shape)

    @classmethod
    def of(cls, kernels: CpuKernels, norm: Any) -> NormModule | None:
        """In the place of ``norm``, whose weight is a factor or (Gemma's) a factor less one; None: it is neither."""
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if eps is None or norm.weight.dim() != 1:
            return None
        x = torch.linspace(-2, 3, 2 * len(norm.weight)).view(2, -1)
        for weight in (norm.weight, 1 + norm.weight):
            found = cls(kernels, weight, float(eps))
            if torch.allclose(found(x), norm(x), rtol=1e-4, atol=1e-5):
                return found
        return None


class GateModule(nn.Module):
    """An activation that is its input times a sigmoid."""

    def __init__(self, kernels: CpuKernels, gate: Gate) -> None:
        super().__init__()
        self._kernels = kernels
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return self._kernels.gate(x.contiguous(), self.gate)


class RotaryModule(nn.Module):
    """A rotary embedding as a table by position, one for each type of layer that it tells apart."""

    def __init__(self, module: nn.Module, longest: int | None) -> None:
        super().__init__()
        self._module = module
        self._longest = longest
        self._tables: dict[str | None, RotaryTable] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """Cosines and sines [1, T, D] of position_ids [1, T]; what is something else (DeepSeek-V2's) as it comes."""
        if layer_type not in self._tables:
            of_type = {} if layer_type is None else {"layer_type": layer_type}
            if not isinstance(found := self._module(x, position_ids, **of_type), tuple):
                return found
            self._tables[layer_type] = RotaryTable(self._module, longest=self._longest, layer_type=layer_type)
        cos, sin = self._tables[layer_type].rows(position_ids[0])
        return cos[None].to(x.dtype), sin[None].to(x.dtype)


@torch.inference_mode()
def compile_modules(network: nn.Module, kernels: CpuKernels, *, longest: int | None) -> int:
    """Swap them in; the bytes of the packed weights. ``longest``: positions that the model is offered at."""
    num_bytes = 0
    for name, child in list(network.named_children()):
        num_bytes += compile_modules(child, kernels, longest=longest)  # experts' activation is ours before they are
        if (compiled := _compiled(child, kernels, longest)) is not None:
            if isinstance(compiled, PackedModule | RouterModule | ExpertsModule):
                num_bytes += torch.float32.itemsize * sum(p.numel() for p in child.parameters())
            setattr(network, name, compiled)
    return num_bytes


def _compiled(module: Any, kernels: CpuKernels, longest: int | None) -> nn.Module | None:
    """What takes the place of ``module``, if anything does."""
    kind = type(module).__name__
    if type(module) is nn.Linear:
        return PackedModule(kernels, module.weight, module.bias)
    if kind == "Conv1D":
        return PackedModule(kernels, module.weight.T, module.bias)  # GPT-2's is [K, N]
    if kind.endswith("RMSNorm"):
        return NormModule.of(kernels, module)
    if kind in _GATES:
        return GateModule(kernels, _GATES[kind])
    if kind.endswith("RotaryEmbedding"):
        return RotaryModule(module, longest)
    return ExpertsModule.of(kernels, module) or RouterModule.of(kernels, module)
