"""``kvq worker``: serve the queue until told to stop."""

from __future__ import annotations

import dataclasses

import click

from kvq.cli.batches import blaming_db, check_file
from kvq.cli.options import settings_options
from kvq.engine.model_presence import require_model
from kvq.worker.config import Settings, setting_fields
from kvq.worker.errors import SettingsError

_ALL = tuple(f.name for f in setting_fields() if not f.of_engine)


@click.command("worker")
@click.option("--no-broker", is_flag=True, help="Take jobs straight from the database, as `kvq submit` put them.")
@settings_options(*_ALL, engine=True)
def command(settings: Settings, no_broker: bool) -> int:
    """Serve the queue until told to stop.

    With a broker it is a Celery worker: any Celery client may send it the task kvq.generate, whose
    keyword arguments are the body of an OpenAI request. SIGTERM or Ctrl-C let what runs finish within
    --drain-timeout and give the rest back; a second one stops at once.

    Exit codes: 0 told to stop, 2 bad settings, 1 it cannot go on.
    """
    if no_broker:
        settings = dataclasses.replace(settings, broker=None, result_backend=None)
    elif settings.broker is None:
        raise SettingsError(
            "broker", "is not set; give --broker redis://HOST, KVQ_BROKER or broker in kvq.toml, or --no-broker"
        )
    require_model(settings.engine_config())
    check_file(settings, must_exist=False)
    from kvq.worker.runner import leave, run_worker

    with blaming_db(settings):
        exit_code = run_worker(settings)
    leave(exit_code)
