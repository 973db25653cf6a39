"""Outputs: what a finished request's state comes to, for those who asked.

Owns the translation of RequestState into RequestOutput. Decides nothing and changes nothing.
"""

from __future__ import annotations

import time

from kvq.engine.pooling import embedding_of
from kvq.engine.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprob
from kvq.engine.sequence import RequestState, Sequence
from kvq.engine.stopping import StopCheck


def request_output(state: RequestState, stop_check: StopCheck) -> RequestOutput:
    """The output of a request that ended now, or was aborted. ``stop_check`` spells its tokens."""
    request, now = state.request, time.monotonic()
    sequences, embeds = sorted(state.sequences, key=lambda seq: seq.index), request.pooling is not None
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        outputs=() if embeds else tuple(_sample_output(seq, stop_check) for seq in sequences),
        metrics=RequestMetrics(
            arrival_s=request.arrival_s,
            first_scheduled_s=state.first_scheduled_s or now,
            first_token_s=state.first_token_s or now,
            finished_s=now,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=state.cached_tokens,
            computed_tokens=state.computed_tokens,
            completion_tokens=sum(seq.num_output for seq in state.sequences),
            preemptions=state.preemptions,
            seed=state.seed,
            num_draft_tokens=state.num_draft_tokens,
            num_accepted_tokens=state.num_accepted_tokens,
        ),
        prompt_logprobs=_prompt_logprobs(state, stop_check),
        embedding=embedding_of(state) if embeds else None,
    )


def _sample_output(seq: Sequence, stop_check: StopCheck) -> CompletionOutput:
    request, text = seq.state.request, stop_check.text(seq)
    return CompletionOutput(
        index=seq.index,
        text=text,
        token_ids=tuple(seq.output_ids),
        finish_reason=seq.finish_reason or FinishReason.ABORT,
        stop_reason=seq.stop_reason,
        logprobs=tuple(seq.logprobs) if request.params.logprobs is not None else None,
        format_valid=None if request.grammar is None else request.grammar.accepts(text),
        error=seq.error,
    )


def _prompt_logprobs(state: RequestState, stop_check: StopCheck) -> tuple[TokenLogprob | None, ...] | None:
    if state.request.params.prompt_logprobs is None or state.wants_scores:
        return None
    return (None, *(stop_check.token_logprob(token) for token in state.prompt_scores))
