"""Report: the records of one folder as a table in Markdown and a plot.

``python -m bench.report FOLDER`` writes ``report.md`` and ``report.png`` there. Knows only the files: whoever has them
gets the same report. Every figure is the median over the runs of its kind.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.limits import Floor, Limits
from bench.record import RunRecord, read_records

# One colour an engine wherever it appears (Okabe and Ito's, told apart by colour-blind readers).
_COLOURS = {
    "kvq": "#0072B2",
    "vllm": "#E69F00",
    "openvino": "#009E73",
    "llamacpp": "#CC79A7",
    "transformers": "#999999",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All records of a folder."""

    runs: list[RunRecord]
    limits: Limits | None
    floors: dict[str, Floor]  # by workload

    @classmethod
    def read(cls, folder: Path) -> Results:
        files = sorted(folder.rglob("*.json"))
        limits = [limit for file in files if (limit := Limits.read(file)) is not None]
        floors = [floor for file in files if (floor := Floor.read(file)) is not None]
        return cls(
            runs=read_records(folder),
            limits=Limits.median(limits) if limits else None,
            floors={floor.workload: floor for floor in floors},
        )

    @property
    def workloads(self) -> list[str]:
        return sorted({run.workload for run in self.runs})

    @property
    def labels(self) -> list[str]:
        """kvq first, the others in order of appearance."""
        labels = list(dict.fromkeys(run.label for run in self.runs))
        return sorted(labels, key=lambda label: label.split(",")[0] != "kvq")

    def of(self, label: str, workload: str) -> list[RunRecord]:
        return [run for run in self.runs if run.label == label and run.workload == workload]

    def median(self, label: str, workload: str, value: Callable[[RunRecord], float]) -> float | None:
        found = self.of(label, workload)
        return statistics.median(map(value, found)) if found else None


