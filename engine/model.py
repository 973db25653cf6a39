"""Model: a Hugging Face causal language model that computes with our attention.

Owns the forward pass and the choice of what computes it: the network's modules (network.py) on our attention
(attention.py), or a fused decoder. Knows nothing of scheduling. Invariant: a fused decoder is used only where it gave
the modules' own logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvq.engine.attention import PROBE_TOKENS, ForwardContext, PagedAttention, longest_window, probe, register_attention
from kvq.engine.compiled_modules import EXACT, compile_modules
from kvq.engine.config import EngineConfig
from kvq.engine.errors import ConfigError, ModelError
from kvq.engine.fused import AttentionCall, FusedDecoder
from kvq.engine.fused_gpu import GpuDecoder
from kvq.engine.inputs import ForwardOutput, StepInputs, build_inputs
from kvq.engine.kv_store import KVStore, LayerShape, kv_dtype
from kvq.engine.lora import LoraAdapters, PlainProduct, find_linears
from kvq.engine.model_shape import position_limit
from kvq.engine.network import load_network, shortened
from kvq.engine.row_passes import forward_by_row
from kvq.engine.sampler import DrawKernels
from kvq.engine.step import ScheduledSequence, StepPlan
from kvq.kernels import ops
from kvq.kernels.backend import Backend, choose_backend
from kvq.kernels.cpu import CpuKernels

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_TRIAL_TOKENS = 12
_TRIAL_ENDS = (1, 2, 5, 16, 67)
# Largest error of a logit, as a share of the largest, of one layer. Roundings add up over the layers as a random walk:
# random bf16 weights of an 8B model's width gave 0.009 times the root of the number of layers (2.7% of 8, 5.3% of 32).
_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.005, torch.bfloat16: 0.025}


class Model:
    """The network, the shape of its KV cache and the kernels it runs on.

    ``window``: tokens that any layer looks back, where all have a sliding window. ``by_row``: every token is computed
    alone, so that its bits do not depend on its neighbours.
    """

    def __init__(
        self,
        network: Any,
        layers: Sequence[LayerShape],
        backend: Backend,
        attention: PagedAttention,
        stored: torch.dtype,
    ) -> None:
        self.network = network
        self._attention = attention
        self.layers = tuple(layers)
        self.backend = backend
        self.kv_dtype = stored
        self.hf_config = network.config.get_text_config()
        self._fused: FusedDecoder | None = None
        self._gpu: GpuDecoder | None = None
        self.adapters: LoraAdapters | None = None
        self.window: int | None = None
        self.by_row = False
        self._has_exact_rows = False
        self._packed_bytes = 0

    @classmethod
    def load(cls, config: EngineConfig, *, device: torch.device, dtype: torch.dtype) -> Model:
        """Load weights (or draw them, with ``load_format="dummy"``), probe the attention, choose the kernels.

        Raises:
            ModelError: when there is no such model, or it does not compute with our attention.
        """
        network = load_network(config, device, dtype).to(device).eval()
        network.requires_grad_(requires_grad=False)
        attention = register_attention(network)
        calls = probe(network, attention)
        stored = kv_dtype(config, dtype, device)
        backend = choose_backend(
            device=device,
            dtype=dtype,
            kv_dtype=stored,
            block_size=config.block_size,
            head_dims={(call.shape.key_dim, call.shape.value_dim) for call in calls},
            max_group=max(call.group for call in calls),
        )
        model = cls(network, [call.shape for call in calls], backend, attention, stored)
        linears = find_linears(network, lambda: probe(network, attention), PROBE_TOKENS) if config.uses_lora else {}
        if config.quantization is not None:
            model._quantise(backend, calls, uses_lora=config.uses_lora)
        elif isinstance(backend, CpuKernels):
            model._optimise(backend, calls, uses_lora=config.uses_lora)
        elif ops.runs_triton_on(device) and not config.uses_lora:
            model.fuse_on_gpu(calls, block_size=config.block_size)
        if config.uses_lora:
            model.adapters = LoraAdapters(
                linears,
                backend.pack_linear
                if isinstance(backend, CpuKernels)
                else lambda weight: PlainProduct(weight.to(device=device, dtype=dtype)),
                max_rank=config.max_lora_rank,
                max_active=config.max_loras,
                max_held=config.max_cpu_loras,
            )
            for name, path in config.lora_paths.items():
                model.adapters.declare(name, path)
            if model._fused is None:
                model.adapters.hook(network)
        model.window = longest_window(calls)
        model.by_row = bool(config.deterministic) and not model.is_exact
        model._confirm_numbers(config.block_size)
        return model

    @property
    def compiled_kernels(self) -> CpuKernels | None:
        """The compiled CPU kernels, where the model runs on them."""
        return self.backend if isinstance(self.backend, CpuKernels) else None

    @property
    def is_exact(self) -> bool:
        """True where a token's bits depend on its own sequence alone although all of a step are computed together.

        That is so where kernels of ours compute every sum: they sum every row in one order.
        """
        return self._fused is not None or self._has_exact_rows

    @property
    def draw_kernels(self) -> DrawKernels | None:
        """What draws many tokens at once, where there is such a kernel."""
        if ops.runs_triton_on(self.network.device):
            from kvq.kernels.sampling import TritonDraws  # needs Triton

            return TritonDraws()
        return self.compiled_kernels

    @property
    def max_position_embeddings(self) -> int | None:
        """Most tokens that the model is offered at; None where it does not say."""
        return position_limit(self.hf_config)

    @property
    def weight_bytes(self) -> int:
        """What the weights take of the device's memory: the network's own and those packed for the kernels."""
        tensors = (*self.network.parameters(), *self.network.buffers())
        held: dict[int, int] = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.device.type != "meta"}
        return sum(held.values()) + self._packed_bytes

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return int(self.hf_config.vocab_size)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """KV bytes of one token over all layers, held in ``dtype``."""
        return sum(layer.bytes_per_token(dtype) for layer in self.layers)

    def forward(self, inputs: StepInputs, store: KVStore) -> ForwardOutput:
        """Logits and hidden states of the wanted rows; the KV of all T tokens is written to ``store``."""
        if self.by_row:
            return forward_by_row(lambda row: self._forward(row, store), inputs)
        return self._forward(inputs, store)

    def _forward(self, inputs: StepInputs, store: KVStore) -> ForwardOutput:
        step = self.backend.prepare(inputs.metadata)
        adapters = None
        if inputs.adapter_rows:
            assert self.adapters is not None
            adapters = self.adapters.for_step(inputs.adapter_rows, inputs.input_ids.shape[1])
        if self._fused is not None:
            return self._fused.forward(
                inputs.input_ids[0],
                inputs.position_ids[0],
                inputs.logits_rows,
                inputs.pooled_rows,
                step,
                store,
                inputs.copies,
                adapters,
            )
        if self._gpu is not None:
            return self._gpu.forward(inputs, store, step)
        if self.adapters is not None:
            self.adapters.current = adapters
        self._attention.context = ForwardContext(inputs, store, self.backend, step)
        caught: list[torch.Tensor] = []
        try:
            with nullcontext() if inputs.pooled_rows is None else self._watching_hidden(caught):
                output = self.network(
                    input_ids=inputs.input_ids,
                    position_ids=inputs.position_ids,
                    use_cache=False,
                    logits_to_keep=inputs.logits_rows,
                )
        finally:
            self._attention.context = None  # transformers keeps our attention for good, and it the cache
        return ForwardOutput(
            logits=output.logits[0],
            hidden=None if inputs.pooled_rows is None else caught[0][0, inputs.pooled_rows],
        )

    def shortened(self) -> AbstractContextManager[None]:
        """Passes inside compute a layer or two: layers take the same memory, one after the other."""
        return shortened(self.network) if self._fused is None else self._fused.shortened()

    @contextmanager
    def _watching_hidden(self, caught: list[torch.Tensor]) -> Iterator[None]:
        """Append to ``caught`` what the network's decoder hands to its head, [1, T, D]."""
        hook = self.network.base_model.register_forward_hook(lambda *call: caught.append(call[-1][0]))
        try:
            yield
        finally:
            hook.remove()

    def fuse_on_gpu(self, calls: Sequence[AttentionCall], *, block_size: int) -> None:
        """Swap in the decoder on the Triton kernels where its logits agree."""
        expected = self._trial_logits(block_size)
        self._gpu = GpuDecoder.build(self.network, calls, self.backend)
        if self._gpu is None:
            return
        error = (self._trial_logits(block_size) - expected).abs().max()
        tolerance = _TRIAL_TOLERANCE[self.network.dtype] * math.sqrt(len(self.layers))
        if not error <= tolerance * expected.abs().max():
            logger.warning("%s: the fused layers disagree and are not used", type(self.network).__name__)
            self._gpu = None
        if expected.is_cuda:
            torch.cuda.empty_cache()  # the weights were copied once

    def _quantise(self, backend: Backend, calls: Sequence[AttentionCall], *, uses_lora: bool) -> None:
        """Compute the decoder in int8, or refuse."""
        if self.kv_dtype != self.network.dtype:
            raise ConfigError("kv_cache_dtype", "must be auto with quantization=int8; leave one of them out")
        if not isinstance(backend, CpuKernels) or not backend.has_int8:
            raise ConfigError(
                "quantization", "int8 needs a CPU with AVX2, float32, and a C compiler; leave it out here"
            )
        self._fused = FusedDecoder.build(self.network, backend, calls, quantization="int8", uses_lora=uses_lora)
        if self._fused is None:
            raise ConfigError(
                "quantization", f"int8 is offered for the Llama family only, not for {type(self.network).__name__}"
            )
        self._drop_layer_weights(bytes_per_weight=torch.int8.itemsize)

    def _drop_layer_weights(self, *, bytes_per_weight: int) -> None:
        """The layers' weights live on in the packed ones, beside a packed head."""
        self._packed_bytes = self.network.lm_head.weight.numel() * torch.float32.itemsize
        for layer in self.network.model.layers:
            self._packed_bytes += bytes_per_weight * sum(p.numel() for p in layer.parameters())
            layer.to("meta")

    def _optimise(self, kernels: CpuKernels, calls: Sequence[AttentionCall], *, uses_lora: bool) -> None:
        """Swap in the fused decoder where its logits agree, else put every linear layer on the compiled kernel."""
        fused = FusedDecoder.build(self.network, kernels, calls, uses_lora=uses_lora)
        if fused is not None:
            expected = self._trial_logits(kernels.block_size)
            self._fused = fused
            if torch.allclose(self._trial_logits(kernels.block_size), expected, rtol=1e-3, atol=1e-3):
                self._drop_layer_weights(bytes_per_weight=torch.float32.itemsize)
                return
            logger.warning("%s: the fused layers disagree and are not used", type(self.network).__name__)
            self._fused = None
        self._packed_bytes = compile_modules(self.network, kernels, longest=self.max_position_embeddings)
        self._has_exact_rows = self._confirm_exact_rows(kernels.block_size)

    def _confirm_exact_rows(self, block_size: int) -> bool:
        """Whether the family is one of exact rows, and a trial of its ends agrees: tokens together, and in pieces."""
        names = {type(module).__name__ for module in self.network.modules()}
        if not names & EXACT:
            return False
        longest = min(_TRIAL_ENDS[-1], self.max_position_embeddings or _TRIAL_ENDS[-1])
        ends = [*(end for end in _TRIAL_ENDS if end < longest), longest]
        with self.shortened():
            return torch.equal(self._trial_logits(block_size, ends), self._trial_logits(block_size, [longest]))

    def _confirm_numbers(self, block_size: int) -> None:
        """Refuse what computes no usable numbers at all, before jobs are claimed that would be suspected of it.

        One damaged embedding is not such a case: rows without that token are served.
        """
        if self._trial_logits(block_size).isnan().any(dim=-1).all():
            raise ModelError(
                f"{type(self.network).__name__} cannot be served: it computes nan for every token of a trial: its "
                f"weights are damaged, or it overflows in {str(self.network.dtype).removeprefix('torch.')}"
            )

    @torch.inference_mode()
    def _trial_logits(self, block_size: int, ends: Sequence[int] = (_TRIAL_TOKENS,)) -> torch.Tensor:
        """Logits after each token of a short prompt, computed up to each of ``ends``, in a cache of its own."""
        device, num_blocks = self.network.device, -(-ends[-1] // block_size)
        store = KVStore(self.layers, num_blocks=num_blocks, block_size=block_size, dtype=self.kv_dtype, device=device)
        logits, start = [], 0
        for end in ends:
            ids = [(31 * i + 7) % self.vocab_size for i in range(start, end)]
            table = list(range(num_blocks))
            entry = ScheduledSequence(seq_id=0, token_ids=ids, start=start, block_table=table, samples=())
            plan = StepPlan(sequences=(entry,), num_decodes=0, copies=())
            inputs = replace(
                build_inputs(plan, block_size=block_size, device=device),
                logits_rows=torch.arange(end - start, device=device),
            )
            logits.append(self.forward(inputs, store).logits.clone())
            start = end
        return torch.cat(logits)
