"""Echoed prompts: the text that comes back, and where in it each token lies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import processors

from kvq.engine.engine import Engine
from kvq.worker.jobs import Endpoint, JobOutcome
from tests.models import byte_tokenizer, engine_config, sentencepiece_tokenizer, tiny_llama_config, write_model
from tests.worker.crowds import Crowd, crowd_on

PROMPTS = ["a b", " a b", "  é ü", "x 😀\ny", "<s>a", "a</s>b"]


def with_bos() -> Any:
    """The tokenizer of bytes, a BOS before every text."""
    hf = copy.deepcopy(byte_tokenizer())
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return hf


@pytest.fixture(scope="module", params=[with_bos, sentencepiece_tokenizer])
def crowd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    """A tiny model of a tokenizer that begins prompts with BOS."""
    hf = request.param()
    folder = tmp_path_factory.mktemp(request.param.__name__)
    write_model(folder, tiny_llama_config(vocab_size=len(hf)), tokenizer=hf)
    with crowd_on(Engine.load(engine_config(folder)), neighbours=()) as made:
        yield made


def answer(crowd: Crowd, **body: Any) -> dict[str, Any]:
    ended = crowd.try_row(
        Endpoint.COMPLETIONS, {"echo": True, "logprobs": 0, "temperature": 0, "max_tokens": 5, **body}
    )
    assert isinstance(ended, JobOutcome), ended
    assert ended.response is not None
    choice: dict[str, Any] = ended.response["choices"][0]
    return choice


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("skips", [True, False])
def test_offsets_are_places_in_the_text_that_comes_back(crowd: Crowd, prompt: str, skips: bool) -> None:
    tokenizer = crowd.engine.tokenizer
    space = tokenizer.encode(" b")[-1]
    choice = answer(crowd, prompt=prompt, skip_special_tokens=skips, allowed_token_ids=[space, 2, 40], ignore_eos=True)
    text, logprobs = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    num_prompt = len(tokenizer.encode(prompt))
    offsets = logprobs["text_offset"]
    assert len(offsets) == num_prompt + 5
    assert offsets[num_prompt] == len(prompt)
    assert offsets == sorted(offsets)
    ends = [*offsets[1:], len(text)]
    for token, start, end in zip(logprobs["tokens"], offsets, ends, strict=True):
        inside = text[start:end]
        if "\ufffd" not in token and inside:
            assert inside in (token, token.removeprefix(" "))


def test_a_prompt_of_token_ids_comes_back_as_its_text(crowd: Crowd) -> None:
    ids = crowd.engine.tokenizer.encode("a b")
    choice = answer(crowd, prompt=ids, max_tokens=0)
    assert choice["text"] == "a b"
    assert choice["logprobs"]["text_offset"][:3] == [0, 0, 1]


def test_tokens_after_a_stop_string_lie_at_the_end_of_the_text(crowd: Crowd) -> None:
    space = crowd.engine.tokenizer.encode(" b")[-1]
    spelled = crowd.engine.tokenizer.continuation([space])
    choice = answer(crowd, prompt="a", allowed_token_ids=[space], stop=spelled * 3)
    assert choice["text"] == "a"
    assert choice["logprobs"]["text_offset"][-3:] == [1, 1, 1]
