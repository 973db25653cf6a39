"""``kvq poison``: the messages of the broker that nobody could read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvq.cli.options import json_option, settings_options
from kvq.cli.output import count, print_json, print_table, say, shorten
from kvq.worker.config import Settings
from kvq.worker.errors import SettingsError
from kvq.worker.urls import is_redis

if TYPE_CHECKING:
    from kvq.worker.poison import PoisonList


@click.group("poison")
def command() -> None:
    """Messages of the broker that could not be read at all.

    A message that names a task id gets an answer even when it is bad. One that does not, is too large, or is no
    message, is set aside here: nothing is dropped silently.
    """


@command.command("list")
@settings_options("broker", "queue")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many.")
@json_option
def list_(settings: Settings, limit: int, as_json: bool) -> None:
    """List them, newest first, each with the reason."""
    with _opened(settings) as poison:
        messages = poison.messages(limit)
    if as_json:
        print_json(messages)
        return
    print_table(
        ("bytes", "reason", "begins"),
        ((message.num_bytes, shorten(message.reason, 80), shorten(message.begins, 80)) for message in messages),
        right=("bytes",),
    )


@command.command()
@settings_options("broker", "queue")
def retry(settings: Settings) -> None:
    """Put all of them back into the queue."""
    with _opened(settings) as poison:
        say(f"{count(poison.retry(), 'message')} put back into queue {settings.queue}")


@command.command()
@settings_options("broker", "queue")
@click.confirmation_option("--yes", prompt="Delete all of them for good?")
def drop(settings: Settings) -> None:
    """Delete all of them for good."""
    with _opened(settings) as poison:
        say(f"{count(poison.drop(), 'message')} deleted")


def _opened(settings: Settings) -> PoisonList:
    from kvq.worker.keys import QueueKeys
    from kvq.worker.poison import PoisonList

    if settings.broker is None:
        raise SettingsError("broker", "is not set; give --broker redis://HOST, KVQ_BROKER or broker in kvq.toml")
    if not is_redis(settings.broker):
        raise SettingsError("broker", f"is not Redis: look at its queue {QueueKeys(queue=settings.queue).poison}")
    return PoisonList(settings.broker, settings.queue)
