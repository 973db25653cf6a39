"""PlannedRows: the rows of a file as token counts and a trie of prompts, and those that will fail.

Owns the judging of each row by the rules a worker applies. Holds no bodies and no texts, so that a file of 100,000
prompts takes a few bytes a token.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvq.engine.errors import RequestError
from kvq.engine.prompt_trie import PromptTrie
from kvq.engine.request_limits import RequestLimits
from kvq.engine.tokenizer import Tokenizer
from kvq.worker.bodies import ParsedBody, parse_body
from kvq.worker.errors import RowError
from kvq.worker.files import BadRow, InputFile
from kvq.worker.jobs import NewJob
from kvq.worker.prompts import PromptText, prompt_texts, row_error

_CHUNK = 512
_NO_BATCH = str(uuid.UUID(int=0))  # job ids are of no interest here


@dataclass(slots=True, kw_only=True)
class PlannedRows:
    """Row ``i`` of the arrays is prompt ``i`` of the trie. ``max_tokens`` 0: the row bounds its answer by nothing.

    A line that embeds several inputs has a row for each; embeddings have no samples.
    ``bad`` are the rows that will fail for what only the model can tell: too long, refused by its template.
    """

    trie: PromptTrie
    line_nos: array[int] = field(default_factory=lambda: array("q"))
    num_tokens: array[int] = field(default_factory=lambda: array("q"))
    max_tokens: array[int] = field(default_factory=lambda: array("q"))
    num_samples: array[int] = field(default_factory=lambda: array("q"))
    bad: list[BadRow] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.line_nos)


def read_rows(
    source: InputFile,
    *,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    adapters: Sequence[str] = (),
    takes_mean: bool = False,
    on_rows: Callable[[int], None] = lambda _: None,
) -> PlannedRows:
    """Tokenise the good rows of a checked file.

    ``adapters``: names of LoRA adapters; the prompts of each share among themselves only. ``takes_mean``: embeddings
    are the mean of all tokens, which must then all be computed.
    ``on_rows`` is told the number of rows read so far, now and then.
    """
    rows = PlannedRows(trie=PromptTrie(vocab_size=limits.vocab_size))
    judge = _Judge(tokenizer=tokenizer, limits=limits, adapters=adapters, takes_mean=takes_mean)
    num_read = 0
    for chunk in _chunks(source):
        _add_chunk(rows, chunk, judge)
        num_read += len(chunk)
        on_rows(num_read)
    return rows


def bodies_of(source: InputFile, line_nos: set[int]) -> dict[int, ParsedBody]:
    """The bodies of some lines, for a closer look."""
    wanted = {job.line_no: job for job in _jobs(source) if job.line_no in line_nos}
    return {line_no: parse_body(job.endpoint, job.body) for line_no, job in wanted.items() if line_no is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    job: NewJob
    parsed: ParsedBody
    prompts: tuple[PromptText | tuple[int, ...], ...]


class _Judge:
    """Decides as a worker would whether a row can run."""

    def __init__(
        self, *, tokenizer: Tokenizer, limits: RequestLimits, adapters: Sequence[str], takes_mean: bool
    ) -> None:
        from kvq.engine.grammar import GrammarCompiler

        self.tokenizer = tokenizer
        self._limits = limits
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size)
        self._root_by_adapter = {name: number for number, name in enumerate(adapters, start=1)}
        self._takes_mean = takes_mean

    def parse(self, job: NewJob) -> _Row:
        """Raises RowError."""
        parsed = parse_body(job.endpoint, job.body)
        try:
            prompts = prompt_texts(self.tokenizer, parsed)
            for prompt in prompts:
                if isinstance(prompt, PromptText):
                    prompt.text.encode()  # a lone surrogate is no text, and would spoil the whole chunk
            return _Row(job=job, parsed=parsed, prompts=prompts)
        except (RequestError, UnicodeError) as err:
            raise row_error(err, parsed) from err

    def root(self, row: _Row, number: int) -> int:
        """Where in the trie the row's prompts begin; ``number`` is one of its own for each."""
        if self._takes_mean and row.parsed.embedding is not None:
            return -1 - number
        return self._root_by_adapter.get(row.parsed.model or "", 0)

    def fit(self, row: _Row, token_ids: list[int]) -> list[int]:
        """The prompt as it would run. Raises RowError."""
        params, embedding = row.parsed.params, row.parsed.embedding
        try:
            if embedding is not None:
                fitted = self._limits.fit(token_ids, embedding.params)
                self._limits.check_prompt(fitted)
                return fitted
            fitted = self._limits.fit(token_ids, params)
            self._limits.check(fitted, params)
            if params.structured_outputs is not None:
                self._grammars.compile(params.structured_outputs)
        except RequestError as err:
            raise row_error(err, row.parsed) from err
        return fitted


def _add_chunk(rows: PlannedRows, jobs: list[NewJob], judge: _Judge) -> None:
    parsed: list[_Row] = []
    for job in jobs:
        try:
            parsed.append(judge.parse(job))
        except RowError as err:
            rows.bad.append(_bad(job, err))
    token_ids = iter(_tokenised([prompt for row in parsed for prompt in row.prompts], judge.tokenizer))
    for row in parsed:
        given = [next(token_ids) for _ in row.prompts]
        try:
            fitted = [judge.fit(row, ids) for ids in given]
        except RowError as err:
            rows.bad.append(_bad(row.job, err))
            continue
        for ids in fitted:
            _add_prompt(rows, row, ids, root=judge.root(row, len(rows)))


def _add_prompt(rows: PlannedRows, row: _Row, token_ids: list[int], *, root: int) -> None:
    assert row.job.line_no is not None
    rows.trie.add(token_ids, root=root)
    rows.line_nos.append(row.job.line_no)
    rows.num_tokens.append(len(token_ids))
    rows.max_tokens.append(row.parsed.params.max_tokens or 0)
    rows.num_samples.append(row.parsed.params.n if row.parsed.embedding is None else 0)


def _tokenised(prompts: list[PromptText | tuple[int, ...]], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each prompt, one call of the tokenizer for each way of calling it."""
    found: dict[int, list[int]] = {}
    for special in (False, True):
        texts = {
            i: prompt.text
            for i, prompt in enumerate(prompts)
            if isinstance(prompt, PromptText) and prompt.add_special_tokens is special
        }
        ids = tokenizer.encode_many(list(texts.values()), add_special_tokens=special)
        found.update(zip(texts, ids, strict=True))
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, PromptText):
            found[i] = list(prompt)
    return [found[i] for i in range(len(prompts))]


def _bad(job: NewJob, err: RowError) -> BadRow:
    assert job.line_no is not None
    own_id = job.custom_id if job.custom_id != f"line-{job.line_no}" else None
    return BadRow(line_no=job.line_no, custom_id=own_id, code=err.code, message=err.message)


def _jobs(source: InputFile) -> Iterator[NewJob]:
    return (job for job in source.jobs(batch_id=_NO_BATCH, queue="plan") if job.error is None)


def _chunks(source: InputFile) -> Iterator[list[NewJob]]:
    chunk: list[NewJob] = []
    for job in _jobs(source):
        chunk.append(job)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
