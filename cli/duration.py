"""Durations as people type them."""

from __future__ import annotations

import re
from typing import Any

import click

_SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class Duration(click.ParamType[float]):
    """``30d``, ``12h``: a number and a unit of s, m, h, d or w; in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([smhdw])", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration such as 30d, 12h or 90m", param, ctx)
        return float(match[1]) * _SECONDS_BY_UNIT[match[2]]
