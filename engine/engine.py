"""Engine: requests in, finished requests out, one step at a time.

Owns what is asked of an engine: requests taken in, refused, aborted, answered. engine_parts.py makes the parts. Knows
nothing of queues or SQL. Not thread safe: one thread drives it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from kvq.engine.config import EngineConfig, model_display_name
from kvq.engine.dedup import Deduplicator
from kvq.engine.engine_parts import EngineParts, load_parts
from kvq.engine.errors import ConfigError, InvalidParameter
from kvq.engine.grammar import GrammarCompiler
from kvq.engine.model_presence import require_model
from kvq.engine.outputs import request_output
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
from kvq.engine.sequence import RequestState
from kvq.engine.stats import EngineStats
from kvq.engine.step import StepPlan
from kvq.engine.step_loop import StepLoop

logger = logging.getLogger(__name__)

_GROWS_BY_NOTHING = SamplingParams(temperature=0, max_tokens=1)  # a prompt that is embedded


class Engine:
    """A model with a paged KV cache and a continuous batch. Make one with ``Engine.load``."""

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        budget = parts.budget
        self.config = config
        self.tokenizer = parts.tokenizer
        self.budget = budget
        self.max_model_len = budget.max_model_len
        self.model_id = model_display_name(config.model)
        self.generation_defaults = parts.generation_defaults
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._stop_check = parts.stop_check
        self._pooler = parts.pooler
        self._adapters = parts.adapters
        self._limits = RequestLimits(max_model_len=budget.max_model_len, vocab_size=parts.vocab_size)
        self._seeds = random.Random(config.seed)
        self._grammars = GrammarCompiler(parts.tokenizer, parts.vocab_size)
        self._bad_word_ids = lru_cache(maxsize=256)(parts.tokenizer.bad_word_ids)
        self._dedup = Deduplicator() if config.enable_dedup else None
        self._num_deduplicated = 0
        self._preemption_s = 0.0
        self._loop = StepLoop(parts.scheduler, parts.runner, run_ahead=parts.run_ahead, on_duration=self._note_duration)
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
        require_model(config)  # a hub that cannot be reached would be asked again and again, file by file
        return cls(config, load_parts(config))

    @property
    def has_unfinished_requests(self) -> bool:
        """True while any request is in flight, or a step that was started ahead."""
        return self._scheduler.has_unfinished or self._loop.is_running

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return self._scheduler.num_running

    @property
    def num_graph_steps(self) -> int:
        """Steps whose forward pass was a captured graph, replayed."""
        return self._runner.num_graph_steps

    @property
    def async_scheduling(self) -> bool:
        """Whether the next step is started while one runs; may be changed at any time."""
        return self._loop.run_ahead

    @async_scheduling.setter
    def async_scheduling(self, run_ahead: bool) -> None:
        self._loop.run_ahead = run_ahead

    @property
    def num_ahead_steps(self) -> int:
        """Steps started before the tokens of those before them were known (``async_scheduling``)."""
        return self._loop.num_ahead

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
        """Compute one step; returns the requests that finished in it. The next may be running already on return.

        Raises:
            StepFailed: the forward pass raised; every request is still in flight and will be computed again.
        """
        outputs = [request_output(state, self._stop_check) for state in self._loop.step()]
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
            forward_s=self._runner.forward_s,
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
