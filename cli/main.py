"""The ``kvq`` command: finds the subcommand, runs it, and turns errors into exit codes.

Knows each subcommand's module and one-line help, so that ``kvq --help`` imports none of them.
Exit codes: 0 all succeeded, 1 a fault of ours or a server that is away, 2 bad usage or input, 3 some rows failed, 130
interrupted.
"""

from __future__ import annotations

import difflib
import errno
import io
import sys
from collections.abc import Sequence
from importlib import import_module

import click

import kvq
from kvq.cli.interrupts import EXIT_INTERRUPTED, end_when_interrupted, raise_when_interrupted
from kvq.engine.errors import ConfigError, EngineError, ModelError
from kvq.engine.threads import prefer_short_spins
from kvq.worker.errors import (
    FileInvalid,
    FileUnreadable,
    FilterError,
    RowError,
    SchemaOutOfDate,
    SettingsError,
    UnknownBatch,
    ValueUnreadable,
    WebhookRefused,
    WorkerError,
)
from kvq.worker.urls import masked

EXIT_OUR_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_ROWS_FAILED = 3
# What a full disk says: no space, over the quota, larger than a file may be.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# Their messages say what the person has to change; everything else of ours is a fault.
_BAD_INPUT = (
    ConfigError,
    FileInvalid,
    FileUnreadable,
    FilterError,
    ModelError,
    RowError,
    SchemaOutOfDate,
    SettingsError,
    UnknownBatch,
    ValueUnreadable,
    WebhookRefused,
)

COMMANDS = {
    "run": "Run a file of jobs here and now, without a broker.",
    "plan": "Tell what a file of jobs will take, without running it.",
    "size": "Size a KV cache by arithmetic.",
    "submit": "Put files of jobs into the database for workers to run.",
    "worker": "Serve the queue until told to stop.",
    "status": "Show batches and workers, or one batch in detail.",
    "top": "Watch workers, queues and batches.",
    "doctor": "Say what the figures of the workers mean; check every promise.",
    "results": "Show the results of a batch.",
    "export": "Write a batch as OpenAI output and error files.",
    "cancel": "Cancel what is not finished of a batch.",
    "retry": "Run again what did not succeed of a batch.",
    "rerun": "Compute the answer of a job again and compare.",
    "dead": "List, retry or drop jobs that were given up after crashes.",
    "poison": "List, retry or drop the messages that could not be read.",
    "pause": "Stop taking jobs of a queue.",
    "resume": "Take jobs of a paused queue again.",
    "tenants": "Set and list budgets and weights of those who share the queues.",
    "prune": "Delete what ended long ago.",
    "db": "Create or upgrade the database tables.",
    "config": "Show the settings and where each comes from.",
    "completion": "Print the shell completion script.",
}


class LazyGroup(click.Group):
    """A group whose subcommands live in ``kvq.cli.NAME`` and are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"kvq.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        raise_when_interrupted()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as err:
            if near := difflib.get_close_matches(args[0], COMMANDS, n=1):
                raise click.UsageError(f"{err.message} Did you mean {near[0]}?", ctx) from err
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(kvq.__version__, prog_name="kvq")
def cli() -> None:
    """kvq runs batches of prompts through a language model, sharing what their prompts share.

    \b
    kvq run jobs.jsonl --output results.jsonl     one file, here and now
    kvq worker, kvq submit jobs.jsonl             a queue and its workers
    """


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Commands return theirs; None is 0."""
    try:
        result = cli.main(list(args), prog_name="kvq", standalone_mode=False)
    except click.ClickException as err:
        _show(err)
        return err.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("kvq: interrupted", err=True)
        return EXIT_INTERRUPTED
    except (WorkerError, EngineError) as err:
        click.echo(f"kvq: error: {err}", err=True)
        return EXIT_BAD_INPUT if isinstance(err, _BAD_INPUT) else EXIT_OUR_FAULT
    return result if isinstance(result, int) else 0


def _show(err: click.ClickException) -> None:
    """It quotes what was typed, a URL in a wrong place too."""
    said = io.StringIO()
    err.show(said)
    for line in said.getvalue().splitlines():
        click.echo(masked(line) if "://" in line else line, err=True)


def main() -> None:
    """Run the command line of this process and end it."""
    prefer_short_spins()
    try:
        code = run(sys.argv[1:])
        end_when_interrupted()
        sys.stdout.flush()
    except OSError as err:
        if err.errno != errno.EPIPE:  # `kvq results ... | head`
            if err.errno not in NO_ROOM:
                raise
            click.echo(f"kvq: error: cannot write: {err.strerror}", err=True)
        sys.stdout = None  # or the interpreter complains when it flushes at exit
        code = EXIT_OUR_FAULT
    sys.exit(code)
