"""The profiling step: what a model's largest step takes of a memory besides weights and KV, measured at start.

Owns that step: as many dummy tokens as a step may have, in as many sequences as may run, with the sampler's work for
all of them and as many prompt tokens scored as a step scores at most. The arithmetic on its result is budget.py's. On
a GPU torch's own peak is read. On a CPU the process is watched as it grows, since the compiled kernels' buffers come
from no allocator that counts, and a layer or two are computed: the others take the same memory, one after the other.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence

import torch

from kvq.engine.budget import MemoryBudget, available_cpu_memory, free_memory_bytes
from kvq.engine.config import EngineConfig
from kvq.engine.device import available_gpu_memory
from kvq.engine.errors import DoesNotFit
from kvq.engine.inputs import build_inputs
from kvq.engine.kv_store import KVStore
from kvq.engine.model import Model
from kvq.engine.request import SamplingParams
from kvq.engine.sampler import Sampler
from kvq.engine.sampling_params import MAX_LOGPROBS
from kvq.engine.scheduler import MAX_SCORED_TOKENS
from kvq.engine.sizing import logits_bytes
from kvq.engine.step import SampleSpec, ScheduledSequence, ScoreSpec, StepPlan

# More tokens take a CPU long, and activations grow in proportion to them: they are measured up to here.
_MOST_ON_CPU = 512
_POLL_S = 0.001
_STATM = "/proc/self/statm"


def plan_memory(config: EngineConfig, models: Sequence[Model], *, num_tokens: int) -> MemoryBudget:
    """The budget beside what ``models`` (the one served first) take for steps of ``num_tokens``, measured.

    Raises:
        DoesNotFit: naming the setting to change and a value that works.
    """
    model = models[0]
    on_gpu = model.network.device.type == "cuda"
    free_bytes = 0 if on_gpu else free_memory_bytes()
    activation_bytes = max(measure_activations(config, m, num_tokens=num_tokens) for m in models)
    # Rows of logits are the sequences' own: fewer of them may be the way out. On a CPU the KV cache has a size of its
    # own, and everything else the rest of the memory.
    sequence_bytes = logits_bytes(model.vocab_size) if on_gpu else 0
    return MemoryBudget.plan(
        config,
        bytes_per_token=sum(m.bytes_per_token(m.kv_dtype) for m in models),
        memory=available_gpu_memory(
            config, activation_bytes=max(0, activation_bytes - config.max_num_seqs * sequence_bytes)
        )
        if on_gpu
        else available_cpu_memory(config, free_bytes=max(0, free_bytes - activation_bytes)),
        model_limit=model.max_position_embeddings,
        bytes_per_sequence=sequence_bytes,
        weight_bytes=sum(m.weight_bytes for m in models),
        activation_bytes=activation_bytes,
    )


def measure_activations(config: EngineConfig, model: Model, *, num_tokens: int) -> int:
    """Bytes that a step of ``num_tokens`` takes at its peak besides weights and KV, buffers that it keeps included.

    Raises:
        DoesNotFit: a GPU has no memory for such a step; names max_num_batched_tokens and a number that works.
    """
    device: torch.device = model.network.device
    if device.type == "cpu":
        measured = min(num_tokens, _MOST_ON_CPU)
        run = _profiling_step(config, model, measured)
        with model.shortened():
            return _resident_growth(run) * -(-num_tokens // measured)
    try:
        return _gpu_peak(_profiling_step(config, model, num_tokens))
    except torch.cuda.OutOfMemoryError as err:
        fits = _largest_step(config, model, num_tokens)
        raise DoesNotFit(
            "max_num_batched_tokens",
            f"a step of {num_tokens} tokens needs more memory than the GPU has beside the weights; "
            + (f"set it to {fits} or less" if fits else "take a smaller model or dtype"),
        ) from err


def _largest_step(config: EngineConfig, model: Model, num_tokens: int) -> int | None:
    """The first half, quarter, ... of ``num_tokens`` that a GPU can compute; None where not even one token fits."""
    while num_tokens > 1:
        num_tokens //= 2
        torch.cuda.empty_cache()
        try:
            _profiling_step(config, model, num_tokens)()
        except torch.cuda.OutOfMemoryError:
            continue
        return num_tokens
    return None


def _profiling_step(config: EngineConfig, model: Model, num_tokens: int) -> Callable[[], object]:
    """One forward pass and what follows it; memory for the KV it writes is taken here, before.

    The sequences lie in the same blocks: what they compute means nothing.
    """
    device, block_size = model.network.device, config.block_size
    limits = [limit for limit in (config.max_model_len, model.max_position_embeddings) if limit is not None]
    lengths = _lengths(num_tokens, config.max_num_seqs, min(limits, default=None))
    num_blocks = -(-max(lengths) // block_size)
    store = KVStore(model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.kv_dtype, device=device)
    for cache in store.keys + store.values:
        cache.zero_()
    sampler = Sampler((), model.draw_kernels)
    plan = StepPlan(
        sequences=tuple(
            _sequence(i, n, list(range(num_blocks)), num_scored=scored)
            for i, (n, scored) in enumerate(zip(lengths, _num_scored(lengths), strict=True))
        ),
        num_decodes=lengths.count(1),
        copies=(),
    )

    @torch.inference_mode()
    def run() -> None:
        inputs = build_inputs(plan, block_size=block_size, device=device)
        logits, num_sampled = model.forward(inputs, store).logits, len(inputs.samples)
        sampler.sample(logits[:num_sampled], inputs.samples, {})
        sampler.score(logits[num_sampled:], inputs.scores)

    return run


def _lengths(num_tokens: int, num_seqs: int, longest: int | None) -> list[int]:
    """Tokens of each sequence, in order: prompts as long as they may be, beside as many decodes as are left."""
    num_seqs, longest = min(num_seqs, num_tokens), longest or num_tokens
    lengths = []
    for others in reversed(range(num_seqs)):
        lengths.append(min(longest, num_tokens - others))
        num_tokens -= lengths[-1]
    return sorted(lengths)


def _num_scored(lengths: list[int]) -> list[int]:
    """Prompt tokens to score of each sequence, the longest first: as many as a step scores at most."""
    room, found = MAX_SCORED_TOKENS, []
    for length in reversed(lengths):
        found.append(min(length - 1, room))
        room -= found[-1]
    return found[::-1]


def _sequence(seq_id: int, num_tokens: int, block_table: list[int], *, num_scored: int) -> ScheduledSequence:
    """Its token is drawn from a nucleus, with logprobs in one of the sequences: those are computed one by one.

    ``num_scored`` of its prompt's tokens get log-probabilities.
    """
    spec = SampleSpec(
        params=SamplingParams(temperature=1.0, top_p=0.95, logprobs=None if seq_id else MAX_LOGPROBS),
        seed=seq_id,
        index=0,
        position=num_tokens,
        token_ids=[0] * num_tokens,
        num_prompt=num_tokens,
    )
    return ScheduledSequence(
        seq_id=seq_id,
        token_ids=spec.token_ids,
        start=0,
        block_table=block_table,
        samples=(spec,),
        score=ScoreSpec(offset=0, target_ids=(0,) * num_scored, num_top=MAX_LOGPROBS) if num_scored else None,
    )


def _gpu_peak(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return grown


def _resident_growth(run: Callable[[], object]) -> int:
    """Most bytes of memory by which the process grows while ``run`` runs. 0 where no system tells (not Linux)."""
    if not os.path.exists(_STATM):
        run()
        return 0
    _give_back_free_memory()
    before = largest = _resident_bytes()
    ended = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not ended.wait(_POLL_S):
            largest = max(largest, _resident_bytes())

    watcher = threading.Thread(target=watch, name="kvq-profiling")
    watcher.start()
    try:
        run()
    finally:
        ended.set()
        watcher.join()
    return max(largest, _resident_bytes()) - before


def _give_back_free_memory() -> None:
    """What loading left with the allocator would be used again unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    with open(_STATM, encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
