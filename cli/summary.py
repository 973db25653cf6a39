"""The summary of a batch: what was done, what it cost, what went wrong, and where the results are.

Knows how to say it; the numbers are the store's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kvq.cli.output import count, milliseconds, seconds, shorten
from kvq.worker.urls import for_psql, masked

if TYPE_CHECKING:
    from kvq.worker.store_records import BatchProgress, BatchSummary, Percentiles, ResultRow

_MOST_ERRORS = 5
_STATES = ("succeeded", "failed", "cancelled", "expired", "dead", "running", "queued")
_WEBHOOK_STATES = {
    "open": "not armed: its submission has not ended",
    "waiting": "waiting for the end of the batch",
    "pending": "to be delivered",
    "failed": "given up",
}
_STYLE_BY_WEBHOOK_STATE = {"delivered": "green", "failed": "red"}
_STYLE_BY_STATE = {"succeeded": "green", "failed": "red", "dead": "red", "cancelled": "yellow", "expired": "yellow"}


def answer(row: ResultRow) -> str:
    """What a row came to, for a line."""
    return count(row.num_embeddings, "embedding") if row.num_embeddings else row.text or ""


def state_counts(progress: BatchProgress) -> str:
    """``41 succeeded, 2 failed``: every state that occurs."""
    return state_text(progress).plain


def state_text(progress: BatchProgress) -> Text:
    """The same in colour."""
    parts = [
        Text(f"{getattr(progress, state):,} {state}", style=_STYLE_BY_STATE.get(state, ""))
        for state in _STATES
        if getattr(progress, state)
    ]
    return Text(", ").join(parts) if parts else Text("no rows")


def print_summary(
    console: Console,
    summary: BatchSummary,
    *,
    db: str,
    db_flag: str = "",
    files: Sequence[tuple[str, str]] = (),
    samples: Sequence[ResultRow] = (),
) -> None:
    """Print a batch for a person.

    Args:
        db_flag: what names the database in the commands that are shown.
        files: (what, path) pairs that were written.
        samples: rows whose answers are shown as examples.
    """
    answers = [Text(f"  {shorten(row.custom_id, 14):<15}{shorten(answer(row), 90)}") for row in samples]
    for line in [
        *_costs(summary),
        *_errors(summary),
        *_webhook(summary),
        *_section("answers", answers),
        *_section("results", _places(summary.progress.batch_id, db, files, db_flag=db_flag)),
    ]:
        console.print(line, soft_wrap=True)


def _costs(summary: BatchSummary) -> list[Text]:
    progress = summary.progress
    title = Text.assemble(("batch ", "bold"), (progress.batch_id, "bold cyan"), f"  {progress.name or ''}")
    lines = [Text(), title, _row("rows", f"{progress.total:,}", state_text(progress))]
    if progress.prompt_tokens:
        share = summary.reuse_share or 0.0
        reused = Text(f"of which {progress.cached_tokens:,} reused ({share:.0%})", style="green" if share else "")
        lines.append(_row("prompt tokens", f"{progress.prompt_tokens:,}", reused))
    if progress.completion_tokens:
        rate = summary.completion_tokens_per_s
        lines.append(
            _row("output tokens", f"{progress.completion_tokens:,}", Text(f"{rate:,.1f} tokens/s" if rate else ""))
        )
    if summary.wall_s is not None:
        lines.append(_row("time", seconds(summary.wall_s), Text("from the first job's start to the last result")))
    lines += _latency("first token", summary.ttft) + _latency("per token", summary.tpot)
    if (right := progress.acceptance) is not None:
        lines.append(
            _row("guessed ahead", f"{progress.num_draft_tokens:,}", Text(f"tokens, {right:.0%} of them rightly"))
        )
    if summary.preemptions:
        lines.append(
            _row("preemptions", f"{summary.preemptions:,}", Text("KV cache was short; try a lower --max-num-seqs"))
        )
    if summary.retried_jobs:
        lines.append(_row("run again", f"{summary.retried_jobs:,}", Text("after a worker was lost")))
    return lines


def _errors(summary: BatchSummary) -> list[Text]:
    lines = []
    for error in summary.errors[:_MOST_ERRORS]:
        where = f", first on line {error.first_line_no}" if error.first_line_no is not None else ""
        lines.append(Text(f"  {count(error.num_jobs, 'row')}{where}: {shorten(error.example, 240)} [{error.code}]"))
    if len(summary.errors) > _MOST_ERRORS:
        lines.append(Text(f"  and {count(len(summary.errors) - _MOST_ERRORS, 'other kind')} of error"))
    return _section("errors", lines, "bold red")


def _webhook(summary: BatchSummary) -> list[Text]:
    hook = summary.webhook
    if hook is None:
        return []
    state = Text(_WEBHOOK_STATES.get(hook.state, hook.state), style=_STYLE_BY_WEBHOOK_STATE.get(hook.state, ""))
    tried = f" after {count(hook.tries, 'attempt')}" if hook.tries else ""
    due = ""
    if hook.state == "pending" and hook.next_at is not None:
        due = f", next at {hook.next_at.astimezone():%Y-%m-%d %H:%M:%S}"
    lines = [Text(f"  {hook.url}  ") + state + Text(tried + due)]
    if hook.last_error:
        lines.append(Text(f"  {shorten(hook.last_error, 240)}"))
    return _section("webhook", lines)


def _places(batch_id: str, db: str, files: Sequence[tuple[str, str]], *, db_flag: str) -> list[Text]:
    places = [
        *((what, "standard output" if path == "-" else path) for what, path in files),
        ("database", f"{masked(db)}  (view job_results)"),
        ("read them", f"kvq results {batch_id[:8]}{db_flag}"),
        ("ask for them", _example_query(db, batch_id)),
    ]
    return [Text(f"  {what:<15}{where}") for what, where in places]


def _section(title: str, lines: list[Text], style: str = "bold") -> list[Text]:
    return [Text(), Text(title, style=style), *lines] if lines else []


def _row(label: str, value: str, more: Text) -> Text:
    return Text(f"  {label:<15}") + Text(f"{value:>10}  ", style="bold") + more


def _latency(label: str, measured: Percentiles | None) -> list[Text]:
    if measured is None:
        return []
    p95 = Text(f"p50, {milliseconds(measured.p95_ms)} p95")
    return [_row(label, milliseconds(measured.p50_ms), p95)]


def _example_query(db: str, batch_id: str) -> str:
    query = f"SELECT custom_id, state, text FROM job_results WHERE batch_id = '{batch_id}' LIMIT 5"
    if db.startswith(("postgresql://", "postgres://", "postgresql+psycopg://")):
        return f'psql {shlex.quote(for_psql(db))} -c "{query}"'
    return f'sqlite3 {shlex.quote(db.removeprefix("sqlite:///"))} "{query}"'
