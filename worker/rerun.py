"""Reruns: compute a stored answer again and say where it differs.

Owns what must be the same for that (body, seed, the model's options of then) and the comparison. Changes nothing in
the store. Knows no command line.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from kvq.worker.embeddings import vector_of
from kvq.worker.errors import RowError
from kvq.worker.inference import Inference
from kvq.worker.jobs import ClaimedJob, Endpoint, JobOutcome
from kvq.worker.store_records import ResultRow

if TYPE_CHECKING:
    from kvq.engine.engine import Engine

_SHOWN = 40
# What two correct computations in fp32 may differ by: log-probabilities, and dimensions of a vector of length 1.
TOLERANCE = 1e-4


class Verdict(StrEnum):
    """How an answer that was computed again compares."""

    SAME = "same"
    OTHER_LOGPROBS = "other_logprobs"  # the same text, and log-probabilities that differ by more than rounding
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a choice is not as it was: a character of its text, and what follows there.

    Of an embedding: the first dimension that differs by more than rounding, and the values there.
    """

    choice: int
    position: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A stored answer beside the same job computed now. ``model_before`` is the name the stored one is under.

    ``logprob_difference``: by how much its log-probabilities differ at most, those of the prompt and of tokens that
    were not chosen among them; None where it has none. ``vector_difference``: the same of an embedding's dimensions.
    """

    job_id: str
    seed: int | None
    num_choices: int
    completion_tokens: int
    model_before: str | None
    model_now: str | None
    differences: tuple[Difference, ...]
    logprob_difference: float | None = None
    vector_difference: float | None = None

    @property
    def verdict(self) -> Verdict:
        """The same: every choice has the same text and the same end, and what log-probabilities were asked for.

        Of an embedding: every vector, but for rounding.
        """
        if self.differences:
            return Verdict.DIFFERENT
        return Verdict.OTHER_LOGPROBS if (self.logprob_difference or 0.0) > TOLERANCE else Verdict.SAME


def rerun(
    row: ResultRow, body: Mapping[str, Any], load: Callable[[], Engine], *, served_model_names: tuple[str, ...] = ()
) -> Rerun:
    """Compute ``row``'s job again on the engine that ``load`` makes, alone.

    The engine should take no defaults from the model: those the job had are with its result.

    Raises:
        RowError: the job has no answer to compare, or this engine refuses it.
        EngineError, ConfigError: the engine cannot be loaded.
    """
    if row.response is None or not _answers(row.response):
        raise RowError("invalid_value", f"job {row.job_id} is {row.state.value} and has no answer to compare with")
    outcomes: queue.Queue[JobOutcome | None] = queue.Queue()

    def look_for_fault() -> None:
        if inference.fault is not None:
            outcomes.put(None)

    inference = Inference(
        load, on_outcome=outcomes.put, on_change=look_for_fault, served_model_names=served_model_names
    )
    inference.start()
    try:
        if not inference.wait_ready():
            assert inference.fault is not None
            raise inference.fault
        prepared = inference.prepare(row.endpoint, _as_it_was(row, body))
        inference.submit(_claimed(row, body), prepared)
        outcome = outcomes.get()
        if outcome is None:
            assert inference.fault is not None
            raise inference.fault
    finally:
        inference.stop()
    before, after = _answers(row.response), [] if outcome.response is None else _answers(outcome.response)
    vectors = row.endpoint is Endpoint.EMBEDDINGS
    return Rerun(
        job_id=row.job_id,
        seed=outcome.metrics.seed,
        num_choices=len(before),
        completion_tokens=outcome.metrics.completion_tokens,
        model_before=row.model,
        model_now=outcome.model,
        differences=tuple(_vector_differences(before, after) if vectors else _differences(row.endpoint, before, after)),
        logprob_difference=_largest_difference(_logprobs(row.response), _logprobs(outcome.response or {})),
        vector_difference=_largest_difference(_dimensions(before), _dimensions(after)) if vectors else None,
    )


def _as_it_was(row: ResultRow, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body, with what was decided for it when it ran."""
    decided = {**(row.model_defaults or {}), "seed": row.metrics.seed}
    return {**body, **{name: value for name, value in decided.items() if body.get(name) is None}}


