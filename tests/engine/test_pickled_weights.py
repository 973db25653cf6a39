"""Weights that are pickles: refused with what to do, read when the operator says so, and never run as code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvq.engine.errors import ModelError
from kvq.engine.network import load_network
from tests.models import byte_tokenizer, engine_config, tiny_llama_config, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are a pickle."""
    tokenizer = byte_tokenizer()
    config = tiny_llama_config(vocab_size=len(tokenizer))
    folder = write_model(tmp_path_factory.mktemp("pickled"), config, tokenizer=tokenizer)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def load(model: Path, **settings: Any) -> Any:
    return load_network(engine_config(model, **settings), torch.device("cpu"), torch.float32)


def test_pickles_are_refused_with_what_to_do(model: Path) -> None:
    with pytest.raises(ModelError, match=r"its weights are pickles: save them as safetensors or, .* load_format to pt"):
        load(model)


def test_pickles_are_read_where_the_operator_allows_them(model: Path) -> None:
    assert load(model, load_format="pt").model.embed_tokens.weight.std() > 0.1


class Touch:
    """When unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_allowed_or_not_no_pickle_is_run(model: Path, tmp_path: Path) -> None:
    torch.save({"lm_head.weight": Touch(tmp_path / "made")}, model / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"cannot load the model|[Ww]eights.only"):
        load(model, load_format="pt")
    assert not (tmp_path / "made").exists()
