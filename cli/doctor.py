"""``kvq doctor``: what the figures of the workers mean, in words; and whether every invariant holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from kvq.cli.batches import open_store
from kvq.cli.main import EXIT_OUR_FAULT
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import print_json, stdout_console
from kvq.worker.config import Settings

if TYPE_CHECKING:
    from kvq.worker.audit import AuditCheck
    from kvq.worker.diagnosis import Finding

_STYLES = {"ok": "green", "hint": "cyan", "warning": "yellow", "problem": "red"}


@click.command("doctor")
@click.option("--minutes", type=click.FloatRange(min=0.5), default=5.0, show_default=True, help="How far to look back.")
@click.option("--audit", "wants_audit", is_flag=True, help="Check every invariant of the database, and of the broker.")
@settings_options("db", "broker", "queue", "lease_s")
@json_option
def command(minutes: float, wants_audit: bool, settings: Settings, as_json: bool) -> int:
    """Say in words what the figures of the workers mean, and what to change.

    With --audit, check instead that every accepted job has exactly one fate: one result for each job that
    ended, a live owner for each that runs, counts that sum up, an outbox that is drained, no KV block held by
    a worker without jobs and, with --broker, no message between Redis and SQL. It changes nothing and may run
    at any time.

    Exit codes: 0, or 1 when --audit finds a broken invariant.
    """
    from kvq.worker.audit import audit
    from kvq.worker.diagnosis import diagnose

    console = stdout_console()
    with open_store(settings) as store:
        if wants_audit:
            checks = audit(store, settings)
            broken = [check for check in checks if not check.holds]
            if as_json:
                print_json({"holds": not broken, "checks": [_check_json(check) for check in checks]})
            else:
                _print_checks(console, checks)
            return EXIT_OUR_FAULT if broken else 0
        findings = diagnose(
            store.worker_samples(last_s=minutes * 60), store.queues(), store.live_workers(), lease_s=settings.lease_s
        )
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            _print_finding(console, finding)
    return 0


def _check_json(check: AuditCheck) -> dict[str, object]:
    return {"invariant": check.invariant, "holds": check.holds, "problems": list(check.problems), "note": check.note}


def _print_checks(console: Console, checks: list[AuditCheck]) -> None:
    for check in checks:
        mark = ("holds   ", "green") if check.holds else ("BROKEN  ", "bold red")
        console.print(Text.assemble(mark, check.invariant), soft_wrap=True)
        for problem in check.problems:
            console.print(Text(f"          {problem}", style="red"), soft_wrap=True)
        if check.note is not None:
            console.print(Text(f"          note: {check.note}", style="yellow"), soft_wrap=True)


def _print_finding(console: Console, finding: Finding) -> None:
    style = _STYLES[finding.severity.value]
    head = Text.assemble((f"{finding.severity.value:<8}", f"bold {style}"), (finding.subject, "bold"))
    console.print(head, soft_wrap=True)
    console.print(Text(f"        {finding.meaning}"), soft_wrap=True)
    if finding.advice is not None:
        console.print(Text(f"        -> {finding.advice}", style=style), soft_wrap=True)
