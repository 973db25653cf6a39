"""The whole engine: its answers against transformers, and its speed on models of real shapes with random weights."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bench.gpu.device import Device
from bench.gpu.rates import Rates
from bench.limits import ModelCost
from bench.shapes import SHAPES, TINY, Shape, random_prompts
from kvq.engine.config import EngineConfig
from kvq.engine.engine import Engine
from kvq.engine.request import RequestOutput, SamplingParams

# A token counts as right where the other side gives it a logit this near to its own best, as a share of the largest
# logit: two bf16 roundings (2^-8 each) and their accumulation over the layers.
_BF16_TOLERANCE = 4 * 2.0**-8
_FLOAT32_TOLERANCE = 1e-4
_GAP_STEPS = 10  # looked at for what the host costs between them
_LONGEST_GAP_US = 5.0  # from one kernel of a graph to the next takes the GPU one or two


def against_transformers(device: Device, folder: Path) -> dict[str, Any]:
    """Greedy answers of the engine, judged by transformers' own forward pass over them."""
    cases = [("tiny", TINY, torch.float32, _FLOAT32_TOLERANCE)]
    if not device.toy:
        cases.append(("llama-1b", SHAPES["llama-1b"], torch.bfloat16, _BF16_TOLERANCE))
    results = {name: _judge(device, folder, shape, dtype, limit) for name, shape, dtype, limit in cases}
    return {"models": results, "ok": all(result["ok"] for result in results.values())}


def _judge(device: Device, folder: Path, shape: Shape, dtype: torch.dtype, tolerance: float) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = shape.write(folder / "judged")
    with device.device:
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()
        for parameter in network.parameters():
            # Wide enough that the best token is no near-tie; with 2.0 attention is so peaked that sixteen layers make
            # 5% of a bf16 rounding, on either side.
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    network.generation_config.eos_token_id = None
    network.save_pretrained(path)
    lengths = [5, 33, 64, 100] if device.toy else [5, 64, 333, 700, 64, 64]
    prompts = random_prompts(lengths, vocab=shape.vocab, shared=4)
    prompts += random_prompts([330, 345, 360, 375], vocab=shape.vocab, shared=320, seed=1)  # decoded as a group
    engine = Engine.load(_config(device, path, dtype=dtype, max_num_seqs=16, max_model_len=1024))
    outputs = _generate(engine, prompts, [24] * len(prompts))[0]
    stats = engine.stats()
    num_tokens = num_best = 0
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer], device=device.device)
            logits = network(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer, device=device.device)[:, None])[:, 0]
        regret = (logits.max(1).values - chosen) / logits.abs().max(1).values
        num_tokens += len(answer)
        num_best += int((regret == 0).sum())
        worst = max(worst, float(regret.max()))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": num_tokens,
        "same_token": num_best,
        "worst_regret": worst,
        "tolerance": tolerance,
        "grouped_decode_steps": stats.grouped_decode_steps,
        "graph_steps": engine.num_graph_steps,
        "steps": stats.steps,
        "ok": worst <= tolerance,
    }


