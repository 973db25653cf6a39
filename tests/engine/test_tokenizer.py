"""Text of tokens: whole texts, what continues one, and what special tokens add."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from kvq import LLM, SamplingParams
from kvq.engine.request import StructuredOutputsParams
from kvq.engine.tokenizer import Tokenizer
from tests.models import (
    byte_tokenizer,
    demo_tokenizer,
    engine_config,
    sentencepiece_tokenizer,
    tiny_llama_config,
    write_model,
)

TEXTS = ["a b c", " a", "  a  b", "é ü", "x 😀 y", "\n a"]


@pytest.mark.parametrize("hf", [byte_tokenizer(), demo_tokenizer(), sentencepiece_tokenizer()])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_and_what_continues_it_are_the_whole_text(hf: Any, text: str) -> None:
    tokenizer = Tokenizer(hf, frozenset())
    ids = tokenizer.encode(text)
    for border in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[:border])
        if before and "\ufffd" not in before:
            assert before + tokenizer.continuation(ids[border:]) == text


def test_a_token_is_special_by_its_role_or_its_mark() -> None:
    hf = copy.deepcopy(byte_tokenizer())
    hf.add_tokens([AddedToken("[CALLS]", special=True), AddedToken("<plain>", special=False)])
    tokenizer = Tokenizer(hf, frozenset())
    for token, special in {"</s>": True, "[CALLS]": True, "<plain>": False, "a": False, "of several": False}.items():
        assert tokenizer.is_special(token) is special
        if token in hf.get_vocab():
            token_id = hf.convert_tokens_to_ids(token)
            assert tokenizer.is_special(token_id) is special
            assert (tokenizer.continuation([token_id]) == "") is special


def test_an_answer_of_a_sentencepiece_model_keeps_the_space_it_begins_with(tmp_path: Path) -> None:
    hf = sentencepiece_tokenizer()
    folder = write_model(tmp_path / "model", tiny_llama_config(vocab_size=len(hf)), tokenizer=hf)
    llm = LLM(engine_config(folder).model, device="cpu", kv_cache_memory=16 << 20)
    word = hf.convert_tokens_to_ids("▁w")
    settings = {"temperature": 0, "max_tokens": 3, "logprobs": 1, "allowed_token_ids": [word]}
    (output,) = llm.generate(["so"], SamplingParams(**settings))
    (sample,) = output.outputs
    assert sample.text == " w w w"
    assert sample.logprobs is not None
    assert [(token.token, token.raw) for token in sample.logprobs] == [(" w", b" w")] * 3
    (stopped,) = llm.generate(["so"], SamplingParams(**{**settings, "stop": " w"}))
    assert (stopped.outputs[0].text, len(stopped.outputs[0].token_ids)) == ("", 1)
    form = StructuredOutputsParams(regex=" [a-c]{2}")
    (formed,) = llm.generate(["so"], SamplingParams(temperature=0, max_tokens=9, structured_outputs=form))
    assert formed.outputs[0].text[0] == " "
    assert formed.outputs[0].format_valid