def _claimed(row: ResultRow, body: Mapping[str, Any]) -> ClaimedJob:
    return ClaimedJob(
        seq=row.seq,
        job_id=row.job_id,
        batch_id=row.batch_id,
        custom_id=row.custom_id,
        endpoint=row.endpoint,
        body=dict(body),
        priority=0,
        attempt=row.attempts,
        claim_id=0,  # none: the answer is compared, not stored
        crashes=0,
        queue_ms=0.0,
    )


def _differences(endpoint: Endpoint, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Difference]:
    found = []
    for index, old in enumerate(before):
        new = after[index] if index < len(after) else None
        old_text, new_text = _text(endpoint, old), "" if new is None else _text(endpoint, new)
        if old_text == new_text and new is not None and old["finish_reason"] == new["finish_reason"]:
            continue
        pairs = zip(old_text, new_text, strict=False)
        shorter = min(len(old_text), len(new_text))
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        found.append(
            Difference(
                choice=index,
                position=position,
                before=_from(old_text, position, old["finish_reason"]),
                after=_from(new_text, position, "no answer" if new is None else new["finish_reason"]),
            )
        )
    return found


def _answers(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of a response, or its embeddings."""
    return list(response.get("choices") or response.get("data") or ())


def _vector_differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Difference]:
    found = []
    for index, old in enumerate(before):
        values, now = vector_of(old), vector_of(after[index]) if index < len(after) else ()
        limit = TOLERANCE * max(1.0, *map(abs, values))  # one that is not normalised may be longer
        shorter = min(len(values), len(now))
        position = next((i for i in range(shorter) if abs(values[i] - now[i]) > limit), shorter)
        if position == len(values) == len(now):
            continue
        shown = [str(vector[position]) if position < len(vector) else "(ended)" for vector in (values, now)]
        found.append(Difference(choice=index, position=position, before=shown[0], after=shown[1]))
    return found


def _dimensions(answers: list[dict[str, Any]]) -> Iterator[float]:
    for answer in answers:
        yield from vector_of(answer)


def _largest_difference(before: Iterator[float], after: Iterator[float]) -> float | None:
    """Of all numbers of two responses, each beside its counterpart; one that is missing counts as 0."""
    pairs = zip_longest(before, after, fillvalue=0.0)
    return max((abs(old - new) for old, new in pairs), default=None)


def _logprobs(response: Mapping[str, Any]) -> Iterator[float]:
    """In the order in which every shape of a response has them; a first token, which nothing precedes, has none."""
    for choice in response.get("choices") or ():
        found = choice.get("logprobs") or {}
        yield from (value for value in found.get("token_logprobs") or () if value is not None)
        for candidates in found.get("top_logprobs") or ():
            yield from (candidates or {}).values()
        for token in found.get("content") or ():
            yield from (one["logprob"] for one in (token, *token["top_logprobs"]))
        yield from _prompt_logprobs(choice)
    yield from _prompt_logprobs(response)


def _prompt_logprobs(owner: Mapping[str, Any]) -> Iterator[float]:
    for candidates in owner.get("prompt_logprobs") or ():
        yield from (one["logprob"] for one in (candidates or {}).values())


def _text(endpoint: Endpoint, choice: dict[str, Any]) -> str:
    """What a choice says; calls of tools are spelled after the text before them."""
    if endpoint is Endpoint.COMPLETIONS:
        return str(choice["text"])
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message["content"] or "") + "".join(f"{call['name']}({call['arguments']})" for call in calls)


def _from(text: str, position: int, finish_reason: str) -> str:
    """What follows at ``position``: text, or how the answer ended there."""
    rest = text[position : position + _SHOWN]
    return rest if rest else f"(ended: {finish_reason})"
