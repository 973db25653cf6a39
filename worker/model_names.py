"""Which model names a worker answers to.

Rows carry the name their author had in mind: a hub id, a folder's base name, a short alias. Owns the
comparison only. Invariant: a name that shares nothing with the served ones is refused, never served silently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvq.worker.errors import RowError

# Shorter pieces are contained in almost any name and would accept everything.
MIN_CONTAINED_LENGTH = 3


def matches_model(name: str | None, served: Iterable[str]) -> bool:
    """True when a row that asks for ``name`` may be answered by a model known under ``served``.

    No name matches anything. Otherwise the names are compared by their lowercase letters and digits, whole
    and without a leading path or organisation, and one may contain the other: ``smollm2``,
    ``SmolLM2-135M-Instruct`` and ``HuggingFaceTB/SmolLM2-135M-Instruct`` all match each other.
    """
    if name is None:
        return True
    return any(_alike(name, other) for other in served)


def require_model(name: str | None, served: Iterable[str]) -> None:
    """Refuse a row whose model is not the one served.

    Raises:
        RowError: ``model_not_found``, naming both and the setting that makes the name known.
    """
    served = tuple(served)
    if not matches_model(name, served):
        raise RowError(
            "model_not_found",
            f"model {name!r} is not served here (served: {', '.join(dict.fromkeys(served))}); "
            f"change the row, or start with --served-model-name {name}",
            param="model",
        )


def requested_adapter(name: str | None, served: Iterable[str], adapters: Collection[str]) -> str | None:
    """The LoRA adapter a row asks for by ``name``; None: the model itself.

    Adapters are named exactly. Where there are any, a name that contains the model's is not the model: it is taken for
    an adapter that is not there.

    Raises:
        RowError: ``model_not_found``: neither is served.
    """
    if name is not None and name in adapters:
        return name
    served = tuple(served)
    if not adapters:
        require_model(name, served)
    elif name is not None and not any(_abbreviates(name, other) for other in served):
        raise RowError(
            "model_not_found",
            f"model {name!r} is not served here (served: {', '.join(dict.fromkeys(served))}; adapters: "
            f"{', '.join(sorted(adapters))}); change the row, or start with --lora-modules {name}=PATH",
            param="model",
        )
    return None


def _abbreviates(name: str, served: str) -> bool:
    return _alike(name, served) and len(_normalised(name)) <= len(_normalised(served))


def _alike(a: str, b: str) -> bool:
    if a == b:
        return True
    left, right = _normalised(a), _normalised(b)
    if not left or not right:
        return False
    if left == right:
        return True
    shorter, longer = sorted((left, right), key=len)
    return len(shorter) >= MIN_CONTAINED_LENGTH and shorter in longer


def _normalised(name: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(c for c in base.lower() if c.isalnum())