def throughput(device: Device, folder: Path, rates: Rates, name: str) -> Iterator[dict[str, Any]]:
    """Output tokens/s with 1 to 512 sequences of about 192 tokens, and decode steps against the bandwidth floor.

    Then, for the middle number of sequences, where the time of a decode step goes.
    """
    shape = TINY if device.toy else SHAPES[name]
    numbers = [1, 4] if device.toy else [1, 8, 64, 256, 512]
    prompt_tokens, output_tokens = (16, 32) if device.toy else (128, 64)
    config = _config(
        device,
        shape.write(folder),
        max_num_seqs=numbers[-1],
        max_model_len=prompt_tokens + output_tokens,
        load_format="dummy",
    )
    begin = time.perf_counter()
    engine = Engine.load(config)
    load_s = time.perf_counter() - begin
    cost = ModelCost.of_config(shape.config, element_bytes=device.dtype.itemsize)
    weight_bytes = (cost.layer_weights + cost.head_weights) * cost.element_bytes
    for number in numbers:
        _generate(engine, random_prompts([prompt_tokens] * number, vocab=shape.vocab, seed=1), [4] * number)  # warm up
        prompts = random_prompts([prompt_tokens] * number, vocab=shape.vocab, seed=2 + number)
        _, wall_s, step_s = _generate(engine, prompts, [output_tokens] * number)
        decode_s = statistics.median(step_s[len(step_s) // 2 :])
        kv_bytes = number * (prompt_tokens + output_tokens * 3 // 4) * cost.kv_bytes_per_token
        floor_s = (weight_bytes + kv_bytes) / rates.copy_gb_per_s / 1e9
        yield {
            "sequences": number,
            "output_tokens_per_s": number * output_tokens / wall_s,
            "decode_step_ms": 1e3 * decode_s,
            "floor_ms": 1e3 * floor_s,
            "of_floor": floor_s / decode_s,
            "load_s": load_s,
            "graph_steps": engine.num_graph_steps,
        }
    number = numbers[len(numbers) // 2]
    prompts = random_prompts([prompt_tokens] * number, vocab=shape.vocab, seed=99)
    for gap, run_ahead in (("host_gap", True), ("host_gap_synchronous", False)):
        engine.async_scheduling = run_ahead
        yield {"sequences": number} | _host_gap(device, engine, prompts, gap)


def _host_gap(device: Device, engine: Engine, prompts: list[list[int]], name: str) -> dict[str, Any]:
    """``name``: share of decode steps in which the GPU waited for the host; the same in milliseconds a step.

    Beside it the share in which it ran nothing, between two kernels of one graph included, and what the kernels took.
    A CPU is never idle in a step: there it is only said how many of the steps ran ahead.
    """
    from torch.profiler import ProfilerActivity, profile

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * _GAP_STEPS + 12)
    for place, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{place}", prompt, params)
    for _ in range(10):
        engine.step()
    num_ahead = engine.num_ahead_steps
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(_GAP_STEPS):
        engine.step()
    device.synchronize()
    wall_s = time.perf_counter() - begin
    num_ahead = engine.num_ahead_steps - num_ahead
    with profile(activities=[ProfilerActivity.CUDA]) if device.is_gpu else nullcontext() as profiled:
        for _ in range(_GAP_STEPS):
            engine.step()
        device.synchronize()
    found: dict[str, Any] = {"run": name, "ahead": num_ahead / _GAP_STEPS, "step_ms": 1e3 * wall_s / _GAP_STEPS}
    while engine.has_unfinished_requests:
        engine.step()
    events = [] if profiled is None else [e for e in profiled.events() if e.device_type.name == "CUDA"]
    if events:
        spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
        found |= {name: _waiting_share([span[:2] for span in spans])} | _by_kernel(spans, wall_s)
    return found


def _waiting_share(spans: Sequence[tuple[float, float]]) -> float:
    """Of the time from the first span's begin to the last one's end (microseconds), what lies in long gaps."""
    waited, busy_until = 0.0, spans[0][0]
    for begin, end in spans:
        if begin - busy_until > _LONGEST_GAP_US:
            waited += begin - busy_until
        busy_until = max(busy_until, end)
    return waited / (busy_until - spans[0][0])


def _by_kernel(spans: Sequence[tuple[float, float, str]], wall_s: float) -> dict[str, Any]:
    """The share of ``wall_s`` in which nothing ran, and microseconds a step of the kernels that take most."""
    us_by_name: defaultdict[str, float] = defaultdict(float)
    for begin, end, name in spans:
        us_by_name[name[:60]] += (end - begin) / _GAP_STEPS
    busy_ms = sum(us_by_name.values()) / 1e3
    longest = sorted(us_by_name, key=lambda name: -us_by_name[name])[:16]
    return {
        "idle": max(0.0, 1 - busy_ms * _GAP_STEPS / wall_s / 1e3),
        "busy_ms": busy_ms,
        "kernels": len(spans) / _GAP_STEPS,
        "us_by_kernel": {name: round(us_by_name[name], 1) for name in longest},
    }


def offline(device: Device, folder: Path) -> dict[str, float]:
    """nano-vllm's and mini-sglang's offline workload: 256 sequences, 100-1,024 tokens in and out, random ids."""
    shape = TINY if device.toy else SHAPES["qwen3-0.6b"]
    number, low, high = (6, 4, 20) if device.toy else (256, 100, 1024)
    prompts, lengths = _offline_requests(shape, number, low, high)
    engine = Engine.load(
        _config(device, shape.write(folder), max_num_seqs=number, max_model_len=2 * high, load_format="dummy")
    )
    _generate(engine, prompts[:2], [4, 4])
    _, wall_s, _ = _generate(engine, prompts, lengths)
    return {
        "sequences": number,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(lengths),
        "wall_s": wall_s,
        "output_tokens_per_s": sum(lengths) / wall_s,
    }


def beside_transformers(device: Device, folder: Path) -> dict[str, float]:
    """The same requests by the engine, by transformers' continuous batching and by static ``generate``."""
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    shape = TINY if device.toy else SHAPES["qwen3-0.6b"]
    number, low, high, output_tokens = (4, 4, 20, 8) if device.toy else (64, 100, 512, 128)
    prompts, _ = _offline_requests(shape, number, low, high)
    path = shape.write(folder)
    max_len = high + output_tokens
    engine = Engine.load(_config(device, path, max_num_seqs=number, max_model_len=max_len, load_format="dummy"))
    _generate(engine, prompts[:2], [4, 4])
    _, ours_s, _ = _generate(engine, prompts, [output_tokens] * number)
    del engine
    device.free()

    with device.device:
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=device.dtype).eval()
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=output_tokens, min_new_tokens=output_tokens, eos_token_id=-1, pad_token_id=0
    )
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device.device)
    with torch.inference_mode():
        network.generate(padded[:2], attention_mask=mask[:2], generation_config=generation)
        device.synchronize()
        begin = time.perf_counter()
        network.generate(padded, attention_mask=mask, generation_config=generation)
        device.synchronize()
        static_s = time.perf_counter() - begin
    batching = ContinuousBatchingConfig(
        num_blocks=-(-number * max_len // 256) + number, max_batch_tokens=512 if device.toy else 8192
    )
    for _ in range(2):  # the first time it is set up, and warms up
        begin = time.perf_counter()
        answers = network.generate_batch(
            inputs=prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            progress_bar=False,
            persistent_manager=True,
        )
        continuous_s = time.perf_counter() - begin
        assert sum(len(answer.generated_tokens) for answer in answers.values()) == number * output_tokens
    network.destroy_cached_continuous_batching_manager()
    return {
        "sequences": number,
        "output_tokens": number * output_tokens,
        "kvq_s": ours_s,
        "generate_batch_s": continuous_s,
        "static_generate_s": static_s,
        "times_generate_batch": continuous_s / ours_s,
        "times_static_generate": static_s / ours_s,
    }


def _offline_requests(shape: Shape, number: int, low: int, high: int) -> tuple[list[list[int]], list[int]]:
    source = random.Random(0)
    prompts = random_prompts([source.randint(low, high) for _ in range(number)], vocab=shape.vocab)
    return prompts, [source.randint(low, high) for _ in range(number)]


def _config(device: Device, path: Path, *, dtype: torch.dtype | None = None, **settings: Any) -> EngineConfig:
    name = str(dtype).removeprefix("torch.") if dtype is not None else device.dtype_name
    return EngineConfig(model=str(path), device=device.device.type, dtype=name, gpu_memory_utilization=0.8, **settings)


def _generate(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
) -> tuple[list[RequestOutput], float, list[float]]:
    """Outputs in order, wall seconds, seconds of each step."""
    for place, (prompt, length) in enumerate(zip(prompts, max_tokens, strict=True)):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
        engine.add_request(str(place), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    step_s = []
    begin = time.perf_counter()
    while engine.has_unfinished_requests:
        step_begin = time.perf_counter()
        for output in engine.step():
            outputs[output.request_id] = output
        step_s.append(time.perf_counter() - step_begin)
    wall_s = time.perf_counter() - begin
    return [outputs[str(place)] for place in range(len(prompts))], wall_s, step_s
