"""Experts: the routed layers of a network on the compiled CPU kernels.

Owns what takes the place of experts and of the router that chooses among them. Knows them by what they hold, not by
family; each is used only where it gave the same on a sample. Invariant: a token's bits depend on that token alone. The
products sum every row in one order, however many rows an expert gets, and a token's experts are added by their rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvq.kernels.cpu import CpuKernels, Gate, GroupedLinear

_TOLERANCE = 1e-4  # of the largest element of a sample

# Logits [T, E] to the weights and the numbers of each token's experts, both [T, K] and by rank.
Choice = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class ExpertsModule(nn.Module):
    """Experts of two products: gates and what they gate in one, and the way back."""

    def __init__(self, kernels: CpuKernels, experts: Any) -> None:
        super().__init__()
        self._kernels = kernels
        self._activate = _activation(kernels, experts)
        self._gate_up = _packed(kernels, experts, "gate_up_proj", gated=self._activate is None)
        self._down = _packed(kernels, experts, "down_proj")
        self._bounds = torch.arange(experts.num_experts + 1)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows [T, D] through the experts of each, [T, K], whose answers are weighted and added -> [T, D]."""
        expert_of_row, order = top_k_index.flatten().sort(stable=True)
        starts = torch.searchsorted(expert_of_row, self._bounds)
        rows = self._gate_up(hidden_states[order // top_k_index.shape[1]], starts)
        if self._activate is not None:
            rows = self._activate(rows)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        answers = self._down(rows, starts)
        return self._kernels.weighted_rows(answers, places.view_as(top_k_index), top_k_weights.contiguous())

    @classmethod
    def of(cls, kernels: CpuKernels, experts: Any) -> ExpertsModule | None:
        """In the place of ``experts``; None: they are none, or of another kind."""
        if not getattr(experts, "has_gate", False) or experts.has_post_expert_norm:
            return None
        found, last = cls(kernels, experts), experts.num_experts - 1
        chosen, weights = torch.tensor([[0, last], [last, 0]]), torch.tensor([[0.3, 0.7], [0.6, 0.4]])
        call = _sample(2, found._gate_up.in_features), chosen, weights
        return found if _agree(found(*call), experts(*call)) else None


class RouterModule(nn.Module):
    """A linear layer and what is chosen by its outputs."""

    def __init__(self, kernels: CpuKernels, router: Any, choose: Choice) -> None:
        super().__init__()
        self._linear = kernels.pack_linear(router.weight, getattr(router, "bias", None))
        self._choose = choose

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., D] -> logits [T, E], weights [T, K], experts [T, K]."""
        logits = self._linear(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return logits, *self._choose(logits)

    @classmethod
    def of(cls, kernels: CpuKernels, router: Any) -> RouterModule | None:
        """In the place of ``router``; None: it is none, or chooses in another way."""
        if not hasattr(router, "top_k") or getattr(router, "weight", torch.empty(0)).dim() != 2:
            return None
        x = _sample(8, router.weight.shape[1])
        x /= (x @ router.weight.T).abs().max().clamp(min=1)  # where one expert had all the weight, no way would differ
        try:
            logits, weights, experts = router(x)
            expected = _by_expert(logits, weights, experts)
        except (TypeError, ValueError, RuntimeError, IndexError):  # it takes or gives something else
            return None
        for choose in _choices(kernels, router):
            found = cls(kernels, router, choose)
            found_logits, *chosen = found(x)
            if _agree(found_logits, logits) and _agree(_by_expert(logits, *chosen), expected):
                return found
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupedSigmoid:
    """DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): the best of the best groups, by biased scores."""

    kernels: CpuKernels
    top_k: int
    bias: torch.Tensor  # of the scores that are compared, not of the weights
    num_groups: int
    num_kept: int
    is_normed: bool
    factor: float

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.kernels.gate(logits, Gate.SIGMOID)
        groups = (scores + self.bias).view(len(logits), self.num_groups, -1)
        kept = groups.topk(2, dim=-1).values.sum(-1).topk(self.num_kept, dim=-1).indices
        dropped = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, kept, value=False)
        chosen = groups.masked_fill(dropped[..., None], -torch.inf).flatten(1).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.is_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, chosen


def _choices(kernels: CpuKernels, router: Any) -> Iterator[Choice]:
    """The ways of choosing that ``router`` may have."""
    top_k = router.top_k
    if hasattr(router, "e_score_correction_bias") and hasattr(router, "num_group"):
        yield _GroupedSigmoid(
            kernels=kernels,
            top_k=top_k,
            bias=router.e_score_correction_bias.detach(),
            num_groups=router.num_group,
            num_kept=router.topk_group,
            is_normed=router.norm_topk_prob,
            factor=router.routed_scaling_factor,
        )

    def softmax_of_all(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = logits.softmax(-1).topk(top_k, dim=-1)
        return weights, chosen

    def softmax_of_chosen(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as the weights over their sum."""
        best, chosen = logits.topk(top_k, dim=-1)
        return best.softmax(-1), chosen

    yield softmax_of_all
    yield softmax_of_chosen


def _activation(kernels: CpuKernels, experts: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """From gates, and then what they gate, to what they let through; None: the product does it."""
    if hasattr(experts, "alpha"):  # gpt-oss
        alpha, limit = float(experts.alpha), float(experts.limit)

        def clamped(rows: torch.Tensor) -> torch.Tensor:
            gates, gated = rows.chunk(2, dim=-1)
            passed = kernels.gate(gates.clamp(max=limit) * alpha, Gate.SILU) / alpha
            return (gated.clamp(-limit, limit) + 1) * passed

        return clamped
    act_fn: Callable[[torch.Tensor], torch.Tensor] = experts.act_fn

    def plain(rows: torch.Tensor) -> torch.Tensor:
        gates, gated = rows.chunk(2, dim=-1)
        return act_fn(gates) * gated

    num_gates = experts.down_proj.shape[1 if experts.is_transposed else 2]
    return None if getattr(act_fn, "gate", None) is Gate.SILU and kernels.can_gate(num_gates) else plain


def _packed(kernels: CpuKernels, experts: Any, name: str, *, gated: bool = False) -> GroupedLinear:
    """One of the experts' products; the first with the gates first."""
    biases = getattr(experts, f"{name}_bias") if experts.has_bias else None
    mixed = name == "gate_up_proj" and not experts.is_concatenated
    layers = []
    for i, weight in enumerate(getattr(experts, name)):
        parts = [weight.T if experts.is_transposed else weight, None if biases is None else biases[i]]
        if mixed:
            parts = [None if part is None else torch.cat([part[::2], part[1::2]]) for part in parts]
        layers.append(kernels.pack_linear(*parts, gated=gated))
    return kernels.group_linear(layers)


def _sample(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))


def _by_expert(logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Weights [T, E], whatever the order of a token's experts."""
    return torch.zeros_like(logits).scatter(1, experts, weights)


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
