"""Options that commands share: one flag for each setting, generated from the settings themselves.

Knows how a setting looks on a command line; what it means is said where it is defined.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvq.engine.config import DTYPES, KV_CACHE_DTYPES, LOAD_FORMATS, SPECULATIVE_METHODS
from kvq.worker.config import LOG_LEVELS, SettingField, load_settings, setting_fields

F = TypeVar("F", bound=Callable[..., Any])

# What shells complete by the names of files. Whether there is one its reader says.
FILE_NAME = click.Path(allow_dash=True, readable=False)
_METAVARS = {
    "lora_modules": "NAME=PATH",
    "db": "FILE",
    "encryption_key_file": "FILE",
    "model": "MODEL",
    "tokenizer": "MODEL",
    "speculative_model": "MODEL",
}
_CHOICES = {
    "log_level": LOG_LEVELS,
    "load_format": LOAD_FORMATS,
    "device": ("auto", "cpu", "cuda"),
    "dtype": DTYPES,
    "kv_cache_dtype": ("auto", *KV_CACHE_DTYPES),
    "quantization": ("int8",),
    "scheduling_policy": ("prefix", "fcfs"),
    "generation_config": ("auto", "vllm"),
    "pooling_type": ("auto", "last", "mean"),
    "speculative_method": SPECULATIVE_METHODS,
}


def settings_options(*names: str, engine: bool = False) -> Callable[[F], F]:
    """Add ``--config`` and a flag for each named setting (and each engine setting), and pass ``settings``."""
    chosen = [f for f in setting_fields() if f.name in names or (engine and f.of_engine)]
    assert set(names) <= {f.name for f in chosen}, f"no such setting in {names}"

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def with_settings(config: str | None, **kwargs: Any) -> Any:
            flags = {f.name: kwargs.pop(f.name) for f in chosen}
            return function(settings=load_settings(flags, config=config), **kwargs)

        command: Any = with_settings
        for setting in reversed(chosen):
            command = _option(setting)(command)
        file_help = "Settings file.  [default: kvq.toml where there is one]"
        return click.option("--config", type=click.Path(dir_okay=False), help=file_help)(command)  # type: ignore[no-any-return]

    return decorate


def json_option(function: F) -> F:
    """Add ``--json``, passed as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(function)


def _option(setting: SettingField) -> Callable[[Any], Any]:
    text = setting.help + "."
    if re.split(r"\W", text, maxsplit=1)[0] not in _CHOICES.get(setting.name, ()):  # a value is spelt as it is typed
        text = text[:1].upper() + text[1:]
    if setting.default not in (None, ()):
        text += f"  [default: {setting.default}]"
    if setting.kind is bool:
        return click.option(f"{setting.flag}/{setting.flag.replace('--', '--no-', 1)}", default=None, help=text)
    if setting.kind is tuple:
        return click.option(setting.flag, multiple=True, metavar=_METAVARS.get(setting.name, "NAME"), help=text)
    if setting.name in _METAVARS:
        return click.option(setting.flag, type=FILE_NAME, metavar=_METAVARS[setting.name], help=text)
    if setting.name in _CHOICES:
        return click.option(setting.flag, type=click.Choice(_CHOICES[setting.name], case_sensitive=False), help=text)
    if setting.name == "kv_cache_memory":
        return click.option(
            setting.flag, metavar="BYTES", help=text.replace("Bytes", "Bytes, or 2GiB (2 x 2^30), 2GB (2 x 10^9),", 1)
        )
    return click.option(setting.flag, type=setting.kind, help=text)
