"""RequestLimits: what a request may ask of one model, told before it runs.

Owns truncation of prompts and the refusal of prompts and token ids the model cannot take. Knows no weights and no
blocks, so that a file can be judged where neither is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.engine.errors import InvalidParameter, PromptTooLong, RequestError
from kvq.engine.request import PoolingParams, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of one engine: most tokens of prompt plus output, and the number of token ids."""

    max_model_len: int
    vocab_size: int

    def fit(self, token_ids: Sequence[int], params: SamplingParams | PoolingParams) -> list[int]:
        """The tokens of the prompt that ``truncate_prompt_tokens`` leaves: the last ones."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return list(token_ids)
        if keep == -1:
            room = params.max_tokens or 1 if isinstance(params, SamplingParams) else 1
            keep = max(1, self.max_model_len - room)
        return list(token_ids[-keep:])

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what cannot run.

        Raises:
            PromptTooLong: no room for an output token.
            InvalidParameter: a token id that the model does not have.
            RequestError: an empty prompt.
        """
        self.check_prompt(token_ids)
        for param in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(params, param) or ():
                if not 0 <= token_id < self.vocab_size:
                    raise InvalidParameter(
                        param, f"token {token_id} is not in the vocabulary (0 to {self.vocab_size - 1})"
                    )

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Refuse a prompt that cannot run, whatever is asked of it.

        Raises:
            RequestError: as ``check``.
        """
        if not token_ids:
            raise RequestError("prompt: is empty")
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLong(num_tokens=len(token_ids), limit=self.max_model_len)
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise InvalidParameter("prompt", f"token ids must be between 0 and {self.vocab_size - 1}")
