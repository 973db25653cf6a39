"""Advice: which max_model_len and max_num_seqs suit a set of requests and a memory, and why.

Owns the two rules and the words for them. Pure arithmetic; decides nothing for the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.engine.memory_plan import MemoryPlan

# With more in a batch a step is decided by arithmetic, and only the first answers come later.
MOST_USEFUL_SEQS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMix:
    """What a set of requests asks for, in tokens.

    ``longest_request`` is prompt plus max_tokens, over those that bound their answers; the ``num_open_ended`` others
    may fill the model. ``mean_output_tokens`` is of all samples of a request, at most.
    """

    num_requests: int
    distinct_prompt_tokens: int
    longest_prompt: int
    longest_request: int
    num_open_ended: int
    mean_output_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Two settings and the reasoning. ``num_full_sequences`` would fit without sharing anything, at full length."""

    max_model_len: int
    max_num_seqs: int
    num_full_sequences: int
    reasons: tuple[str, ...]


def advise(mix: RequestMix, memory: MemoryPlan, *, model_limit: int | None) -> Advice:
    """Settings for ``mix``; None of them is above what fits."""
    max_model_len, length_reason = _length(mix, memory, model_limit)
    num_full = memory.num_tokens // max_model_len
    max_num_seqs, seqs_reason = _sequences(mix, memory)
    return Advice(
        max_model_len=max_model_len,
        max_num_seqs=max(1, max_num_seqs),
        num_full_sequences=num_full,
        reasons=(
            length_reason,
            seqs_reason,
            f"sharing nothing and each {max_model_len:,} tokens long, {num_full:,} would fit at the same time",
        ),
    )


def _length(mix: RequestMix, memory: MemoryPlan, model_limit: int | None) -> tuple[int, str]:
    wanted = -(-mix.longest_request // memory.block_size) * memory.block_size
    reason = f"the longest row needs {mix.longest_request:,} tokens, prompt and answer together"
    if mix.num_open_ended:
        rows = "1 row sets" if mix.num_open_ended == 1 else f"{mix.num_open_ended:,} rows set"
        wanted = max(wanted, model_limit or memory.num_tokens)
        reason = f"{rows} no max_tokens, so an answer may fill the model; setting it would allow a smaller number"
    if model_limit is not None and wanted > model_limit:
        wanted = model_limit
        if mix.longest_request > model_limit:
            reason += f", more than the model's {model_limit:,}: longer answers are cut there"
    if wanted > memory.num_tokens > 0:
        wanted = memory.num_tokens
        reason += f"; the KV cache holds {memory.num_tokens:,} tokens, no sequence can be longer"
    return max(1, wanted), f"max_model_len {max(1, wanted):,}: {reason}"


def _sequences(mix: RequestMix, memory: MemoryPlan) -> tuple[int, str]:
    own = mix.distinct_prompt_tokens / mix.num_requests
    output = mix.mean_output_tokens
    each = max(1, -(-int(own + output + 0.5) // memory.block_size)) * memory.block_size
    fits = max(0, memory.num_tokens - mix.longest_prompt) // each
    chosen = max(1, min(fits, mix.num_requests, MOST_USEFUL_SEQS))
    reason = (
        f"a row takes about {own:,.0f} prompt tokens that it shares with no other and at most {output:,.0f} of output "
        f"on average; beside the longest prompt, {fits:,} such rows fit into {memory.num_tokens:,} tokens of cache"
    )
    if chosen == mix.num_requests < fits:
        reason += f", more than the {mix.num_requests:,} there are"
    elif chosen == MOST_USEFUL_SEQS < fits:
        reason += f"; beyond {MOST_USEFUL_SEQS} a step is bound by arithmetic, not by memory"
    return chosen, f"max_num_seqs {chosen:,}: {reason}"
