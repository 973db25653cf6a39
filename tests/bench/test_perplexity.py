"""Perplexity is that of the log-probabilities which the network itself gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.perplexity import measure, table, texts_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import tiny_model


def test_perplexity_is_that_of_the_network(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "tiny"))
    texts = texts_of(["W4q"], max_rows=3)
    assert len(texts) == 3
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            losses += float(network(ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    found = measure(model, texts, {})
    assert found.tokens == tokens
    assert found.perplexity == pytest.approx(torch.tensor(losses / tokens).exp().item(), rel=1e-4)
    assert "float32" in table([found, found])
    assert "+0.00%" in table([found, found])
