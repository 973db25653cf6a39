"""StopCheck: does a sequence end with the token it just got?

Owns the rules of ending: end-of-sequence, stop ids, stop strings, length. Knows nothing of blocks or steps.
"""

from __future__ import annotations

from dataclasses import replace

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
            seq.logprobs.append(self.token_logprob(token))
        may_stop = seq.num_output >= params.min_tokens
        if may_stop and not params.ignore_eos and token.token_id in self._tokenizer.eos_token_ids:
            self._end_by_token(seq)
        elif may_stop and token.token_id in params.stop_token_ids:
            self._end_by_token(seq)
            seq.stop_reason = token.token_id
        elif may_stop and params.stop and self._ends_with_stop(seq):
            seq.finish_reason = FinishReason.STOP
        elif seq.matcher is not None and seq.matcher.is_complete(seq.output_ids):
            seq.finish_reason = FinishReason.STOP  # nothing can follow, whatever min_tokens says
        elif seq.num_output == params.max_tokens or len(seq.token_ids) >= self._max_model_len:
            seq.finish_reason = FinishReason.LENGTH

    def text(self, seq: Sequence) -> str:
        """The sequence's output text, cut at the stop string that ended it."""
        if seq.text is not None:
            return seq.text
        return self._tokenizer.continuation(
            seq.output_ids, skip_special_tokens=seq.state.request.params.skip_special_tokens
        )

    def _end_by_token(self, seq: Sequence) -> None:
        """The token that ends a sequence is part of its text only on request, as a stop string is."""
        params = seq.state.request.params
        seq.finish_reason = FinishReason.STOP
        if not params.include_stop_str_in_output:
            seq.text = self._tokenizer.continuation(seq.output_ids[:-1], skip_special_tokens=params.skip_special_tokens)

    def _ends_with_stop(self, seq: Sequence) -> bool:
        """True when a stop string is complete; the text up to it (or with it) becomes the sequence's text.

        A token can complete a stop string that began tokens earlier, so a tail that surely covers the longest one is
        decoded first: each token spells at least one byte, and the head of the tail may be cut inside a character.
        One that was complete before ``min_tokens`` does not count.
        """
        params = seq.state.request.params
        longest = max(len(s.encode()) for s in params.stop)
        tail = self._tokenizer.continuation(
            seq.token_ids[max(seq.num_prompt, len(seq.token_ids) - longest - 8) :],
            skip_special_tokens=params.skip_special_tokens,
        )
        if not any(s in tail for s in params.stop):
            return False
        text = self._tokenizer.continuation(seq.output_ids, skip_special_tokens=params.skip_special_tokens)
        num_early = self._num_chars_before(params.min_tokens, seq)
        places = [(text.find(s, max(0, num_early - len(s) + 1)), s) for s in params.stop]
        found = [(start, s) for start, s in places if start >= 0]
        if not found:
            return False
        start, stop = min(found)
        seq.text = text[: start + len(stop)] if params.include_stop_str_in_output else text[:start]
        seq.stop_reason = stop
        return True

    def _num_chars_before(self, num_tokens: int, seq: Sequence) -> int:
        """Length of what the output spells before its ``num_tokens``-th token, whole characters."""
        if num_tokens <= 1:
            return 0
        early = self._tokenizer.continuation(
            seq.output_ids[: num_tokens - 1], skip_special_tokens=seq.state.request.params.skip_special_tokens
        )
        return len(early.rstrip("\ufffd"))

    def token_logprob(self, token: SampledToken) -> TokenLogprob:
        """A token's log-probability with what it spells."""
        assert token.logprob is not None
        top = tuple(self._spelled(token_id, logprob, rank + 1) for rank, (token_id, logprob) in enumerate(token.top))
        return replace(self._spelled(token.token_id, token.logprob, token.rank), top=top)

    def _spelled(self, token_id: int, logprob: float, rank: int | None) -> TokenLogprob:
        return TokenLogprob(
            token_id=token_id,
            token=self._tokenizer.continuation([token_id], skip_special_tokens=False),
            logprob=logprob,
            raw=self._tokenizer.token_bytes(token_id),
            special=self._tokenizer.is_special(token_id),
            rank=rank,
        )
