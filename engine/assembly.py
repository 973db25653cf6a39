"""Assembly: what a step is to compute for one sequence, written down for the runner.

Owns the translation of a sequence and a number of tokens into a ScheduledSequence: which tokens are drawn, which are
scored. Decides nothing and changes nothing.
"""

from __future__ import annotations

from kvq.engine.request import PoolingType
from kvq.engine.sequence import Sequence
from kvq.engine.step import SampleSpec, ScheduledSequence, ScoreSpec

_STAND_IN = 0  # the id of a token that is not known yet


def scheduled(seq: Sequence, num_tokens: int, guesses: list[int]) -> ScheduledSequence:
    """The next ``num_tokens`` tokens of ``seq``, which draw a token where they reach its end, then ``guesses``."""
    end = seq.num_computed + num_tokens
    awaits_token = end > len(seq.token_ids)
    assert not awaits_token or num_tokens == 1
    return ScheduledSequence(
        seq_id=seq.seq_id,
        token_ids=[_STAND_IN] if awaits_token else seq.token_ids[seq.num_computed : end] + guesses,
        start=seq.num_computed,
        block_table=seq.block_table,
        samples=_samples(seq, guesses) if end == seq.num_tokens and seq.state.request.pooling is None else (),
        num_drafts=len(guesses),
        score=_score(seq, end),
        lora=seq.state.request.lora,
        num_pooled=_num_pooled(seq, end),
        awaits_token=awaits_token,
    )


def _samples(seq: Sequence, guesses: list[int]) -> tuple[SampleSpec, ...]:
    state = seq.state
    # The first token of every sample comes from the prompt's one logits row.
    indices = range(state.request.params.n) if seq.num_tokens == seq.num_prompt else (seq.index,)
    token_ids = seq.token_ids + guesses if guesses else seq.token_ids
    return tuple(
        SampleSpec(
            params=state.request.params,
            seed=state.seed,
            index=index,
            position=position,
            token_ids=token_ids,
            num_prompt=seq.num_prompt,
            bad_word_ids=state.request.bad_word_ids,
            matcher=seq.matcher,
        )
        for position in range(seq.num_tokens, seq.num_tokens + len(guesses) + 1)
        for index in indices
    )


def _score(seq: Sequence, end: int) -> ScoreSpec | None:
    """The prompt tokens to score when those from ``num_computed`` up to ``end`` are computed."""
    if not seq.state.wants_scores:
        return None
    request = seq.state.request
    first = max(seq.num_computed, len(seq.state.prompt_scores))
    last = min(end, seq.num_prompt - 1)
    if first >= last:
        return None
    return ScoreSpec(
        offset=first - seq.num_computed,
        target_ids=request.prompt_token_ids[first + 1 : last + 1],
        num_top=request.params.prompt_logprobs or 0,
    )


def _num_pooled(seq: Sequence, end: int) -> int:
    """Hidden states to sum: those of all tokens not summed yet, or that of the prompt's last."""
    pooling = seq.state.request.pooling
    if pooling is None:
        return 0
    if pooling.type is PoolingType.LAST:
        return int(end == seq.num_prompt)
    return max(0, end - max(seq.num_computed, seq.state.num_pooled))
