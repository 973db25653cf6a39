"""Engine: requests in, finished requests out, one step at a time.

Owns the composition of scheduler, runner and tokenizer. Knows nothing of queues or SQL. Not thread safe: one
thread drives it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch

from kvq.engine.budget import MemoryBudget, available_cpu_memory
from kvq.engine.cache_manager import CacheManager, Window
from kvq.engine.config import EngineConfig, model_display_name
from kvq.engine.cuda_graphs import StepGraphs, capture_steps
from kvq.engine.dedup import Deduplicator
from kvq.engine.device import available_gpu_memory, choose_device, choose_dtype
from kvq.engine.draft_model import load_draft_model
from kvq.engine.errors import ConfigError, InvalidParameter, StepFailed
from kvq.engine.generation_defaults import load_generation_defaults
from kvq.engine.grammar import GrammarCompiler
from kvq.engine.kv_store import KVStore
from kvq.engine.lora import LoraAdapters
from kvq.engine.model import Model
from kvq.engine.outputs import request_output
from kvq.engine.planner import ArrivalPlanner, PrefixPlanner
from kvq.engine.pooling import Pooler
from kvq.engine.preemption_watch import PreemptionWatch
from kvq.engine.request import (
    MAX_SEED,
    LoRARequest,
    Pooling,
    PoolingParams,
    Request,
    RequestOutput,
    SamplingParams,
)
from kvq.engine.request_limits import RequestLimits
from kvq.engine.runner import Runner
from kvq.engine.sampler import Sampler
from kvq.engine.scheduler import Scheduler, SchedulerLimits
from kvq.engine.sequence import RequestState
from kvq.engine.sizing import logits_bytes
from kvq.engine.speculation_setup import make_speculator
from kvq.engine.stats import EngineStats
from kvq.engine.step import StepPlan
from kvq.engine.stopping import StopCheck
from kvq.engine.swap_space import SwapSpace
from kvq.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_GROWS_BY_NOTHING = SamplingParams(temperature=0, max_tokens=1)  # a prompt that is embedded
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


class Engine:
    """A model with a paged KV cache and a continuous batch. Make one with ``Engine.load``."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        runner: Runner,
        stop_check: StopCheck,
        budget: MemoryBudget,
        vocab_size: int,
        generation_defaults: dict[str, Any],
        pooler: Pooler,
        adapters: LoraAdapters | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.budget = budget
        self.max_model_len = budget.max_model_len
        self.model_id = model_display_name(config.model)
        self._scheduler = scheduler
        self._runner = runner
        self._stop_check = stop_check
        self._limits = RequestLimits(max_model_len=budget.max_model_len, vocab_size=vocab_size)
        self._seeds = random.Random(config.seed)
        self.generation_defaults = generation_defaults
        self._grammars = GrammarCompiler(tokenizer, vocab_size)
        self._bad_word_ids = lru_cache(maxsize=256)(tokenizer.bad_word_ids)
        self._dedup = Deduplicator() if config.enable_dedup else None
        self._num_deduplicated = 0
        self._pooler = pooler
        self._adapters = adapters
        self._preemption_s = 0.0
        self._watch = PreemptionWatch(
            bytes_per_block=budget.bytes_per_token * budget.block_size, max_num_seqs=config.max_num_seqs
        )

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Load the model, size the cache and build the engine.

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
        budget = MemoryBudget.plan(
            config,
            bytes_per_token=sum(m.bytes_per_token(m.kv_dtype) for m in models),
            memory=available_cpu_memory(config) if device.type == "cpu" else available_gpu_memory(config),
            model_limit=model.max_position_embeddings,
            bytes_per_sequence=logits_bytes(model.vocab_size) if device.type == "cuda" else 0,
        )
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens
            or max(_DEFAULT_BATCHED_TOKENS[device.type], config.max_num_seqs),
            max_model_len=budget.max_model_len,
            max_loras=config.max_loras,
        )
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"is {limits.max_num_batched_tokens}, less than max_num_seqs ({limits.max_num_seqs}): "
                f"a step could not give every sequence a token; raise it to {limits.max_num_seqs} or more",
            )
        num_host_blocks = int(config.swap_space * (1 << 30)) // (budget.bytes_per_token * config.block_size)
        store = KVStore(
            model.layers,
            num_blocks=budget.num_blocks,
            block_size=config.block_size,
            dtype=model.kv_dtype,
            device=device,
            num_host_blocks=num_host_blocks,
        )
        swap_space = SwapSpace(num_host_blocks, store.seconds_per_swapped_block() if num_host_blocks else 0.0)
        cache = CacheManager(
            num_blocks=budget.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            window=None
            if model.window is None
            else Window(num_tokens=model.window, max_step_tokens=limits.max_num_batched_tokens),
        )
        stop_check = StopCheck(tokenizer, budget.max_model_len)
        speculator = make_speculator(
            config,
            model,
            draft_network,
            tokenizer=tokenizer,
            budget=budget,
            max_num_tokens=limits.max_num_batched_tokens,
        )
        logger.info(
            "engine ready: model=%s device=%s dtype=%s kv_cache_dtype=%s kv_cache=%d MiB blocks=%d max_model_len=%d "
            "full_sequences=%.1f",
            model_display_name(config.model),
            device.type,
            str(dtype).removeprefix("torch."),
            config.kv_dtype_name(str(dtype).removeprefix("torch.")),
            budget.kv_bytes >> 20,
            budget.num_blocks,
            budget.max_model_len,
            budget.num_full_sequences,
        )
        return cls(
            config=config,
            tokenizer=tokenizer,
            scheduler=Scheduler(
                limits=limits,
                cache=cache,
                stop_check=stop_check,
                clock=time.monotonic,
                planner=PrefixPlanner() if config.scheduling_policy == "prefix" else ArrivalPlanner(),
                swap_space=swap_space,
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
        )

    @property
    def has_unfinished_requests(self) -> bool:
        """True while any request is in flight."""
        return self._scheduler.has_unfinished

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return self._scheduler.num_running

    @property
    def num_graph_steps(self) -> int:
        """Steps whose forward pass was a captured graph, replayed."""
        return self._runner.num_graph_steps

    @property
    def num_waiting(self) -> int:
        """Requests and preempted sequences not in the batch."""
        return self._scheduler.num_waiting

    def add_lora(self, request: LoRARequest) -> str:
        """Make an adapter known to ``add_request``, unless it is; returns its name.

        Raises:
            ConfigError: adapters are not enabled; AdapterError: this one cannot be used.
        """
        if self._adapters is None:
            raise ConfigError("enable_lora", "is off; set it to use LoRA adapters")
        self._adapters.declare(request.lora_name, request.lora_path)
        return request.lora_name

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        lora: str | None = None,
    ) -> None:
        """Take a request in. ``prompt`` is text or token ids; ``priority``: smaller runs earlier.

        ``lora``: name of the adapter to compute with, one of ``lora_modules`` or of ``add_lora``; None: none.

        Raises:
            PromptTooLong: no room for an output token.
            InvalidParameter: a parameter that this model cannot honour.
            RequestError: an empty prompt.
        """
        token_ids = self.fit(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params)
        self.check(token_ids, params)
        self._check_lora(lora)
        seed = self._seeds.randint(0, MAX_SEED) if params.seed is None else params.seed
        form = params.structured_outputs
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            params=params,
            priority=priority,
            arrival_s=time.monotonic(),
            bad_word_ids=self._bad_word_ids(params.bad_words) if params.bad_words else (),
            grammar=None if form is None else self._grammars.compile(form),
            lora=lora,
        )
        self._add(request, seed)

    def add_embedding(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: PoolingParams,
        *,
        priority: int = 0,
        lora: str | None = None,
    ) -> None:
        """Take in a prompt whose embedding is wanted, as ``add_request``.

        Raises:
            RequestError: as ``add_request``.
        """
        token_ids = self.fit(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params)
        self._check_lora(lora)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            params=_GROWS_BY_NOTHING,
            priority=priority,
            arrival_s=time.monotonic(),
            lora=lora,
            pooling=self.check_embedding(token_ids, params),
        )
        self._add(request, 0)

    def _add(self, request: Request, seed: int) -> None:
        if self._dedup is None or not self._dedup.join(request, seed):
            self._scheduler.add(request, seed)

    def _check_lora(self, lora: str | None) -> None:
        if lora is not None and (self._adapters is None or lora not in self._adapters):
            raise InvalidParameter("model", f"there is no adapter {lora!r}")

    def defaults_for(self, params: SamplingParams, given: Collection[str]) -> dict[str, Any]:
        """Options of the model's generation_config for a request that names only the options ``given``.

        A request that asks for temperature 0 gets none: greedy is greedy.
        """
        if "temperature" in given and params.greedy:
            return {}
        return {name: value for name, value in self.generation_defaults.items() if name not in given}

    def fit(self, token_ids: Sequence[int], params: SamplingParams | PoolingParams) -> list[int]:
        """The tokens of the prompt that ``truncate_prompt_tokens`` leaves: the last ones."""
        return self._limits.fit(token_ids, params)

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what cannot run, compiling what must be before it is stepped. Any thread may call it.

        Raises:
            RequestError: as ``add_request``.
        """
        self._limits.check(token_ids, params)
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)

    def check_embedding(self, token_ids: Sequence[int], params: PoolingParams) -> Pooling:
        """Refuse a prompt that cannot be embedded. Any thread may call it.

        Raises:
            RequestError: as ``add_embedding``.
        """
        self._limits.check_prompt(token_ids)
        return self._pooler.resolve(params)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; what it generated so far comes back, None if it is not in flight.

        One that equal requests wait for hands its computation on to the first of them.
        """
        if self._dedup is not None and request_id in self._dedup:
            follower = self._dedup.leave(request_id)
            return request_output(RequestState(request=follower.request, seed=follower.seed), self._stop_check)
        state = self._scheduler.abort(request_id)
        if state is None:
            return None
        heir = None if self._dedup is None else self._dedup.succeed(request_id)
        if heir is not None:
            self._scheduler.add(heir.request, heir.seed)
        return request_output(state, self._stop_check)

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the requests that finished in it.

        Raises:
            StepFailed: the forward pass raised; every request is still in flight and will be computed again.
        """
        plan = self._scheduler.plan()
        if plan is None:
            return []
        start = time.perf_counter()
        try:
            result = self._runner.run(plan)
        except Exception as err:
            self._scheduler.rollback(plan)
            raise StepFailed(f"a step of {plan.num_tokens} tokens failed: {err}") from err
        self._note_duration(plan, time.perf_counter() - start)
        outputs = [request_output(state, self._stop_check) for state in self._scheduler.commit(plan, result)]
        return outputs + self._served(outputs)

    def _note_duration(self, plan: StepPlan, seconds: float) -> None:
        cost = self._scheduler.record_duration(plan, seconds)
        self._preemption_s += cost.seconds
        warning = self._watch.record_step(num_running=len(plan.sequences), seconds=seconds, cost=cost)
        if warning is not None:
            logger.warning(warning)

    def _served(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The answers of those that waited for one of ``outputs``."""
        if self._dedup is None:
            return []
        now = time.monotonic()
        served = [f.output(output, finished_s=now) for output in outputs for f in self._dedup.finish(output.request_id)]
        self._num_deduplicated += len(served)
        return served

    def stats(self) -> EngineStats:
        """Totals and present state."""
        counters = self._scheduler.counters
        return EngineStats(
            prompt_tokens=counters.prompt_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            swapped_in=self._scheduler.preempted.num_swapped_in,
            swapped_out=self._scheduler.preempted.num_swapped_out,
            kv_usage=self._scheduler.cache.usage,
            kv_usage_peak=counters.kv_usage_peak,
            steps=counters.steps,
            running=self.num_running,
            waiting=self.num_waiting,
            deduplicated_requests=self._num_deduplicated,
            plain_decode_steps=self._runner.num_steps_by_decode_path["plain"],
            split_decode_steps=self._runner.num_steps_by_decode_path["split"],
            grouped_decode_steps=self._runner.num_steps_by_decode_path["grouped"],
            kv_slots_allocated=counters.kv_slots_allocated,
            kv_slots_used=counters.kv_slots_used,
            preemption_s=self._preemption_s,
            num_draft_tokens=self._scheduler.num_draft_tokens,
            num_accepted_tokens=self._scheduler.num_accepted_tokens,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the bookkeeping is sound (for tests and ``doctor``)."""
        self._scheduler.check_integrity()
        if self._dedup is not None:
            self._dedup.check_integrity()


def _graphs(
    config: EngineConfig, model: Model, store: KVStore, limits: SchedulerLimits, device: torch.device
) -> StepGraphs | None:
    if device.type != "cuda" or config.enforce_eager:
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
