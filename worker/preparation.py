"""Preparation: a body turned into what the engine takes, or the reason why it cannot be.

Owns the choice of the adapter by the model's name, the model's own defaults, and the tokens. Knows the engine's
tokenizer and checks, which any thread may use; starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvq.engine.errors import RequestError
from kvq.engine.planner import planning_ids
from kvq.engine.request import SamplingParams
from kvq.worker.bodies import ParsedBody, parse_body
from kvq.worker.embeddings import PreparedEmbedding
from kvq.worker.jobs import Endpoint
from kvq.worker.model_names import requested_adapter
from kvq.worker.prompts import prompt_token_ids, prompts_token_ids, row_error
from kvq.worker.responses import Echo, Piece
from kvq.worker.tool_notations import Notation, notation_of
from kvq.worker.tools import ToolUse

if TYPE_CHECKING:
    from kvq.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A body turned into what the engine takes. ``model`` is the name the answer is given under.

    ``token_ids``: of all prompts, one after another, where there are several. ``model_defaults``: those of ``params``
    that the body left to the model's generation_config. ``request_key``: by which the answer is found again; None where
    it is never given to another job. ``lora``: name of the adapter to compute with. ``tool_use``:
    how calls are read out of the answer.
    """

    token_ids: tuple[int, ...]
    params: SamplingParams
    model: str
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    echo: Echo | None = None
    request_key: str | None = None
    lora: str | None = None
    embedding: PreparedEmbedding | None = None
    tool_use: ToolUse | None = None

    @property
    def planning_ids(self) -> Sequence[int]:
        """What a planner sorts the job by."""
        return planning_ids(self.token_ids, self.lora)


def prepare(engine: Engine, endpoint: Endpoint, body: Mapping[str, Any], names: Sequence[str]) -> Prepared:
    """Check and tokenise a body; ``names`` are those under which the model is served, the first is shown.

    Raises:
        RowError: the body cannot be run by this engine.
    """
    parsed = parse_body(endpoint, body)
    lora = requested_adapter(parsed.model, (*names, engine.model_id), engine.config.lora_paths)
    model = names[0] if lora is None else lora
    try:
        if parsed.embedding is not None:
            return _embedding(engine, parsed, model=model, lora=lora)
        return _generation(engine, parsed, model=model, lora=lora)
    except (RequestError, UnicodeError) as err:
        raise row_error(err, parsed) from err


def _generation(engine: Engine, parsed: ParsedBody, *, model: str, lora: str | None) -> Prepared:
    defaults = engine.defaults_for(parsed.params, parsed.given)
    params = replace(parsed.params, **defaults)
    tool_use = parsed.tool_use
    if tool_use is not None:
        template = engine.tokenizer.chat_template(with_tools=True) or ""
        tool_use = replace(tool_use, notation=notation_of(template) or Notation.HERMES)
        opening = tool_use.notation.opening
        if opening is not None and engine.tokenizer.is_special(opening):
            params = replace(params, skip_special_tokens=False)  # the tags tell where a call begins
    whole = prompt_token_ids(engine.tokenizer, parsed)
    token_ids = tuple(engine.fit(whole, params))
    engine.check(token_ids, params)
    echo = None
    if parsed.echo:
        text = parsed.prompt if isinstance(parsed.prompt, str) and token_ids == whole else None
        if text is None:
            text = engine.tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        first = Piece(raw=engine.tokenizer.token_bytes(token_ids[0]), special=engine.tokenizer.is_special(token_ids[0]))
        echo = Echo(text=text, first_token=first, only=parsed.prompt_only)
    return Prepared(
        token_ids=token_ids,
        params=params,
        model=model,
        model_defaults=defaults,
        echo=echo,
        lora=lora,
        tool_use=tool_use,
    )


def _embedding(engine: Engine, parsed: ParsedBody, *, model: str, lora: str | None) -> Prepared:
    asked = parsed.embedding
    assert asked is not None
    prompts = tuple(tuple(engine.fit(ids, asked.params)) for ids in prompts_token_ids(engine.tokenizer, parsed))
    for prompt in prompts:
        engine.check_embedding(prompt, asked.params)
    return Prepared(
        token_ids=tuple(chain.from_iterable(prompts)),
        params=parsed.params,
        model=model,
        lora=lora,
        embedding=PreparedEmbedding(prompts=prompts, params=asked.params, encoding_format=asked.encoding_format),
    )
