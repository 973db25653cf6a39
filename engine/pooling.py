"""Pooling: the hidden states of a prompt as one vector.

Owns how a model pools (its sentence-transformers configuration, or the settings) and the finished vector. Knows nothing
of steps or blocks, and no tensors. Sums come in float64, so that a prompt computed in chunks gives what it gives as a
whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvq.engine.config import EngineConfig
from kvq.engine.errors import ConfigError, InvalidParameter
from kvq.engine.request import EmbeddingOutput, Pooling, PoolingParams, PoolingType
from kvq.engine.sequence import RequestState
from kvq.engine.tokenizer import ModelSource

_SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's
_KNOWN_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
_TYPE_BY_MODE = {"lasttoken": PoolingType.LAST, "mean": PoolingType.MEAN, "mean_tokens": PoolingType.MEAN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """How one model pools. ``dimensions``: lengths its vectors may be cut to; None: any, empty: none but its own."""

    type: PoolingType
    normalize: bool
    hidden_size: int
    dimensions: tuple[int, ...] | None = ()

    @classmethod
    def load(cls, config: EngineConfig, hf_config: Any) -> Pooler:
        """The settings, else the model's sentence-transformers configuration, else the last token, normalised.

        Raises:
            ConfigError: the model says that it pools in a way that is not supported.
        """
        declared = tuple(getattr(hf_config, "matryoshka_dimensions", None) or ())
        any_length = not declared and bool(getattr(hf_config, "is_matryoshka", False))
        return cls(
            type=pooling_type(config),
            normalize=config.normalize_embeddings,
            hidden_size=int(hf_config.hidden_size),
            dimensions=None if any_length else declared,
        )

    def resolve(self, params: PoolingParams) -> Pooling:
        """What a request asks for, with this model's defaults.

        Raises:
            InvalidParameter: vectors of that many dimensions are not to be had.
        """
        wanted = params.dimensions
        allowed = self.dimensions is None or wanted in (*self.dimensions, self.hidden_size)
        if wanted is not None and not (allowed and wanted <= self.hidden_size):
            raise InvalidParameter(
                "dimensions",
                f"is {wanted}, but the model's embeddings have {self.hidden_size} and "
                + ("cannot be longer" if allowed else "it was not trained to have them cut to that; leave it out"),
            )
        return Pooling(
            type=self.type,
            normalize=self.normalize if params.normalize is None else params.normalize,
            dimensions=wanted,
        )


def embedding_of(state: RequestState) -> EmbeddingOutput | None:
    """The vector of a request whose prompt is pooled; None where it was aborted before."""
    pooling, total = state.request.pooling, state.pooled_sum
    if pooling is None or total is None or not state.finished:
        return None
    vector = (total / state.num_pooled)[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _SMALLEST_NORM)
    if not np.isfinite(vector).all():
        return EmbeddingOutput(embedding=(), error="the model's hidden states are not finite")
    # Nine digits are all that a float32 has.
    return EmbeddingOutput(embedding=tuple(float(f"{value:.9g}") for value in vector.astype(np.float32)))


def pooling_type(config: EngineConfig) -> PoolingType:
    """How a model pools, by the settings or its own files; no weights are read.

    Raises:
        ConfigError: as ``Pooler.load``.
    """
    return _declared_type(config) if config.pooling_type == "auto" else PoolingType(config.pooling_type)


def _declared_type(config: EngineConfig) -> PoolingType:
    """What ``modules.json`` and the pooling module's ``config.json`` say (sentence-transformers' format)."""
    modules = _read_json(config, "modules.json")
    if modules is None:
        return PoolingType.LAST
    kinds = {str(module.get("type", "")).rsplit(".", 1)[-1]: str(module.get("path", "")) for module in modules}
    unknown = sorted(kinds.keys() - _KNOWN_MODULES)
    pooling = _read_json(config, f"{kinds.get('Pooling', '1_Pooling')}/config.json") or {}
    mode = pooling.get("pooling_mode")
    modes = (
        [mode]
        if isinstance(mode, str)
        else [
            name.removeprefix("pooling_mode_") for name, on in pooling.items() if "pooling_mode_" in name and on is True
        ]
    )
    if unknown or len(modes) != 1 or modes[0] not in _TYPE_BY_MODE:
        raise ConfigError(
            "pooling_type",
            f"the model's sentence-transformers configuration asks for {' and '.join([*modes, *unknown]) or 'nothing'},"
            " which is not supported; set pooling_type to last or mean to have that instead",
        )
    return _TYPE_BY_MODE[modes[0]]


def _read_json(config: EngineConfig, name: str) -> Any:
    """A file of the model's; None where it has none."""
    from transformers.utils.hub import cached_file

    source = ModelSource.resolve(config.model)
    if source.gguf_file is not None:
        return None
    try:
        file = cached_file(source.path, name)
    except OSError:
        return None
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
