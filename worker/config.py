"""Settings: everything a person can set, parsed once from flags, the environment and ``kvq.toml``.

Owns names, types, precedence (flags over ``KVQ_*`` over the file over defaults) and where each value came
from. The engine's own settings are named and checked by EngineConfig; they are listed beside ours so that
each has a flag, a variable and a key. Invariant: an unknown name or an invalid value raises and says where
it was found; nothing below this file reads the environment.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvq.engine.config import EngineConfig, default_model, model_display_name
from kvq.engine.errors import ConfigError
from kvq.worker.byte_sizes import parse_bytes
from kvq.worker.errors import SettingsError
from kvq.worker.urls import AMQP_SCHEMES, REDIS_SCHEMES, is_half_a_url, masked, scheme_of, verified

CONFIG_FILE = "kvq.toml"
ENV_PREFIX = "KVQ_"
LOG_LEVELS = ("debug", "info", "warning", "error")
# Ours, but not settings: where the file is, a switch for debugging kernels, and what the test-suite uses.
_OTHER_VARIABLES = re.compile(r"KVQ_(CONFIG|CPU_KERNELS|FAILPOINTS|TEST_\w+)")
# Never shown: not in `kvq config`, not in an error, not in a repr.
SECRET_SETTINGS = frozenset({"webhook_secret", "encryption_key"})
_BYTE_SETTINGS = frozenset({"kv_cache_memory"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a worker or a client.

    Args:
        db: where jobs and results are: a file for SQLite, or a ``postgresql://`` URL.
        broker: the ``redis://``, ``unix://`` or ``amqp://`` URL of the message broker.
        result_backend: where Celery senders look for answers; unset, the broker.
        queue: the queue to serve or to submit to.
        served_model_name: further names under which rows may ask for the model.
        drain_timeout: seconds that running jobs get to finish when the worker is told to stop.
        heartbeat_s: seconds between two signs of life of a worker.
        lease_s: seconds of silence after which a worker is dead and its jobs are given to others.
        step_timeout_s: seconds after which a step of the engine is stuck; the worker ends, others run its jobs.
        max_queued: most jobs that wait in a queue; above it messages stay in the broker, and `kvq submit` waits.
        window: how many waiting jobs are looked at when prefix sharing is planned.
        window_tokens: about how many prompt tokens these may have together; of longer prompts fewer are looked at.
        fair_share: serve the batches and tenants of one priority side by side, by weight; else in order of arrival.
        dedup_period: seconds for which the dedup key of a job is remembered.
        result_expires: seconds that answers stay in the result backend.
        log_level: the least that is logged; `kvq run` logs warnings where it is not set.
        webhook_secret: what the worker signs webhooks with: whsec_ and base64 (several, with spaces between, all
            sign), or any other text.
        webhook_allow_private: deliver webhooks to loopback, private and link-local addresses too.
        store_prompts: keep prompts in the database after their jobs have ended.
        store_outputs: keep answers in the database; without, only Celery's senders get them.
        encryption_key: encrypts prompts and answers in the database: 32 bytes in base64; several, with commas between,
            all decrypt and the first encrypts.
        encryption_key_file: a file of keys that encrypt prompts and answers, one a line, each 32 bytes in base64.

    ``engine`` holds the engine settings that were given; :meth:`engine_config` completes them.
    ``sources`` says where each value that is no default came from.

    Raises:
        SettingsError: naming the setting.
    """

    db: str = "kvq.db"
    broker: str | None = None
    result_backend: str | None = None
    queue: str = "kvq"
    served_model_name: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    heartbeat_s: float = 5.0
    lease_s: float = 60.0
    step_timeout_s: float = 600.0
    max_queued: int = 2_000_000
    window: int = 4096
    window_tokens: int = 4_000_000
    fair_share: bool = True
    dedup_period: float = 86400.0
    result_expires: float = 86400.0
    log_level: str = "info"
    webhook_secret: str | None = field(default=None, repr=False)
    webhook_allow_private: bool = False
    store_prompts: bool = True
    store_outputs: bool = True
    encryption_key: str | None = field(default=None, repr=False)
    encryption_key_file: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.result_backend is None and self.broker is not None:
            self._check(
                scheme_of(self.broker) not in AMQP_SCHEMES,
                "result_backend",
                "is not set; with an amqp:// broker give a redis:// URL where senders will look for answers",
            )
            object.__setattr__(self, "result_backend", self.broker)
        self._check(bool(self.db), "db", "is empty; give a file name or a postgresql:// URL")
        self._check(
            not is_half_a_url(self.db), "db", f"is neither a file nor a postgresql:// URL, got {masked(self.db)!r}"
        )
        self._check(bool(self.queue), "queue", "is empty")
        for name, url, schemes in (
            ("broker", self.broker, REDIS_SCHEMES | AMQP_SCHEMES),
            ("result_backend", self.result_backend, REDIS_SCHEMES),
        ):
            self._check(
                url is None or scheme_of(url) in schemes,
                name,
                f"must be a {'redis:// or amqp://' if name == 'broker' else 'redis://'} URL, the special characters of "
                f"its password written as %XX, got {masked(str(url))!r}",
            )
            if url is not None:
                object.__setattr__(self, name, verified(name, url, source=self.sources.get(name)))
        self._check(self.drain_timeout >= 0, "drain_timeout", f"must not be negative, got {self.drain_timeout}")
        self._check(self.heartbeat_s > 0, "heartbeat_s", f"must be positive, got {self.heartbeat_s}")
        self._check(
            self.lease_s >= 2 * self.heartbeat_s,
            "lease_s",
            f"is {self.lease_s}, which must be at least twice heartbeat_s ({self.heartbeat_s}), "
            "or one late heartbeat costs a worker its jobs",
        )
        self._check(self.step_timeout_s > 0, "step_timeout_s", f"must be positive, got {self.step_timeout_s}")
        self._check(self.max_queued >= 1, "max_queued", f"must be at least 1, got {self.max_queued}")
        for name in ("window", "window_tokens"):
            value = getattr(self, name)
            self._check(value >= 1, name, f"must be at least 1, got {value}")
        self._check(self.dedup_period > 0, "dedup_period", f"must be positive, got {self.dedup_period}")
        self._check(self.result_expires > 0, "result_expires", f"must be positive, got {self.result_expires}")
        self._check(
            self.log_level in LOG_LEVELS, "log_level", f"must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}"
        )

    def _check(self, holds: bool, setting: str, message: str) -> None:
        if not holds:
            raise SettingsError(setting, message, source=self.sources.get(setting))

    @property
    def model(self) -> str | None:
        """The configured model, else the demo model where its package is installed."""
        return self.engine.get("model") or default_model()

    def engine_config(self) -> EngineConfig:
        """The engine's settings; the demo model stands in where none is configured.

        Raises:
            SettingsError: for an invalid engine setting, or when there is no model.
        """
        if self.model is None:
            raise SettingsError(
                "model",
                "no model is configured; set --model, KVQ_MODEL or model in kvq.toml "
                "to a folder, a hub id or a .gguf file",
            )
        try:
            return EngineConfig.from_mapping({**self.engine, "model": self.model})
        except ConfigError as err:
            message = str(err).removeprefix(f"{err.setting}: ")
            raise SettingsError(err.setting, message, source=self.sources.get(err.setting)) from err

    def served_names(self) -> tuple[str, ...]:
        """The names under which rows may ask for the configured model, the one shown in answers first.

        Raises:
            SettingsError: when the model cannot be named, as its package is not installed.
        """
        model = self.engine_config().model
        try:
            display_name = model_display_name(model)
        except ConfigError as err:
            raise SettingsError(err.setting, str(err).removeprefix(f"{err.setting}: ")) from err
        return tuple(dict.fromkeys((*self.served_model_name, display_name, model)))

    def with_queue(self, queue: str) -> Settings:
        """The same settings for another queue."""
        return replace(self, queue=queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting as a person sees it. ``kind`` is the type of its values, ``default`` None where there is none."""

    name: str
    kind: type
    default: Any
    help: str
    of_engine: bool

    @property
    def flag(self) -> str:
        """Its command line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()


def setting_fields() -> tuple[SettingField, ...]:
    """Every setting there is, ours before the engine's."""
    return _fields_of(Settings, of_engine=False) + _fields_of(EngineConfig, of_engine=True)


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge flags, environment and file. A flag that is None was not given; an empty variable is not set.

    ``config`` names the file, which must then exist; else ``KVQ_CONFIG`` does, else ``kvq.toml`` in the
    current folder is read where there is one.

    Raises:
        SettingsError: for an unknown name, a value of a wrong type, or a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    known = {f.name: f for f in setting_fields()}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = (_from_file(config or environ.get("KVQ_CONFIG") or None), _from_environ(environ), _from_flags(flags or {}))
    for layer in layers:
        for name, (value, source) in layer.items():
            if name not in known:
                raise _unknown(name, source, known)
            values[name] = _convert(known[name], value, source)
            sources[name] = source
    engine = {name: value for name, value in values.items() if known[name].of_engine}
    ours = {name: value for name, value in values.items() if not known[name].of_engine}
    settings = Settings(**ours, engine=types.MappingProxyType(engine), sources=types.MappingProxyType(sources))
    if settings.model is not None:
        settings.engine_config()  # refuse an invalid engine setting now, not after minutes of work
    return settings


_Layer = dict[str, tuple[Any, str]]


def _from_file(config: str | Path | None) -> _Layer:
    path = Path(config or CONFIG_FILE)
    if config is None and not path.exists():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise SettingsError("config", f"cannot read {masked(str(config))}: {err.strerror or err}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise SettingsError("config", f"{path} is not valid TOML: {err}") from err
    return {name: (value, str(path)) for name, value in values.items()}


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    return {
        variable.removeprefix(ENV_PREFIX).lower(): (value, variable)
        for variable, value in environ.items()
        if variable.startswith(ENV_PREFIX) and value and not _OTHER_VARIABLES.fullmatch(variable)
    }


def _from_flags(flags: Mapping[str, Any]) -> _Layer:
    return {
        name: (value, "--" + name.replace("_", "-"))
        for name, value in flags.items()
        if value is not None and value != ()
    }


def _unknown(name: str, source: str, known: Mapping[str, SettingField]) -> SettingsError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; `kvq config show` lists them all"
    return SettingsError(name, f"is not a setting{hint}", source=source)


def _fields_of(cls: type, *, of_engine: bool) -> tuple[SettingField, ...]:
    hints = typing.get_type_hints(cls)
    helps = _help_by_name(cls.__doc__ or "")
    return tuple(
        SettingField(
            name=f.name,
            kind=_kind(hints[f.name]),
            default=None if f.default is MISSING else f.default,
            help=helps.get(f.name, ""),
            of_engine=of_engine,
        )
        for f in fields(cls)
        if f.name not in ("engine", "sources")
    )


def _kind(hint: Any) -> type:
    """``int`` for ``int | None``, ``tuple`` for ``tuple[str, ...]``."""
    kinds = [k for k in typing.get_args(hint) if k is not types.NoneType]
    if typing.get_origin(hint) is tuple:
        return tuple
    kind = kinds[0] if kinds else hint
    assert isinstance(kind, type), f"a setting of type {hint} cannot be written on a command line"
    return kind


def _help_by_name(doc: str) -> dict[str, str]:
    """The ``Args:`` section of a docstring."""
    lines = doc.partition("Args:")[2].partition("\n\n")[0].splitlines()
    helps: dict[str, str] = {}
    name = ""
    for line in lines:
        if match := re.match(r"\s{8}(\w+): (.*)", line):
            name, helps[match[1]] = match[1], match[2]
        elif name and line.strip():
            helps[name] += " " + line.strip()
    return {key: text.replace("``", "").rstrip(".") for key, text in helps.items()}


def _convert(setting: SettingField, value: Any, source: str) -> Any:
    """A value of the setting's type; strings are parsed, since variables and some flags have no other type."""
    if setting.name in _BYTE_SETTINGS and isinstance(value, str):
        return _bytes(setting, value, source)
    if isinstance(value, str) and setting.kind is not str:
        try:
            return _PARSERS[setting.kind](value)
        except ValueError as err:
            raise SettingsError(setting.name, f"must be {_NOUNS[setting.kind]}, got {value!r}", source=source) from err
    if setting.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if setting.kind is tuple and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is not setting.kind:
        got = "" if setting.name in SECRET_SETTINGS else f", got {masked(repr(value))}"
        raise SettingsError(setting.name, f"must be {_NOUNS[setting.kind]}{got}", source=source)
    return value


def _bytes(setting: SettingField, value: str, source: str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as err:
        raise SettingsError(setting.name, str(err), source=source) from err


def _parse_bool(value: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if value.lower() not in words:
        raise ValueError(value)
    return words[value.lower()]


def _parse_names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


_PARSERS: dict[type, Callable[[str], Any]] = {int: int, float: float, bool: _parse_bool, tuple: _parse_names}
_NOUNS = {str: "text", int: "an integer", float: "a number", bool: "true or false", tuple: "a list of names"}
