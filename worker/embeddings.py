"""Embedding jobs: bodies of ``/v1/embeddings``, the prompts they hold, and the answers they get.

Owns the fields of such a body, the split of a job into one request of the engine for each input, and OpenAI's response.
Knows no engine and no SQL. Invariant: a job has as many vectors as inputs, in their order, or none.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvq.engine.errors import InvalidParameter
from kvq.engine.request import PoolingParams, RequestOutput
from kvq.worker.errors import RowError
from kvq.worker.json_values import as_integer, as_text, as_token_id, wrong_type
from kvq.worker.limits import MAX_PROMPT_BYTES, MAX_PROMPT_TOKEN_IDS

FIELDS = frozenset({"model", "input", "encoding_format", "dimensions", "truncate_prompt_tokens"})
MAX_INPUTS = 2048  # OpenAI's
_ENCODINGS = ("float", "base64")

Input = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBody:
    """What an embedding body asks for: a vector for each input, a text or token ids."""

    inputs: tuple[Input, ...]
    params: PoolingParams = field(default_factory=PoolingParams)
    encoding_format: str = "float"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEmbedding:
    """An embedding body turned into what the engine takes."""

    prompts: tuple[tuple[int, ...], ...]
    params: PoolingParams
    encoding_format: str


def parse_embedding(fields: Mapping[str, Any]) -> EmbeddingBody:
    """Read the fields of a body, null ones left out.

    Raises:
        RowError: naming the field that is missing, or of a wrong type or value.
    """
    encoding = as_text("encoding_format", fields.get("encoding_format", "float"))
    if encoding not in _ENCODINGS:
        raise RowError(
            "invalid_value",
            f"encoding_format: must be {' or '.join(_ENCODINGS)}, got {encoding!r}",
            param="encoding_format",
        )
    numbers = {n: as_integer(n, fields[n]) for n in ("dimensions", "truncate_prompt_tokens") if n in fields}
    try:
        params = PoolingParams(
            dimensions=numbers.get("dimensions"), truncate_prompt_tokens=numbers.get("truncate_prompt_tokens")
        )
    except InvalidParameter as err:
        raise RowError("invalid_value", str(err), param=err.param) from err
    return EmbeddingBody(inputs=_inputs(fields), params=params, encoding_format=encoding)


def _inputs(fields: Mapping[str, Any]) -> tuple[Input, ...]:
    """A string, a list of strings, token ids, or a list of token id lists."""
    if "input" not in fields:
        raise RowError("missing_field", "input: is missing; an embedding needs one", param="input")
    given = fields["input"]
    if isinstance(given, str):
        found: tuple[Input, ...] = (_text("input", given),)
    elif not isinstance(given, list):
        raise wrong_type("input", "a string, a list of strings, or token ids", given)
    elif given and isinstance(given[0], str | list):
        if len(given) > MAX_INPUTS:
            raise RowError(
                "invalid_value", f"input: has {len(given):,} inputs, the limit is {MAX_INPUTS:,}", param="input"
            )
        found = tuple(_input(f"input[{i}]", item) for i, item in enumerate(given))
    else:
        found = (_token_ids("input", given),)
    num_bytes = sum(len(item.encode()) for item in found if isinstance(item, str))
    num_tokens = sum(len(item) for item in found if not isinstance(item, str))
    for size, limit, unit in ((num_bytes, MAX_PROMPT_BYTES, "bytes"), (num_tokens, MAX_PROMPT_TOKEN_IDS, "tokens")):
        if size > limit:
            raise RowError("invalid_value", f"input: has {size:,} {unit}, the limit is {limit:,}", param="input")
    return found


def _input(where: str, value: Any) -> Input:
    if isinstance(value, str):
        return _text(where, value)
    if isinstance(value, list):
        return _token_ids(where, value)
    raise wrong_type(where, "a string or a list of token ids", value)


def _text(where: str, value: str) -> str:
    if not value:
        raise RowError("invalid_value", f"{where}: is empty", param=where)
    return as_text(where, value)


def _token_ids(where: str, value: list[Any]) -> tuple[int, ...]:
    if not value:
        raise RowError("invalid_value", f"{where}: is empty", param=where)
    return tuple(as_token_id(f"{where}[{i}]", token_id) for i, token_id in enumerate(value))


def embedding_response(*, model: str, outputs: Sequence[RequestOutput], encoding_format: str) -> dict[str, Any]:
    """OpenAI's ``list`` of embeddings for the outputs of a job, none of which failed."""
    num_tokens = sum(output.metrics.prompt_tokens for output in outputs)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(output, encoding_format)}
            for index, output in enumerate(outputs)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _encoded(output: RequestOutput, encoding_format: str) -> list[float] | str:
    assert output.embedding is not None
    values = list(output.embedding.embedding)
    if encoding_format == "float":
        return values
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode("ascii")


def vector_of(answer: Mapping[str, Any]) -> tuple[float, ...]:
    """The numbers of one of a response's embeddings, in whichever encoding."""
    given = answer["embedding"]
    if isinstance(given, str):
        given = np.frombuffer(base64.b64decode(given), dtype="<f4").tolist()
    return tuple(given)


class SplitJobs:
    """Jobs that are several requests of the engine. The first has the job's own id; other jobs are not known here."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, RequestOutput | None]] = {}  # by job id: request id -> its output
        self._job_by_part: dict[str, str] = {}

    def split(self, job_id: str, count: int) -> list[str]:
        """Ids for ``count`` requests of a job."""
        request_ids = [job_id, *(f"{job_id}#{index}" for index in range(1, count))]
        if count > 1:
            self._parts[job_id] = dict.fromkeys(request_ids)
            self._job_by_part.update(dict.fromkeys(request_ids, job_id))
        return request_ids

    def gather(self, outputs: Sequence[RequestOutput]) -> list[tuple[str, list[RequestOutput]]]:
        """Job ids and their outputs, of those jobs that are complete with these."""
        named = [
            replace(output, served_from=self._job_by_part.get(output.served_from or "", output.served_from))
            for output in outputs
        ]
        complete: list[tuple[str, list[RequestOutput]]] = []
        for output in named:
            job_id = self._job_by_part.get(output.request_id)
            if job_id is None:
                complete.append((output.request_id, [output]))
                continue
            parts = self._parts[job_id]
            parts[output.request_id] = output
            gathered = [part for part in parts.values() if part is not None]
            if len(gathered) == len(parts):
                self.drop(job_id)
                complete.append((job_id, gathered))
        return complete

    def drop(self, job_id: str) -> list[str]:
        """Forget a job; the ids of its requests that have not ended."""
        parts = self._parts.pop(job_id, None)
        if parts is None:
            return [job_id]
        for request_id in parts:
            del self._job_by_part[request_id]
        return [request_id for request_id, output in parts.items() if output is None]
