"""Goals: what a figure has to reach, and the table that says whether it did.

Owns the comparison and its printing. Invariant: a goal that was not measured is no line of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure and its bound: at least ``at_least``, at most ``at_most``, or both."""

    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure is within its bound."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    @property
    def bound(self) -> str:
        """For people."""
        if self.at_least is not None and self.at_most is not None:
            return f"{_number(self.at_least)} to {_number(self.at_most)}"
        if self.at_least is not None:
            return f">= {_number(self.at_least)}"
        assert self.at_most is not None
        return f"<= {_number(self.at_most)}"

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "met": self.met}


def goals_table(goals: Sequence[Goal]) -> str:
    """A Markdown table."""
    lines = ["| | measured | goal | |", "|---|---:|---:|---|"]
    lines += [
        f"| {goal.what} | {_number(goal.value)} {goal.unit} | {goal.bound} | {'met' if goal.met else '**not met**'} |"
        for goal in goals
    ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"
