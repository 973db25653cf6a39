"""``kvq submit``: files of jobs into the database, for workers to run."""

from __future__ import annotations

import click

from kvq.cli.batches import blaming_db, check_file, waiting_for
from kvq.cli.duration import Duration
from kvq.cli.interrupts import EXIT_INTERRUPTED
from kvq.cli.main import EXIT_ROWS_FAILED
from kvq.cli.options import FILE_NAME, settings_options
from kvq.cli.output import count, say
from kvq.cli.summary import state_counts
from kvq.worker.config import Settings
from kvq.worker.jobs import DEFAULT_TENANT


@click.command("submit")
@click.argument("files", type=FILE_NAME, metavar="FILE...", nargs=-1, required=True)
@settings_options(
    "db", "broker", "queue", "max_queued", "dedup_period", "encryption_key_file", "store_prompts", "store_outputs"
)
@click.option("--name", help="A name by which the batch can be asked for later.  [default: the file's]")
@click.option(
    "--priority", type=click.IntRange(-32768, 32767), default=0, show_default=True, help="Smaller runs earlier."
)
@click.option("--skip-invalid", is_flag=True, help="Enqueue the good rows and record the bad ones as failed.")
@click.option("--idempotency-key", metavar="KEY", help="The same key is the same batch, however often it is submitted.")
@click.option(
    "--webhook",
    metavar="URL",
    help="A worker POSTs here when the batch has ended, signed with its --webhook-secret (Standard Webhooks).",
)
@click.option(
    "--tenant",
    metavar="NAME",
    default=DEFAULT_TENANT,
    show_default=True,
    help="Whose budget and share the jobs count to, see `kvq tenants`.",
)
@click.option(
    "--completion-window",
    metavar="DURATION",
    type=Duration(),
    help="What is not finished after 24h, 90m, ... expires; what is finished stays.",
)
@click.option("--wait", is_flag=True, help="Wait until the batches are finished.")
def command(
    files: tuple[str, ...],
    settings: Settings,
    name: str | None,
    priority: int,
    skip_invalid: bool,
    idempotency_key: str | None,
    webhook: str | None,
    tenant: str,
    completion_window: float | None,
    wait: bool,
) -> int:
    """Put files of jobs into the database for workers to run.

    FILE is in OpenAI's batch format or the short form, one JSON object a line; '-' is standard input,
    *.gz is read as gzip. Each file becomes a batch, whose id is printed on stdout. All files are checked
    to their end: when a line is bad, every bad line is reported and nothing is left enqueued. Of a file that takes
    long to check the first rows may run meanwhile.
    While the queue is full (--max-queued) the command says so and waits.

    Exit codes: 0 enqueued, and with --wait all rows succeeded, 3 with --wait some did not, 2 bad usage or input,
    1 a fault of kvq or a database that is away, 130 interrupted.
    """
    from kvq.worker.client import Client

    check_file(settings, must_exist=False)
    with blaming_db(settings):
        opened = Client(
            db=settings.db,
            broker=settings.broker,
            queue=settings.queue,
            max_queued=settings.max_queued,
            dedup_period=settings.dedup_period,
            on_full=lambda sentence: say(f"kvq: {sentence}"),
            encryption_key=settings.encryption_key,
            encryption_key_file=settings.encryption_key_file,
            store_prompts=settings.store_prompts,
            store_outputs=settings.store_outputs,
        )
    with opened as client:
        batches = client.submit_files(
            files,
            name=name,
            priority=priority,
            skip_invalid=skip_invalid,
            idempotency_key=idempotency_key,
            webhook=webhook,
            tenant=tenant,
            completion_window=completion_window,
        )
        for batch in batches:
            click.echo(batch.id)
            num_bad = len(batch.report.bad)
            bad = f", {count(num_bad, 'bad row')} recorded as failed" if num_bad else ""
            enqueued = count(max(0, batch.num_new - num_bad), "job")
            say(f"{batch.report.path}: {enqueued} enqueued on queue {settings.queue}{bad}")
        if not wait:
            return 0
        try:
            ended = [waiting_for(client, batch) for batch in batches]
        except KeyboardInterrupt:
            say("kvq: no longer waiting; the batches go on, see `kvq status`")
            return EXIT_INTERRUPTED
    for progress in ended:
        say(f"{progress.batch_id}: {state_counts(progress)}")
    return 0 if all(progress.succeeded == progress.total for progress in ended) else EXIT_ROWS_FAILED
