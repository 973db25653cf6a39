"""``kvq run``: a file of jobs, run here and now by a worker inside this process.

Owns the identity of a run: the same file with the same model is the same batch, so the same command goes on
where the last one stopped. Its jobs wait in a queue of their own, so that no other run or worker on this
database takes them with another model. Knows neither the engine nor SQL.
"""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from kvq.cli.batches import db_flag, open_store
from kvq.cli.export import export
from kvq.cli.interrupts import EXIT_INTERRUPTED, end_at_once
from kvq.cli.main import EXIT_ROWS_FAILED
from kvq.cli.options import FILE_NAME, settings_options
from kvq.cli.output import check_writable, count, print_json, say, stderr_console, stdout_console
from kvq.cli.progress import open_display
from kvq.cli.summary import print_summary
from kvq.engine.model_presence import require_model
from kvq.worker.config import Settings
from kvq.worker.errors import SettingsError, UnknownBatch
from kvq.worker.files import FileReport, name_of, open_input
from kvq.worker.jobs import JobState
from kvq.worker.submission import Submission, describe_bad_rows, enqueue, require_good

if TYPE_CHECKING:
    from kvq.worker.service import WorkerService
    from kvq.worker.service_options import ServiceProgress
    from kvq.worker.store import Store
    from kvq.worker.store_records import BatchProgress

_NAMESPACE = uuid.UUID("a2a0c1f4-7d0b-4c1e-9a52-1f3f6d0a9be7")
# Another value of one of these gives other answers: that is another batch, not the rest of this one.
_IDENTITY = ("tokenizer", "load_format", "dtype", "seed", "generation_config")
# Ctrl-C means "stop soon"; a whole drain timeout is for workers.
_LONGEST_STOP_S = 10.0
_NUM_SAMPLES = 3


class _Stopped(Exception):
    """Somebody asked the run to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the command line asks for, settings apart."""

    file: str
    output: str | None
    errors: str | None
    skip_invalid: bool
    as_json: bool


@click.command("run")
@click.argument("file", type=FILE_NAME)
@click.option(
    "--output", "-o", type=FILE_NAME, metavar="FILE", help="Write the rows that succeeded here, in OpenAI's format."
)
@click.option(
    "--errors",
    "-e",
    type=FILE_NAME,
    metavar="FILE",
    help="Write the rows that did not succeed here, in OpenAI's format.",
)
@click.option("--skip-invalid", is_flag=True, help="Run the good rows and record the bad ones as failed.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@settings_options(
    "db",
    "served_model_name",
    "window",
    "window_tokens",
    "drain_timeout",
    "log_level",
    "encryption_key_file",
    "store_prompts",
    engine=True,
)
def command(settings: Settings, **flags: Any) -> int:
    """Run a file of jobs here and now, without a broker.

    FILE is in OpenAI's batch format or the short form, one JSON object a line; '-' is standard input,
    *.gz is read as gzip. It is checked to its end first: when a line is bad, every bad line is reported
    and nothing is run. The same command again does only what is not finished.

    Exit codes: 0 all rows succeeded, 3 some did not, 2 bad usage or input, 1 a fault of kvq or a database that is
    away, 130 interrupted.
    """
    wanted = _Wanted(**flags)
    if not settings.store_outputs:
        raise SettingsError(
            "store_outputs",
            "`kvq run` reads the answers from the database: set it to true, or run a worker and ask by Celery",
            source=settings.sources.get("store_outputs"),
        )
    for path in (wanted.output, wanted.errors):
        if path is not None:
            check_writable(path)
    try:
        return _run(wanted, settings)
    except KeyboardInterrupt:  # while reading or writing; once rows run, the signal is only noted
        say("stopped; the same command goes on from here")
        return EXIT_INTERRUPTED


