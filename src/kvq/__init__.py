"""kvq: a message-queue driven batch LLM inference worker.

The public API is loaded lazily, so that ``import kvq`` and ``kvq --help`` stay free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq.engine.config import EngineConfig
    from kvq.engine.engine import Engine
    from kvq.engine.llm import LLM
    from kvq.engine.request import LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams
    from kvq.worker.client import Client

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Client",
    "Engine",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_MODULE_BY_NAME = {
    "Client": "kvq.worker.client",
    "Engine": "kvq.engine.engine",
    "EngineConfig": "kvq.engine.config",
    "LLM": "kvq.engine.llm",
    "LoRARequest": "kvq.engine.request",
    "PoolingParams": "kvq.engine.request",
    "SamplingParams": "kvq.engine.request",
    "StructuredOutputsParams": "kvq.engine.request",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        import_module("kvq.engine.threads").prefer_short_spins()
        return getattr(import_module(_MODULE_BY_NAME[name]), name)
    raise AttributeError(f"module 'kvq' has no attribute {name!r}")
