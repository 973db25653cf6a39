"""``kvq config``: the settings as they are now, and where each value comes from."""

from __future__ import annotations

from typing import Any

import click

from kvq.cli.options import json_option, settings_options
from kvq.cli.output import print_json, print_table
from kvq.worker.config import SECRET_SETTINGS, Settings, setting_fields
from kvq.worker.urls import masked

_ALL = tuple(f.name for f in setting_fields() if not f.of_engine)


@click.group("config")
def command() -> None:
    """Show the settings and where each comes from.

    Flags win over KVQ_* variables, those over kvq.toml in the current folder, that over the defaults.
    """


@command.command()
@settings_options(*_ALL, engine=True)
@json_option
def show(settings: Settings, as_json: bool) -> None:
    """Every setting with its value and source. Passwords and keys are masked."""
    rows = [(f.name, _value(settings, f.name), settings.sources.get(f.name, "default")) for f in setting_fields()]
    if as_json:
        print_json({name: {"value": value, "source": source} for name, value, source in rows})
    else:
        print_table(
            ("setting", "value", "from", "variable"),
            [
                (row[0], "-" if row[1] in (None, ()) else row[1], row[2], f.variable)
                for row, f in zip(rows, setting_fields(), strict=True)
            ],
        )


def _value(settings: Settings, name: str) -> Any:
    by_name = {f.name: f for f in setting_fields()}
    if by_name[name].of_engine:
        if name == "model":
            return settings.model
        return settings.engine.get(name, by_name[name].default)
    value = getattr(settings, name)
    if name in SECRET_SETTINGS:
        return None if value is None else "***"
    return masked(value) if isinstance(value, str) else value
