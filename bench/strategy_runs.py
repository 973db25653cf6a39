"""The runs behind ``bench.strategies``: static batches and the engine on the same requests.

Imports torch; ``bench.strategies`` imports this file once threads are told how to wait.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.limits import Floor, Limits, ModelCost
from bench.machine import Machine, load_average
from bench.shapes import random_prompts
from bench.static_batch import Measured, Memory, StaticBatch
from bench.strategies import CONCURRENCY, Plan, SharedPromptRow, StrategyRow
from kvq.engine.config import EngineConfig
from kvq.engine.engine import Engine
from kvq.engine.request import SamplingParams

_BLOCK_SIZE = 16


def strategies(settings: dict[str, Any], plan: Plan, vocab: int) -> list[StrategyRow]:
    """The first table."""
    prompts, outputs = plan.requests(vocab)
    single = random_prompts([plan.single_context], vocab=vocab, seed=1)
    max_len = max(plan.max_len, plan.single_context + plan.single_tokens + 1)
    rows = []
    batch = StaticBatch(EngineConfig(**settings), batch_size=CONCURRENCY, max_len=max_len, reserved_len=plan.max_len)
    batch.run(prompts[:1], [2], Memory.RESERVED)  # warm up
    for memory in Memory:
        run_every, number = (plan.run_every, plan.num_recomputed) if memory is Memory.NONE else (1, len(prompts))
        one = batch.run(single, [plan.single_tokens], memory, run_every=max(1, run_every // 4))
        many = batch.run(prompts[:number], outputs[:number], memory, run_every=run_every)
        rows.append(_row(memory.value, one, many))
    del batch
    # As many as fit where `reserve` held eight: what paging is for.
    reserved = CONCURRENCY * -(-plan.max_len // _BLOCK_SIZE)
    for name, sharing, max_num_seqs, num_blocks in (
        ("paged", False, CONCURRENCY, None),
        ("paged+prefix", True, CONCURRENCY, None),
        ("paged+prefix, as many as fit in reserve's memory", True, len(prompts), reserved),
    ):
        engine = _engine(
            settings, max_len=max_len, prefix_caching=sharing, max_num_seqs=max_num_seqs, num_blocks=num_blocks
        )
        one = _run_engine(engine, single, [plan.single_tokens])
        many = _run_engine(engine, prompts, outputs)
        rows.append(_row(name, one, many))
    return rows


def _row(name: str, one: Measured, many: Measured) -> StrategyRow:
    return StrategyRow(
        name=name,
        single_tpot_ms=1e3 * statistics.median(one.step_s[1:]),
        output_tokens_per_s=many.output_tokens_per_s,
        kv_utilisation=many.utilisation,
    )


def _engine(
    settings: dict[str, Any],
    *,
    max_len: int,
    prefix_caching: bool,
    max_num_seqs: int = CONCURRENCY,
    num_blocks: int | None = None,
) -> Engine:
    config = EngineConfig(
        **settings,
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks_override=num_blocks or max_num_seqs * (-(-max_len // _BLOCK_SIZE) + 1),
        enable_prefix_caching=prefix_caching,
        block_size=_BLOCK_SIZE,
    )
    engine = Engine.load(config)
    _run_engine(engine, [[5, 6, 7]], [2])
    return engine


def _run_engine(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> Measured:
    """All requests at once into the engine, which takes as many as its limits allow."""
    measured = Measured()
    before = engine.stats()
    lengths = {}
    begin = time.perf_counter()
    for number, (prompt, length) in enumerate(zip(prompts, max_tokens, strict=True)):
        lengths[str(number)] = len(prompt) + length
        engine.add_request(
            str(number), prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length, seed=number)
        )
    left = 0
    while engine.has_unfinished_requests:
        step_begin = time.perf_counter()
        finished = engine.step()
        measured.step_s.append(time.perf_counter() - step_begin)
        left += sum(lengths[output.request_id] for output in finished)
        stats = engine.stats()
        held = stats.kv_usage * engine.budget.num_tokens
        if held:
            admitted = stats.prompt_tokens - before.prompt_tokens
            generated = stats.generated_tokens - before.generated_tokens
            in_use = admitted + generated - left - stats.running  # the newest token of each has no KV yet
            measured.utilisations.append(in_use / held)
    measured.wall_s = time.perf_counter() - begin
    measured.output_tokens = sum(max_tokens)
    return measured


def shared_prompt(settings: dict[str, Any], plan: Plan, vocab: int) -> list[SharedPromptRow]:
    """Eight requests with one long system prompt: the work and memory of about one of them."""
    own, answer = 32, 16
    lengths = [plan.system_prompt_tokens + own] * CONCURRENCY
    prompts = random_prompts(lengths, vocab=vocab, shared=plan.system_prompt_tokens)
    rows = []
    cases = (("one request", 1, False), ("8 requests, no sharing", 8, False), ("8 requests, shared", 8, True))
    for name, number, sharing in cases:
        engine = _engine(settings, max_len=lengths[0] + answer, prefix_caching=sharing)
        before = engine.stats()
        measured = _run_engine(engine, prompts[:number], [answer] * number)
        stats = engine.stats()
        rows.append(
            SharedPromptRow(
                name=name,
                prompt_tokens=stats.prompt_tokens - before.prompt_tokens,
                computed_prompt_tokens=stats.computed_prompt_tokens - before.computed_prompt_tokens,
                wall_s=measured.wall_s,
                kv_tokens_peak=round(stats.kv_usage_peak * engine.budget.num_tokens),
            )
        )
    return rows


def tpot_by_length(settings: dict[str, Any], plan: Plan, vocab: int) -> list[dict[str, float]]:
    """Time per token of a single request, with and without a cache, at growing lengths."""
    longest = plan.lengths[-1] + 16
    batch = StaticBatch(EngineConfig(**settings), batch_size=1, max_len=longest)
    batch.run([[5, 6, 7]], [3], Memory.RESERVED)
    points = []
    for length in plan.lengths:
        prompt = random_prompts([length], vocab=vocab, seed=length)
        recompute = batch.run(prompt, [3], Memory.NONE)
        cached = batch.run(prompt, [12], Memory.RESERVED)
        points.append(
            {
                "length": length,
                "recompute_ms": 1e3 * statistics.median(recompute.step_s[1:]),
                "cached_ms": 1e3 * statistics.median(cached.step_s[1:]),
            }
        )
    return points


def measure(settings: dict[str, Any], plan: Plan, vocab: int) -> dict[str, Any]:
    """All three tables."""
    load = load_average()
    result = {
        "kind": "strategies",
        "machine": asdict(Machine.this()),
        "load_average": load,
        "settings": settings,
        "plan": asdict(plan),
        "strategies": [asdict(row) for row in strategies(settings, plan, vocab)],
        "shared_prompt": [asdict(row) for row in shared_prompt(settings, plan, vocab)],
        "tpot_by_length": tpot_by_length(settings, plan, vocab),
    }
    if settings["device"] == "cpu":
        result["limits"] = _limits(settings["model"], plan, vocab)
    return result


def _limits(model: str, plan: Plan, vocab: int) -> dict[str, Any]:
    """What the machine can do, measured now, and the least time that leaves for the first table's work."""
    limits = Limits.toy() if plan.is_toy else Limits.measure(num_threads=torch.get_num_threads())
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    cost = ModelCost.of_config(config)
    prompts, outputs = plan.requests(vocab)
    floor = Floor.count("strategies", cost, prompts, [[length] for length in outputs])
    return {
        "measured": asdict(limits),
        "in_words": str(limits),
        "linear_ops": floor.linear_ops,
        "attention_ops": floor.attention_ops,
        "single_ms": 1e3 * cost.step_s(limits, num_sequences=1, context=plan.single_context),
        "output_tokens_per_s": floor.output_tokens / floor.seconds(limits),
    }
