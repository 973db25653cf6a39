"""The engine's error tree.

EngineError
├── ConfigError            a setting is invalid, unknown or cannot be satisfied; names the setting
│   ├── DoesNotFit         the model and its KV cache do not fit; says which setting to change, to what
│   └── AdapterError       a LoRA adapter cannot be used; names the adapter and the field
├── ModelError             the model cannot be loaded or would be computed wrongly
├── RequestError           one request is refused; the others go on
│   ├── PromptTooLong      prompt (+ one token) exceeds max_model_len or the whole KV cache
│   └── InvalidParameter   a sampling parameter is unknown, unsupported or out of range
└── StepFailed             a step raised; the engine state is as before the step
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """A setting is invalid. ``setting`` is its name."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class DoesNotFit(ConfigError):
    """The configuration needs more memory than there is."""


class AdapterError(ConfigError):
    """A LoRA adapter cannot be used. ``adapter`` is its name."""

    def __init__(self, adapter: str, message: str) -> None:
        super().__init__("lora_modules", f"adapter {adapter!r}: {message}")
        self.adapter = adapter


class ModelError(EngineError):
    """The model cannot be loaded, or our attention would not be the one it computes with."""


class RequestError(EngineError):
    """One request is refused. ``code`` is a stable machine-readable word."""

    code = "invalid_request"


class PromptTooLong(RequestError):
    """The prompt leaves no room for a single output token."""

    code = "context_length_exceeded"

    def __init__(self, *, num_tokens: int, limit: int, setting: str = "max_model_len") -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens, but {setting} is {limit} "
            f"and at least one token must be left for the answer"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class InvalidParameter(RequestError):
    """A sampling parameter is unknown, unsupported or out of range. ``param`` is its name."""

    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


class StepFailed(EngineError):
    """A step raised; its blocks were rolled back and every request is as it was before the step."""
