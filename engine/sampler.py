"""Sampler: logits to tokens.

Owns the sampling rules and the random streams. Knows rows and SampleSpecs, nothing of batches: a row's token
depends on its own logits and spec only. The stream of a sample is a counter-based generator keyed by
(seed, sample index, position, token id), so a neighbour, a preemption or a restart never changes a draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from kvq.engine.drawn_tokens import DrawnTokens, not_finite
from kvq.engine.grammar import TokenMask
from kvq.engine.request import SamplingParams
from kvq.engine.staging import to_device
from kvq.engine.step import SampledToken, SampleSpec, ScoreSpec

_MASK64 = (1 << 64) - 1
# Candidates tried before a full sort: the nucleus of a peaked distribution is almost always inside.
_TOP_CANDIDATES = 256


def stream_key(seed: int, index: int, position: int) -> int:
    """64 bits that name one draw of one stream.

    Source: SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014, figure 17), applied to each key in turn.
    """
    state = _mix(seed & _MASK64)
    state = _mix((state ^ (index * 0x9E3779B97F4A7C15)) & _MASK64)
    return _mix((state ^ (position * 0xD1B54A32D192ED03)) & _MASK64)


def gumbel_noise(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, of the shape of ``token_ids`` (int64): a function of (key, token id) only."""
    bits = _mix_tensor(token_ids ^ _signed(key))
    uniform = (_shift_right(bits, 11).double() + 0.5) / (1 << 53)
    return -torch.log(-torch.log(uniform))


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _mix_tensor(values: torch.Tensor) -> torch.Tensor:
    """``_mix`` on int64 tensors, whose arithmetic wraps as unsigned 64-bit arithmetic does."""
    values = values + _signed(0x9E3779B97F4A7C15)
    values = (values ^ _shift_right(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift_right(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shift_right(values, 31)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 tensors (torch's is arithmetic)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class DrawKernels(Protocol):
    """Draws many tokens in one call: ``CpuKernels``, which return them, or ``TritonDraws``, which leave them there."""

    def draw(
        self,
        logits: torch.Tensor,
        *,
        rows: Sequence[int],
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        keys: Sequence[int],
    ) -> torch.Tensor | list[int]:
        """A token from ``logits[row]`` for each of the given rows, with the noise of its key."""


class Sampler:
    """Draws tokens for rows of logits.

    Args:
        eos_token_ids: tokens barred while a sequence is shorter than its min_tokens.
        kernels: draws many rows in one call; without them rows are drawn one after the other.
    """

    def __init__(self, eos_token_ids: Iterable[int], kernels: DrawKernels | None = None) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        self._kernels = kernels

    def sample(
        self,
        logits: torch.Tensor,
        rows: tuple[tuple[int, tuple[SampleSpec, ...]], ...],
        mask_by_seq: Mapping[int, TokenMask],
    ) -> dict[int, tuple[SampledToken, ...]]:
        """Draw for each row of ``logits`` [R, V] the tokens its specs ask for; by sequence id.

        A sequence may have several rows; its tokens come in their order. ``mask_by_seq``: the tokens allowed to those
        sequences that have a matcher.
        """
        if not rows:
            return {}
        together = [
            (row, specs)
            for row, (_, specs) in enumerate(rows)
            if self._kernels is not None and specs[0].is_plain and not specs[0].params.greedy
        ]
        largest, greedy_ids, token_ids = _fetch(logits.max(dim=-1), self._draw_together(logits, together))
        drawn = {row: tuple(SampledToken(token_id=next(token_ids)) for _ in specs) for row, specs in together}
        tokens: dict[int, tuple[SampledToken, ...]] = {}
        for row, (seq_id, specs) in enumerate(rows):
            tokens[seq_id] = tokens.get(seq_id, ()) + (
                _failed(not_finite(largest[row]), specs)
                if not math.isfinite(largest[row])
                else drawn[row]
                if row in drawn
                else self._sample_row(logits[row], specs, greedy_ids[row], mask_by_seq.get(seq_id))
            )
        return tokens

    def start(self, logits: torch.Tensor, rows: tuple[tuple[int, tuple[SampleSpec, ...]], ...]) -> DrawnTokens:
        """As ``sample`` for rows of one plain spec each, of different sequences, without waiting for the device."""
        seq_ids = [seq_id for seq_id, _ in rows]
        if self._kernels is None:
            largest = logits.max(dim=-1).values
            tokens = self.sample(logits, rows, {})
            ids = np.array([tokens[seq_id][0].token_id for seq_id in seq_ids], dtype=np.int64)
            return DrawnTokens(to_device(ids, logits.device), largest, seq_ids)
        together = [(row, specs) for row, (_, specs) in enumerate(rows) if not specs[0].params.greedy]
        drawn = self._draw_together(logits, together)
        if isinstance(drawn, list):
            drawn = torch.tensor(drawn, dtype=torch.int64)
        if len(together) == len(rows):  # finding the largest without its place takes half the time
            return DrawnTokens(drawn, logits.amax(dim=-1), seq_ids)
        largest, token_ids = logits.max(dim=-1)
        if together:
            places = to_device(np.array([row for row, _ in together], dtype=np.int64), logits.device)
            token_ids.index_copy_(0, places, drawn)
        return DrawnTokens(token_ids, largest, seq_ids)

    def _draw_together(
        self, logits: torch.Tensor, rows: list[tuple[int, tuple[SampleSpec, ...]]]
    ) -> torch.Tensor | list[int]:
        """Draw from rows as they are, all in one call."""
        if not rows or self._kernels is None:
            return []
        draws = [(row, spec) for row, specs in rows for spec in specs]
        vocab_size = logits.shape[1]
        return self._kernels.draw(
            logits,
            rows=[row for row, _ in draws],
            temperature=[spec.params.temperature for _, spec in draws],
            top_k=[min(spec.params.top_k or vocab_size, vocab_size) for _, spec in draws],
            top_p=[spec.params.top_p for _, spec in draws],
            min_p=[spec.params.min_p for _, spec in draws],
            keys=[stream_key(spec.seed, spec.index, spec.position) for _, spec in draws],
        )

    def score(
        self, logits: torch.Tensor, scores: tuple[tuple[int, ScoreSpec], ...]
    ) -> dict[int, tuple[SampledToken, ...]]:
        """Log-probabilities of given tokens under the model's own distribution, a row of ``logits`` [R, V] each."""
        scored, start = {}, 0
        for seq_id, spec in scores:
            rows = logits[start : start + len(spec.target_ids)].float()
            start += len(spec.target_ids)
            scored[seq_id] = tuple(
                _with_logprobs(token_id, row, spec.num_top) for token_id, row in zip(spec.target_ids, rows, strict=True)
            )
        return scored

    def _sample_row(
        self, logits: torch.Tensor, specs: tuple[SampleSpec, ...], greedy_id: int, mask: TokenMask | None
    ) -> tuple[SampledToken, ...]:
        params = specs[0].params
        if mask is not None and mask.failure is not None:
            return _failed(mask.failure, specs)
        if params.greedy and specs[0].is_plain:
            return tuple(SampledToken(token_id=greedy_id) for _ in specs)
        logits = self._alter(logits.float(), specs[0])
        if mask is not None:
            allowed = torch.from_numpy(mask.allowed(logits.shape[-1])).to(logits.device)
            logits = logits.masked_fill(~allowed, float("-inf"))
        largest = float(logits.max())
        if not math.isfinite(largest):
            return _failed(
                "no token is left that the request's options allow here"
                if largest == -math.inf
                else f"the request's options give a token a logit of {largest}",
                specs,
            )
        if params.greedy:
            token_ids = [int(logits.argmax())] * len(specs)
        else:
            token_ids = _draw(logits / params.temperature, params, specs)
        if params.logprobs is None:
            return tuple(SampledToken(token_id=token_id) for token_id in token_ids)
        return tuple(_with_logprobs(token_id, logits, params.logprobs) for token_id in token_ids)

    def _alter(self, logits: torch.Tensor, spec: SampleSpec) -> torch.Tensor:
        """Bias, penalties and barred tokens; returns ``logits`` itself where nothing applies."""
        if not spec.alters_logits:
            return logits
        params, logits = spec.params, logits.clone()
        for token_id, bias in params.logit_bias.items():  # before the penalties, as vLLM and transformers do
            logits[token_id] += bias
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(spec.token_ids[: spec.position])), device=logits.device)
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        output = spec.token_ids[spec.num_prompt : spec.position]
        if output and (params.presence_penalty or params.frequency_penalty):
            ids, counts = torch.unique(torch.tensor(output, device=logits.device), return_counts=True)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if spec.must_go_on:
            barred = list(params.stop_token_ids) + ([] if params.ignore_eos else self._eos_token_ids)
            logits[barred] = float("-inf")
        for *head, last in spec.bad_word_ids:
            if not head or output[-len(head) :] == head:
                logits[last] = float("-inf")
        if params.allowed_token_ids is not None:
            allowed = list(params.allowed_token_ids)
            kept = logits[allowed]
            logits.fill_(float("-inf"))
            logits[allowed] = kept
        return logits


def _fetch(
    best: tuple[torch.Tensor, torch.Tensor], drawn: torch.Tensor | list[int]
) -> tuple[list[float], list[int], Iterator[int]]:
    """Largest logits [R], their places [R] and drawn tokens, on the host: one wait for the device."""
    largest, places = best
    if isinstance(drawn, list):
        return largest.tolist(), places.tolist(), iter(drawn)
    num_rows = len(largest)
    everything = torch.cat((largest.double().view(torch.int64), places, drawn)).cpu()
    return (
        everything[:num_rows].view(torch.float64).tolist(),
        everything[num_rows : 2 * num_rows].tolist(),
        iter(everything[2 * num_rows :].tolist()),
    )


def _failed(why: str, specs: tuple[SampleSpec, ...]) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(token_id=0, failure=why) for _ in specs)


def _draw(logits: torch.Tensor, params: SamplingParams, specs: tuple[SampleSpec, ...]) -> list[int]:
    """Draw one token per spec from the same scaled logits [V], by the Gumbel-max trick.

    The largest logit plus noise wins, so rounding differences in the logits change a draw only in a near tie;
    inverting a cumulative sum would let them move every boundary.
    """
    token_ids = _candidates(logits, params)
    kept = logits[token_ids].double()
    return [
        int(token_ids[(kept + gumbel_noise(stream_key(s.seed, s.index, s.position), token_ids)).argmax()])
        for s in specs
    ]


def _candidates(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Ids of the tokens that may be drawn: top-k, then top-p over what is left, then min-p (vLLM's effects)."""
    vocab_size = logits.shape[-1]
    top_k = min(params.top_k or vocab_size, vocab_size)
    if top_k == vocab_size and params.top_p >= 1 and params.min_p == 0:
        return torch.arange(vocab_size, device=logits.device)
    normaliser = torch.logsumexp(logits, dim=-1)
    for count in (min(_TOP_CANDIDATES, vocab_size), vocab_size):
        values, token_ids = logits.topk(min(count, top_k))
        probs = (values - normaliser).exp()
        if top_k <= count:
            probs /= probs.sum()
        if count >= top_k or float(probs.sum()) >= params.top_p:
            break
        if params.min_p > 0 and float(probs[-1]) < params.min_p * float(probs[0]):
            break
    keep = probs.cumsum(dim=-1) - probs < params.top_p
    keep &= probs >= params.min_p * probs[0]
    keep[0] = True
    return token_ids[keep]


def _with_logprobs(token_id: int, logits: torch.Tensor, num_top: int) -> SampledToken:
    """The token with its log-probability under the distribution of ``logits`` [V], before temperature."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = logprobs.topk(min(num_top, logits.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    logprob = logprobs[token_id]
    rank = int((logprobs > logprob).sum()) + 1
    return SampledToken(token_id=token_id, logprob=float(logprob), rank=rank, top=top)
