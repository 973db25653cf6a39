"""NgramProposer: what followed the last time these tokens came.

Owns an index of each sequence's own tokens, built when it is first asked for and grown as they come. Knows nothing of
steps or of when guessing pays.
Source: prompt lookup decoding (A. Saxena, 2023), vLLM's ``ngram`` method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvq.engine.sequence import Sequence
from kvq.engine.speculation import Reach

# Earlier places compared for the longest match; a bound, so that a token said all the time stays cheap.
_MAX_CANDIDATES = 16


@dataclass(slots=True)
class _History:
    """Ends of the n-grams of one sequence, but for the n-gram at its very end."""

    ends_by_ngram: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    num_indexed: int = 0
    match: int = 0  # where the continuation found last begins


class NgramProposer:
    """Guesses that a sequence goes on as it did after the latest of its longest earlier matches.

    Args:
        shortest: fewest tokens that must match.
        longest: most that are compared; longer matches are more often right.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._histories: dict[int, _History] = {}

    def reach(self, seq: Sequence, limit: int) -> Reach | None:
        """How far the sequence's own tokens can say how it goes on, and how long the match is; None: not at all."""
        history = self._histories.setdefault(seq.seq_id, _History())
        self._index(history, seq.token_ids)
        tokens = seq.token_ids
        best = 0
        for end in reversed(history.ends_by_ngram.get(tuple(tokens[-self._shortest :]), ())[-_MAX_CANDIDATES:]):
            length = self._match_length(tokens, end)
            if length > best:
                best, history.match = length, end
                if length == self._longest:
                    break
        return Reach(num_tokens=limit, kind=best) if best else None

    def propose(self, lengths: Mapping[Sequence, int]) -> dict[int, list[int]]:
        """The guesses for sequences whose ``reach`` was just asked, by sequence id."""
        return {
            seq.seq_id: _continuation(seq.token_ids, self._histories[seq.seq_id].match, num_tokens)
            for seq, num_tokens in lengths.items()
        }

    def forget(self, seq_id: int) -> None:
        """The sequence ended."""
        self._histories.pop(seq_id, None)

    def _index(self, history: _History, tokens: list[int]) -> None:
        size = self._shortest
        for end in range(max(size, history.num_indexed + 1), len(tokens)):
            history.ends_by_ngram.setdefault(tuple(tokens[end - size : end]), []).append(end)
        history.num_indexed = max(history.num_indexed, len(tokens) - 1)

    def _match_length(self, tokens: list[int], end: int) -> int:
        """Tokens before ``end`` that equal the last ones, at most ``longest``; the shortest are known to."""
        length, most = self._shortest, min(self._longest, end)
        while length < most and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length


def _continuation(tokens: list[int], start: int, num_tokens: int) -> list[int]:
    """The tokens from ``start`` on; where they reach the end, the match goes on with the guess itself."""
    guess = tokens[start : start + num_tokens]
    while len(guess) < num_tokens:
        guess.append(guess[len(guess) - (len(tokens) - start)])
    return guess