def markdown(results: Results) -> str:
    """The whole report."""
    sections = [_setting(results), _times(results), _ratios(results), _int8(results)]
    if results.limits is not None and results.floors:
        sections.append(_limits(results, results.limits))
    sections += [_overhead(results), _work(results), _same_answers(results)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _setting(results: Results) -> str:
    machine, runs = results.runs[0].machine, results.runs
    versions = dict.fromkeys(f"{run.engine} {run.engine_version}" for run in runs)
    begun = [run.load_average for run in runs if run.load_average is not None]
    busy = f" Load average when the runs began: at most {max(begun):.1f}." if begun else ""
    rounds = max(len(results.of(label, workload)) for label in results.labels for workload in results.workloads)
    return (
        f"Machine: {machine.cpu_model} ({machine.cpu_flags}), {machine.num_cores} cores, "
        f"{machine.memory_bytes / 2**30:.0f} GiB, {machine.os}. {runs[0].started_at[:10]}. Model: {runs[0].model}. "
        f"Medians of up to {rounds} alternating runs, {runs[0].num_threads} threads.{busy} "
        f"Engines: {', '.join(versions)}."
    )


def _times(results: Results) -> str:
    def cell(label: str, workload: str) -> str:
        wall_s = results.median(label, workload, lambda run: run.wall_s)
        rate = results.median(label, workload, lambda run: run.output_tokens_per_s)
        return "" if wall_s is None or rate is None else f"{wall_s:.1f} ({rate:.0f})"

    return "Wall seconds (output tokens/s):\n\n" + _table(results.labels, results.workloads, cell)


def _ratios(results: Results) -> str:
    """kvq with the same type and the same cache against each peer."""

    def cell(label: str, workload: str) -> str:
        theirs = results.of(label, workload)
        if not theirs:
            return ""
        ours = [
            run
            for run in results.runs
            if run.engine == "kvq"
            and run.workload == workload
            and run.dtype == theirs[0].dtype
            and run.kv_cache_tokens == theirs[0].kv_cache_tokens
        ]
        if not ours:
            return ""
        ratio = statistics.median(run.wall_s for run in theirs) / statistics.median(run.wall_s for run in ours)
        return f"{ratio:.2f}"

    peers = [label for label in results.labels if not label.startswith("kvq")]
    if not peers:
        return ""
    return "kvq is so many times faster (their wall time over kvq's; below 1 it is slower):\n\n" + _table(
        peers, results.workloads, cell
    )


def _int8(results: Results) -> str:
    """What int8 weights bring, with the same cache."""
    found = []
    for workload in results.workloads:
        plain, short = (
            results.median(f"kvq, {dtype}", workload, lambda run: run.wall_s) for dtype in ("float32", "int8")
        )
        if plain is not None and short is not None:
            found.append(f"{workload} {plain / short:.2f}")
    return f"kvq with int8 weights is so many times faster than with float32: {', '.join(found)}." if found else ""


def _limits(results: Results, limits: Limits) -> str:
    def cell(label: str, workload: str) -> str:
        wall_s = results.median(label, workload, lambda run: run.wall_s)
        floor = results.floors.get(workload)
        return "" if wall_s is None or floor is None else f"{floor.linear_s(limits) / wall_s:.0%}"

    floors = [
        f"- {workload}: {floor.linear_ops / 1e12:.2f} T operations in linear layers = {floor.linear_s(limits):.1f} s; "
        f"with attention ({floor.attention_ops / 1e12:.2f} T) and {floor.bytes_read / 1e9:.0f} GB read: "
        f"{floor.seconds(limits):.1f} s; {floor.distinct_prompt_tokens:,} distinct of {floor.prompt_tokens:,} prompt "
        f"tokens, {floor.output_tokens:,} output tokens"
        for workload, floor in sorted(results.floors.items())
    ]
    return (
        f"Limits measured in the same sitting (float32): GEMM {limits.gemm_gflop_per_s:.0f} GFLOP/s, read "
        f"{limits.read_gb_per_s:.1f} GB/s, copy {limits.copy_gb_per_s:.1f} GB/s. The floor is each distinct token "
        "computed once at the GEMM rate:\n\n"
        + "\n".join(floors)
        + "\n\nShare of that floor (linear layers) reached:\n\n"
        + _table(results.labels, results.workloads, cell)
    )


def _overhead(results: Results) -> str:
    """What kvq spends outside the network: scheduler, sampling, text, Python between them."""

    def outside(run: RunRecord) -> float:
        return 1 - float(run.details["forward_s"]) / run.wall_s

    told = replace(results, runs=[run for run in results.runs if "forward_s" in run.details])
    lines = []
    for label in told.labels:
        shares = {workload: told.median(label, workload, outside) for workload in told.workloads}
        cells = [f"{workload} {share:.1%}" for workload, share in shares.items() if share is not None]
        lines.append(f"- {label}: {', '.join(cells)}")
    title = "Share of the time outside the network (scheduler, sampling, text, Python):"
    return f"{title}\n\n" + "\n".join(lines) if lines else ""


def _work(results: Results) -> str:
    def cell(label: str, workload: str) -> str:
        found = results.of(label, workload)
        if not found:
            return ""
        computed = found[0].computed_prompt_tokens
        load_s = statistics.median(run.load_s for run in found)
        memory = statistics.median(run.peak_rss_bytes for run in found) / 1e9
        return f"{'?' if computed is None else f'{computed:,}'} / {load_s:.0f} s / {memory:.1f} GB"

    return "Prompt tokens computed / load and warm-up / peak memory:\n\n" + _table(
        results.labels, results.workloads, cell
    )


def _same_answers(results: Results) -> str:
    """Which engines gave the very same greedy texts."""
    lines = []
    for workload in results.workloads:
        labels_by_digest: dict[str, list[str]] = {}
        for run in results.runs:
            if run.workload == workload and run.greedy_outputs_sha256 is not None:
                labels = labels_by_digest.setdefault(run.greedy_outputs_sha256, [])
                if run.label not in labels:
                    labels.append(run.label)
        if labels_by_digest:
            groups = " | ".join("; ".join(labels) for labels in labels_by_digest.values())
            lines.append(f"- {workload}: {groups}")
    return (
        "Same greedy answers to every job (groups that differ are set apart by |):\n\n" + "\n".join(lines)
        if lines
        else ""
    )


def _table(rows: Sequence[str], columns: Sequence[str], cell: Callable[[str, str], str]) -> str:
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += ["| " + " | ".join([row, *(cell(row, column) for column in columns)]) + " |" for row in rows]
    return "\n".join(lines)


def plot(results: Results, path: Path) -> None:
    """Output tokens/s per workload and engine, a dot per run, and the floor's rate as a line."""
    from matplotlib.figure import Figure

    workloads, labels = results.workloads, results.labels
    shown_by_workload = {name: [label for label in labels if results.of(label, name)] for name in workloads}
    num_bars = [max(3, len(shown)) for shown in shown_by_workload.values()]
    figure = Figure(figsize=(0.85 * sum(num_bars) + 1.2, 4.2), layout="constrained")
    axes = figure.subplots(1, len(workloads), squeeze=False, width_ratios=num_bars)[0]
    for ax, (workload, shown) in zip(axes, shown_by_workload.items(), strict=True):
        for place, label in enumerate(shown):
            found = results.of(label, workload)
            rates = [run.output_tokens_per_s for run in found]
            middle = statistics.median(rates)
            # Paler: not the plain case (jobs not grouped for an engine that wants it, or a small cache).
            plain = found[0].kv_cache_tokens is None and (found[0].engine != "openvino" or found[0].grouped)
            ax.bar(place, middle, color=_COLOURS[found[0].engine], alpha=1.0 if plain else 0.5, width=0.75)
            ax.scatter([place] * len(rates), rates, color="black", s=8, zorder=3)
            ax.annotate(f"{middle:.0f}", (place, max(rates)), xytext=(0, 3), textcoords="offset points", ha="center")
        floor = results.floors.get(workload)
        if floor is not None and results.limits is not None:
            rate = floor.output_tokens / floor.linear_s(results.limits)
            ax.axhline(rate, color="black", linestyle="--", linewidth=1)
            ax.annotate("floor", (1.0, rate), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
        ax.set_title(workload)
        names = [label.replace(", float32", "").split(", ") for label in shown]
        wrapped = ["\n".join(textwrap.fill(part, 11) for part in parts) for parts in names]
        ax.set_xticks(range(len(shown)), wrapped, fontsize=7)
        ax.set_xlim(-0.6, len(shown) - 0.1)
        ax.set_ylim(0, ax.get_ylim()[1] * 1.08)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("output tokens/s")
    machine = results.runs[0].machine
    figure.suptitle(f"{machine.cpu_model}, {machine.num_cores} cores, {results.runs[0].started_at[:10]}", fontsize=9)
    figure.savefig(path, dpi=130)


def write(folder: Path) -> str:
    """Write the report and the plot into ``folder``; returns the Markdown."""
    results = Results.read(folder)
    if not results.runs:
        raise SystemExit(f"{folder} holds no records of runs")
    text = markdown(results)
    (folder / "report.md").write_text(text, encoding="utf-8")
    plot(results, folder / "report.png")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(write(parser.parse_args().folder))


if __name__ == "__main__":
    main()
