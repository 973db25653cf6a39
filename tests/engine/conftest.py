"""Models shared by the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))