def _run(wanted: _Wanted, settings: Settings) -> int:
    with open_input(wanted.file) as source:
        report = source.check(settings.served_names(), settings.engine_config().lora_paths)
        if any(row.code == "model_not_found" for row in report.bad):
            require_model(settings.engine_config())  # else the rows get the blame for a wrong path
        if not wanted.skip_invalid:
            require_good(report)
        elif report.bad:
            say(describe_bad_rows(report))
        batch_id = run_id(report, settings)
        settings = settings.with_queue(f"run-{batch_id}")
        submission = Submission(batch_id=batch_id, queue=settings.queue, name=name_of(wanted.file), source=wanted.file)
        with open_store(settings, create=True) as store:
            before = _progress(store, batch_id)
            if before is None or not before.finished:
                require_model(settings.engine_config())  # nothing is left waiting for a model that is not there
            enqueue(store, source, submission)
            try:
                progress = _finish(store, batch_id, settings, report, before)
            except _Stopped:
                progress = store.batch_progress(batch_id)
                say(
                    f"stopped: {progress.done:,} of {count(progress.total, 'row')} are done and kept; "
                    "the same command resumes with the others"
                )
                return EXIT_INTERRUPTED
            _report(store, batch_id, settings, wanted)
    return 0 if progress.succeeded == progress.total else EXIT_ROWS_FAILED


def run_id(report: FileReport, settings: Settings) -> str:
    """The batch that a file is with these settings: the same again for the same text and model."""
    config = settings.engine_config()
    model = os.path.realpath(config.model) if os.path.exists(config.model) else config.model
    identity = [report.sha256, model, *(str(getattr(config, name)) for name in _IDENTITY)]
    return str(uuid.uuid5(_NAMESPACE, "\0".join(identity)))


def _progress(store: Store, batch_id: str) -> BatchProgress | None:
    """How far a batch is; None before it is made."""
    try:
        return store.batch_progress(batch_id)
    except UnknownBatch:
        return None


def _finish(
    store: Store, batch_id: str, settings: Settings, report: FileReport, before: BatchProgress | None
) -> BatchProgress:
    """Run what is left of a batch that was ``before`` when the command began."""
    progress = store.batch_progress(batch_id)
    file, rows = report.path, count(progress.total, "row")
    if progress.finished:
        say(f"{file}: all {rows} were done before" if before else f"{file}: none of {rows} can be run")
        return progress
    if before is not None and before.done:
        rows += f", {before.done:,} done before"
    elif progress.done:
        rows += f", {progress.done:,} refused"
    say(f"{file}: {rows}; batch {batch_id}")
    return _work(store, batch_id, settings)


def _report(store: Store, batch_id: str, settings: Settings, wanted: _Wanted) -> None:
    written = export(store, batch_id, output=wanted.output, errors=wanted.errors)
    summary = store.summary(batch_id)
    if wanted.as_json:
        print_json(summary)
        return
    print_summary(
        stderr_console() if "-" in (wanted.output, wanted.errors) else stdout_console(),
        summary,
        db=settings.db,
        db_flag=db_flag(settings),
        files=[(f"{what}s", path) for what, path, _ in written],
        samples=list(islice(store.iter_results(batch_id, states=[JobState.SUCCEEDED]), _NUM_SAMPLES)),
    )


def _work(store: Store, batch_id: str, settings: Settings) -> BatchProgress:
    """Run what is left, showing how far it is.

    Raises:
        _Stopped: after SIGINT or SIGTERM; everything finished is stored, the rest is queued again.
    """
    from kvq.worker.service import WorkerService

    asked_level = settings.log_level if "log_level" in settings.sources else "warning"
    service = WorkerService.from_settings(settings, store)
    with _stopping(service) as asked, open_display(logging.getLevelNamesMapping()[asked_level.upper()]) as display:

        def show(batch: BatchProgress, state: ServiceProgress) -> None:
            display.update(batch, state)
            if asked():
                raise _Stopped

        service.start()
        try:
            progress = service.run_until_idle(batch_id, on_progress=show)
        except _Stopped:
            state = service.progress()
            if not state.ready:
                say("stopping as soon as the model is loaded")
            elif state.claimed:
                say(f"stopping: {count(state.claimed, 'row')} may finish first; Ctrl-C again stops at once")
            raise
        finally:
            service.drain(min(settings.drain_timeout, _LONGEST_STOP_S))
        return progress


@contextmanager
def _stopping(service: WorkerService) -> Iterator[Callable[[], bool]]:
    """Turn SIGINT and SIGTERM into a question the run asks itself; the second one ends the drain.

    After the drain all is stored: of a run that was asked to stop, one more ends what little the process still does.
    """
    num_asked = 0

    def ask(_signum: int, _frame: object) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            service.hurry_drain()

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: num_asked > 0
    finally:
        for number, handler in old.items():
            signal.signal(number, end_at_once if num_asked else handler)
