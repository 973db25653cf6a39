"""LoRA adapters: low-rank deltas added to the linear layers of one network, row by row.

Owns the adapters a model may be asked for, which of them are in memory, and the addition. Knows rows, not requests.
Invariants: a row gets its own adapter's delta and no other; with the compiled kernels a row's bits do not depend on
its neighbours; at most ``max_loras`` adapters are ready to compute and ``max_cpu_loras`` held as read, the least
recently used go first.
Source: LoRA, arXiv 2106.09685, section 4.1; many adapters in one batch as in S-LoRA, arXiv 2311.03285, section 5.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from kvq.engine.errors import AdapterError
from kvq.engine.lora_files import WEIGHTS_FILE, LinearShape, LoraPair, read_adapter

AdapterRows = Sequence[tuple[str, torch.Tensor]]


class Product(Protocol):
    """``x W^T`` for rows x, as the backend computes it."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None, *, accumulate: bool = False) -> torch.Tensor:
        """x [M, K] -> [M, N]; with ``accumulate`` added to ``out``."""


class PlainProduct:
    """The same by PyTorch."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None, *, accumulate: bool = False) -> torch.Tensor:
        """As Product."""
        y = nn.functional.linear(x, self._weight)
        if out is None:
            return y
        return out.add_(y) if accumulate else out.copy_(y)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    a: Product
    b: Product


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where an adapter was read from; a file that changes under a running engine would change answers midway."""

    folder: Path
    stamp: tuple[int, int]  # size, time of change


