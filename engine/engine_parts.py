"""EngineParts: what an engine is made of, built from its settings.

Owns the composition: which parts there are, in the order in which each needs the one before. Does nothing once the
engine runs.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from kvq.engine.batch import SchedulerLimits
from kvq.engine.budget import MemoryBudget, free_memory_bytes, num_host_blocks
from kvq.engine.cache_manager import CacheManager, Window
from kvq.engine.config import EngineConfig, model_display_name
from kvq.engine.cuda_graphs import StepGraphs, capture_steps
from kvq.engine.device import choose_device, choose_dtype
from kvq.engine.draft_model import load_draft_model
from kvq.engine.errors import ConfigError
from kvq.engine.generation_defaults import load_generation_defaults
from kvq.engine.kv_store import KVStore
from kvq.engine.lora import LoraAdapters
from kvq.engine.model import Model
from kvq.engine.planner import ArrivalPlanner, PrefixPlanner
from kvq.engine.pooling import Pooler
from kvq.engine.profiling import plan_memory
from kvq.engine.runner import Runner
from kvq.engine.sampler import Sampler
from kvq.engine.scheduler import Scheduler
from kvq.engine.speculation_setup import make_speculator
from kvq.engine.stopping import StopCheck
from kvq.engine.swap_space import SwapSpace
from kvq.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of one engine.

    ``adapters``: None where none are enabled. ``run_ahead``: the next step is started while one runs.
    """

    tokenizer: Tokenizer
    scheduler: Scheduler
    runner: Runner
    stop_check: StopCheck
    budget: MemoryBudget
    vocab_size: int
    generation_defaults: dict[str, Any]
    pooler: Pooler
    adapters: LoraAdapters | None
    run_ahead: bool


def load_parts(config: EngineConfig) -> EngineParts:
    """Load the model, size the cache and build everything around them.

    Raises:
        ConfigError: for a setting that cannot be satisfied on this machine; DoesNotFit for memory.
        ModelError: when the model cannot be loaded or served.
    """
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    tokenizer = Tokenizer.load(config)
    model = Model.load(config, device=device, dtype=dtype)
    draft_network = load_draft_model(config, tokenizer, device=device, dtype=dtype)
    models = [model] if draft_network is None else [model, draft_network]
    max_num_batched_tokens = _step_tokens(config, device)
    budget = plan_memory(config, models, num_tokens=max_num_batched_tokens)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=budget.max_model_len,
        max_loras=config.max_loras,
    )
    host_blocks = num_host_blocks(
        config,
        block_bytes=budget.bytes_per_token * config.block_size,
        free_bytes=free_memory_bytes() - (budget.kv_bytes if device.type == "cpu" else 0),
    )
    store = KVStore(
        model.layers,
        num_blocks=budget.num_blocks,
        block_size=config.block_size,
        dtype=model.kv_dtype,
        device=device,
        num_host_blocks=host_blocks,
    )
    stop_check = StopCheck(tokenizer, budget.max_model_len)
    runs_ahead = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    speculator = make_speculator(
        config,
        model,
        draft_network,
        tokenizer=tokenizer,
        budget=budget,
        max_num_tokens=limits.max_num_batched_tokens,
        runs_ahead=runs_ahead,
    )
    logger.info(
        "engine ready: model=%s device=%s dtype=%s kv_cache_dtype=%s deterministic=%s %s",
        model_display_name(config.model),
        device.type,
        str(dtype).removeprefix("torch."),
        config.kv_dtype_name(str(dtype).removeprefix("torch.")),
        "yes" if model.by_row or model.is_exact else "no",
        budget,
    )
    return EngineParts(
        tokenizer=tokenizer,
        scheduler=Scheduler(
            limits=limits,
            cache=_cache(config, model, budget, limits),
            stop_check=stop_check,
            clock=time.monotonic,
            planner=PrefixPlanner() if config.scheduling_policy == "prefix" else ArrivalPlanner(),
            swap_space=SwapSpace(host_blocks, store.seconds_per_swapped_block() if host_blocks else 0.0),
            speculator=speculator,
        ),
        runner=Runner(
            model=model,
            store=store,
            sampler=Sampler(tokenizer.eos_token_ids, model.draw_kernels),
            device=device,
            graphs=_graphs(config, model, store, limits, device),
        ),
        stop_check=stop_check,
        budget=budget,
        vocab_size=model.vocab_size,
        generation_defaults=load_generation_defaults(config),
        pooler=Pooler.load(config, model.hf_config),
        adapters=model.adapters,
        run_ahead=runs_ahead,
    )


def _step_tokens(config: EngineConfig, device: torch.device) -> int:
    """Most tokens of a step, as set or by default.

    Raises:
        ConfigError: fewer than sequences that may run.
    """
    num_tokens = config.max_num_batched_tokens or max(_DEFAULT_BATCHED_TOKENS[device.type], config.max_num_seqs)
    if num_tokens < config.max_num_seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            f"is {num_tokens}, less than max_num_seqs ({config.max_num_seqs}): "
            f"a step could not give every sequence a token; raise it to {config.max_num_seqs} or more",
        )
    return num_tokens


def _cache(config: EngineConfig, model: Model, budget: MemoryBudget, limits: SchedulerLimits) -> CacheManager:
    window = None
    if model.window is not None:
        window = Window(num_tokens=model.window, max_step_tokens=limits.max_num_batched_tokens)
    return CacheManager(
        num_blocks=budget.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        window=window,
    )


def _graphs(
    config: EngineConfig, model: Model, store: KVStore, limits: SchedulerLimits, device: torch.device
) -> StepGraphs | None:
    if device.type != "cuda" or config.enforce_eager or model.by_row:
        return None
    return capture_steps(
        lambda inputs: model.forward(inputs, store).logits,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        grouped=config.enable_prefix_caching,
        block_size=store.block_size,
        padding_block=store.padding_block,
        device=device,
    )
