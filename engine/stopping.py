"""StopCheck: does a sequence end with the token it just got?

Owns the rules of ending: end-of-sequence, stop ids, stop strings, length. Knows nothing of blocks or steps.
"""

from __future__ import annotations

from kvq.engine.request import FinishReason, TokenLogprob
from kvq.engine.sequence import Sequence
from kvq.engine.step import SampledToken
from kvq.engine.tokenizer import Tokenizer


class StopCheck:
    """Sets ``finish_reason``, ``stop_reason`` and ``text`` on a sequence at its last token."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def __call__(self, seq: Sequence, token: SampledToken) -> None:
        """Look at the token just appended to ``seq``."""
        params = seq.state.request.params
        if params.logprobs is not None:
            seq.logprobs.append(self._logprob(token))
        may_stop = seq.num_output >= params.min_tokens
        if may_stop and not params.ignore_eos and token.token_id in self._tokenizer.eos_token_ids:
            seq.finish_reason = FinishReason.STOP
        elif may_stop and token.token_id in params.stop_token_ids:
            seq.finish_reason, seq.stop_reason = FinishReason.STOP, token.token_id
        elif may_stop and params.stop and self._ends_with_stop(seq):
            seq.finish_reason = FinishReason.STOP
        elif seq.num_output == params.max_tokens or len(seq.token_ids) >= self._max_model_len:
            seq.finish_reason = FinishReason.LENGTH

    def text(self, seq: Sequence) -> str:
        """The sequence's output text, cut at the stop string that ended it."""
        if seq.text is not None:
            return seq.text
        return self._tokenizer.decode(seq.output_ids, skip_special_tokens=seq.state.request.params.skip_special_tokens)

    def _ends_with_stop(self, seq: Sequence) -> bool:
        """True when a stop string is complete; the text up to it (or with it) becomes the sequence's text.

        A token can complete a stop string that began tokens earlier, so a tail that surely covers the longest one is
        decoded first: each token spells at least one byte, and the head of the tail may be cut inside a character.
        """
        params = seq.state.request.params
        longest = max(len(s.encode()) for s in params.stop)
        tail = self._tokenizer.decode(
            seq.token_ids[max(seq.num_prompt, len(seq.token_ids) - longest - 8) :],
            skip_special_tokens=params.skip_special_tokens,
        )
        if not any(s in tail for s in params.stop):
            return False
        text = self._tokenizer.decode(seq.output_ids, skip_special_tokens=params.skip_special_tokens)
        found = [(text.find(s), s) for s in params.stop if s in text]
        if not found:
            return False
        start, stop = min(found)
        seq.text = text[: start + len(stop)] if params.include_stop_str_in_output else text[:start]
        seq.stop_reason = stop
        return True

    def _logprob(self, token: SampledToken) -> TokenLogprob:
        assert token.logprob is not None
        decode = self._tokenizer.decode
        return TokenLogprob(
            token_id=token.token_id,
            token=decode([token.token_id], skip_special_tokens=False),
            logprob=token.logprob,
            top=tuple((i, decode([i], skip_special_tokens=False), lp) for i, lp in token.top),
        )