class StepAdapters:
    """The adapters of one step's rows. ``parts``: deltas by module, and the rows [m] they belong to."""

    def __init__(self, parts: Sequence[tuple[Mapping[str, _Delta], torch.Tensor]], num_rows: int) -> None:
        self._parts = parts
        self._num_rows = num_rows

    def add(self, module: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the deltas of ``module`` for its input x [M, K] to its output out [M, N], in place."""
        for deltas, rows in self._parts:
            delta = deltas.get(module)
            if delta is None or not len(rows):
                continue
            if len(rows) == self._num_rows:
                delta.b(delta.a(x), out=out, accumulate=True)
                continue
            mine = out[rows]
            delta.b(delta.a(x[rows]), out=mine, accumulate=True)
            out[rows] = mine

    def only(self, wanted: torch.Tensor) -> StepAdapters:
        """The same for a selection of the rows, ``wanted`` [R], in its order."""
        parts = []
        for deltas, rows in self._parts:
            member = torch.zeros(self._num_rows, dtype=torch.bool, device=wanted.device)
            member[rows] = True
            parts.append((deltas, member[wanted].nonzero().flatten()))
        return StepAdapters(parts, len(wanted))


class LoraAdapters:
    """The adapters of one network, by name.

    Args:
        modules: the linear layers that adapters may target.
        pack: makes a weight [N, K] ready to compute with.
        max_rank: highest rank accepted.
        max_active: most adapters ready to compute: those of one step.
        max_held: most adapters kept in host memory as read; None keeps all.
    """

    def __init__(
        self,
        modules: Mapping[str, LinearShape],
        pack: Callable[[torch.Tensor], Product],
        *,
        max_rank: int,
        max_active: int,
        max_held: int | None = None,
    ) -> None:
        self._modules = modules
        self._pack = pack
        self._max_rank = max_rank
        self._max_active = max_active
        self._max_held = max_held
        self._sources: dict[str, _Source] = {}
        self._held: OrderedDict[str, dict[str, LoraPair]] = OrderedDict()
        self._active: OrderedDict[str, dict[str, _Delta]] = OrderedDict()
        self.current: StepAdapters | None = None  # set around a forward pass of hooked modules

    def __contains__(self, name: str) -> bool:
        """True for an adapter that was declared."""
        return name in self._sources

    @property
    def held(self) -> tuple[str, ...]:
        """Adapters in host memory, the least recently used first."""
        return tuple(self._held)

    @property
    def active(self) -> tuple[str, ...]:
        """Adapters ready to compute, the least recently used first."""
        return tuple(self._active)

    def declare(self, name: str, path: str) -> None:
        """Make an adapter known. It is read at once, so that a bad one is refused before anything waits for it.

        Raises:
            AdapterError: it cannot be used, or the name belongs to another folder.
        """
        folder = Path(path).expanduser().absolute()
        known = self._sources.get(name)
        if known is not None:
            if known.folder != folder:
                raise AdapterError(name, f"is {known.folder} already; give {folder} another name")
            return
        pairs = read_adapter(name, folder, modules=self._modules, max_rank=self._max_rank)
        self._sources[name] = _Source(folder=folder, stamp=_stamp(folder))
        self._hold(name, pairs)

    def for_step(self, rows: AdapterRows, num_rows: int) -> StepAdapters | None:
        """What a step's rows need; None where all are the base model's. ``rows``: flat row numbers by adapter.

        Raises:
            AdapterError: an adapter has to be read again and has changed or gone.
        """
        if not rows:
            return None
        for name, _ in rows:  # what is there becomes the last to be put out
            if name in self._active:
                self._active.move_to_end(name)
        return StepAdapters([(self._activate(name), mine) for name, mine in rows], num_rows)

    def hook(self, network: Any) -> None:
        """Have the network's own modules add the deltas of ``current`` to what they compute."""
        for name in self._modules:
            network.get_submodule(name).register_forward_hook(self._hook_of(name))

    def _hook_of(self, name: str) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if self.current is not None:
                x = inputs[0]
                self.current.add(name, x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1]))

        return add

    def _activate(self, name: str) -> dict[str, _Delta]:
        deltas = self._active.get(name)
        if deltas is None:
            pairs = self._pairs(name)
            deltas = {module: _Delta(a=self._pack(p.a), b=self._pack(p.b)) for module, p in pairs.items()}
            self._active[name] = deltas
            _drop_oldest(self._active, self._max_active)
        return deltas

    def _pairs(self, name: str) -> dict[str, LoraPair]:
        pairs = self._held.get(name)
        if pairs is None:
            source = self._sources[name]
            if _stamp(source.folder) != source.stamp:
                raise AdapterError(name, f"{source.folder} has changed since it was read; start the engine anew")
            pairs = read_adapter(name, source.folder, modules=self._modules, max_rank=self._max_rank)
        self._hold(name, pairs)
        return pairs

    def _hold(self, name: str, pairs: dict[str, LoraPair]) -> None:
        self._held[name] = pairs
        self._held.move_to_end(name)
        if self._max_held is not None:
            _drop_oldest(self._held, self._max_held)


def find_linears(network: Any, run: Callable[[], object], num_rows: int) -> dict[str, LinearShape]:
    """The linear layers that see every row of a batch once, by running ``run`` on ``num_rows`` rows.

    Those of experts see the rows that are routed to them, and a head only the rows that are sampled: a delta by row
    numbers would be wrong there.
    """
    from transformers.pytorch_utils import Conv1D

    calls: dict[str, list[bool]] = {}
    shapes: dict[str, LinearShape] = {}
    hooks = []

    def watch(name: str, module: Any) -> None:
        calls[name] = []

        def note(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = inputs[0]
            calls[name].append(x.numel() == num_rows * x.shape[-1])
            shapes[name] = LinearShape(in_features=x.shape[-1], out_features=output.shape[-1])

        hooks.append(module.register_forward_hook(note))

    for name, module in network.named_modules():
        if type(module) in (nn.Linear, Conv1D) and ".experts." not in name:
            watch(name, module)
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: shapes[name] for name, whole in calls.items() if whole == [True]}


def _stamp(folder: Path) -> tuple[int, int]:
    try:
        stat = (folder / WEIGHTS_FILE).stat()
    except OSError:
        return (0, 0)
    return (stat.st_size, stat.st_mtime_ns)


def _drop_oldest(entries: OrderedDict[str, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
