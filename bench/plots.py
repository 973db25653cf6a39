"""Plots of cost against size: one PNG each, drawn from the JSON of ``bench.scaling`` and ``bench.queue_bench``.

Owns what a plot looks like. Invariant: sizes are on a logarithmic axis with a label at each that was measured, costs on
a linear one from zero, and a goal is a dashed line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line: its name (empty: the only one) and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One picture. ``goal``: a bound on y, and what it says."""

    file: str
    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    goal: tuple[float, str] | None = None


def scaling_plots(result: dict[str, Any]) -> list[Plot]:
    """The plots of ``bench.scaling``."""
    plots = []
    if "concurrency" in result:
        plots.append(
            Plot(
                file="throughput-by-concurrency.png",
                title="Throughput against concurrency",
                x_name="sequences at a time",
                y_name="output tokens/s",
                series=[_series("", result["concurrency"], "concurrency", "output_tokens_per_s")],
            )
        )
    if "context" in result:
        plots.append(
            Plot(
                file="tpot-by-context.png",
                title="Time per token against context",
                x_name="tokens before",
                y_name="ms a token, one sequence",
                series=[_series("", result["context"], "context", "tpot_ms")],
            )
        )
    if "window" in result:
        different = [point for point in result["window"] if point["groups"] == point["prompts"]]
        shared = [point for point in result["window"] if point["groups"] != point["prompts"]]
        plots.append(
            Plot(
                file="planning-by-window.png",
                title="Planning against the window",
                x_name="waiting prompts",
                y_name="ms per 100 jobs",
                series=[
                    _series("50 share a prefix", shared, "prompts", "ms_per_100_jobs"),
                    _series("all different", different, "prompts", "ms_per_100_jobs"),
                ],
                goal=(1.0, "goal: at most 1 ms"),
            )
        )
    if "tree" in result:
        trees = result["tree"]
        plots.append(
            Plot(
                file="planning-of-a-tree.png",
                title=f"Planning {trees[0]['prompts']:,} prompts of {trees[0]['prompt_tokens']:,} tokens",
                x_name="groups that share two thirds",
                y_name="s to add and take all",
                series=[Series(name="", x=[p["groups"] for p in trees], y=[p["add_s"] + p["take_s"] for p in trees])],
                goal=(20.0, "goal: at most 20 s"),
            )
        )
    return plots


def queue_plots(result: dict[str, Any]) -> list[Plot]:
    """The plots of ``bench.queue_bench``."""
    plots = []
    if "length" in result:
        plots.append(
            Plot(
                file="throughput-by-queue-length.png",
                title="Throughput against the length of the queue",
                x_name="queued rows",
                y_name="rows/s claimed and finished by one worker",
                series=[_series("", result["length"]["points"], "rows", "rows_per_s")],
            )
        )
    if "submit" in result:
        points = result["submit"]["points"]
        x = [point["rows"] for point in points]
        plots.append(
            Plot(
                file="memory-by-rows.png",
                title="Memory against rows",
                x_name="rows",
                y_name="peak memory of the command, MB",
                series=[
                    Series(name=f"kvq {command}", x=x, y=[point[f"{command}_peak_rss_bytes"] / 1e6 for point in points])
                    for command in ("submit", "export")
                ],
                goal=(300.0, "goal: at most 300 MB"),
            )
        )
    return plots


def _series(name: str, points: Sequence[dict[str, float]], x: str, y: str) -> Series:
    return Series(name=name, x=[point[x] for point in points], y=[point[y] for point in points])


def draw(plots: Sequence[Plot], folder: Path) -> None:
    """Write them."""
    from matplotlib.figure import Figure

    for plot in plots:
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        ax = figure.subplots()
        for series in plot.series:
            ax.plot(series.x, series.y, marker="o", label=series.name or None)
        highest = max(value for series in plot.series for value in series.y)
        if plot.goal is not None:
            bound, words = plot.goal
            highest = max(highest, bound)
            ax.axhline(bound, color="black", linestyle="--", linewidth=1, label=words)
        places = sorted({value for series in plot.series for value in series.x})
        ax.set(title=plot.title, xlabel=plot.x_name, ylabel=plot.y_name, xscale="log", ylim=(0, 1.15 * highest))
        ax.set_xticks(places, [_short(value) for value in places])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        if any(series.name for series in plot.series) or plot.goal is not None:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(folder / plot.file, dpi=130)


def _short(number: float) -> str:
    """10,000 -> 10k, 1,000,000 -> 1M."""
    if number >= 10**6:
        return f"{number / 10**6:g}M"
    if number >= 10**4:
        return f"{number / 1000:g}k"
    return f"{number:,.0f}"
