"""MemoryPlan: what a model and its KV cache will take of a memory, told before anything is loaded.

Owns the same arithmetic as the start of an engine, with the weights counted instead of loaded. Where the engine would
refuse to start, the plan carries the refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.engine.budget import KVMemory, MemoryBudget, available_cpu_memory, free_memory_bytes
from kvq.engine.config import EngineConfig
from kvq.engine.errors import ConfigError, DoesNotFit
from kvq.engine.model_shape import ModelShape
from kvq.engine.sizing import ACTIVATION_SHARE, logits_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one engine.

    ``memory_bytes`` is the whole GPU's, or what a CPU's machine has free. ``activation_bytes`` is what is kept for a
    step's intermediate results. ``num_blocks`` of KV fit into what is left. ``max_model_len`` is what the engine would
    start with. ``dtype`` is that of the weights, but for the layers' where there is a ``quantization``. ``problem`` is
    the engine's refusal where it would not start; the sizes are told all the same.
    """

    on_gpu: bool
    dtype: str
    memory_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    bytes_per_token: int
    formula: str
    block_size: int
    num_blocks: int
    max_model_len: int
    quantization: str | None = None
    problem: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the cache holds."""
        return self.num_blocks * self.block_size

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        shape: ModelShape,
        *,
        memory_bytes: int | None = None,
        weight_bytes: int | None = None,
    ) -> MemoryPlan:
        """Size an engine with ``config``.

        Args:
            memory_bytes: of the GPU, or what a CPU may use; None is what this machine has free, for a CPU.
            weight_bytes: of the loaded weights; None counts the parameters.

        Raises:
            ConfigError: a GPU is wanted and its memory is not said.
        """
        on_gpu = config.device == "cuda" or (config.device == "auto" and memory_bytes is not None)
        if on_gpu and memory_bytes is None:
            raise ConfigError("memory", "is needed to plan for a GPU: say how much it has, as in --memory 80GiB")
        dtype = config.dtype if config.dtype != "auto" else "bfloat16" if on_gpu else "float32"
        total = free_memory_bytes() if memory_bytes is None else memory_bytes
        weights = shape.weight_bytes(dtype, config.quantization) if weight_bytes is None else weight_bytes
        activations = int(total * ACTIVATION_SHARE) if on_gpu else 0
        bytes_per_token = shape.kv.bytes_per_token(config.kv_dtype_name(dtype))
        bytes_per_sequence = logits_bytes(shape.vocab_size) if on_gpu else 0
        memory, budget, problem = KVMemory(available_bytes=0, most_bytes=0), None, None
        try:
            _refuse_quantization(config, shape, dtype, on_gpu=on_gpu)
            if on_gpu:
                memory = KVMemory.of_gpu(
                    total_bytes=total, utilization=config.gpu_memory_utilization, taken_bytes=weights + activations
                )
            else:
                memory = available_cpu_memory(config, free_bytes=max(0, total - weights))
            budget = MemoryBudget.plan(
                config,
                bytes_per_token=bytes_per_token,
                memory=memory,
                model_limit=shape.max_position_embeddings,
                bytes_per_sequence=bytes_per_sequence,
            )
        except DoesNotFit as err:
            problem = str(err)
        kv_bytes = max(0, memory.available_bytes - config.max_num_seqs * bytes_per_sequence)
        fits = kv_bytes // (bytes_per_token * config.block_size)
        wanted = config.max_model_len or shape.max_position_embeddings
        return cls(
            on_gpu=on_gpu,
            dtype=dtype,
            memory_bytes=total,
            weight_bytes=weights,
            activation_bytes=activations,
            kv_bytes=kv_bytes,
            bytes_per_token=bytes_per_token,
            formula=shape.kv.formula(config.kv_dtype_name(dtype)),
            block_size=config.block_size,
            num_blocks=min(fits, config.num_gpu_blocks_override or fits),
            max_model_len=budget.max_model_len if budget else wanted or fits * config.block_size,
            quantization=config.quantization,
            problem=problem,
        )


def _refuse_quantization(config: EngineConfig, shape: ModelShape, dtype: str, *, on_gpu: bool) -> None:
    """Raise DoesNotFit where the engine would refuse int8 whatever the processor."""
    if config.quantization is None:
        return
    if on_gpu:
        raise DoesNotFit("quantization", f"{config.quantization} needs a CPU; leave it out for a GPU")
    if dtype != "float32":
        raise DoesNotFit("quantization", f"{config.quantization} needs dtype float32, not {dtype}")
    if config.kv_dtype_name(dtype) != dtype:
        raise DoesNotFit("kv_cache_dtype", "must be auto with quantization=int8; leave one of them out")
    if not shape.has_fused_layers:
        raise DoesNotFit(
            "quantization", f"{config.quantization} is offered for the Llama family only, not for {shape.name}"
        )
