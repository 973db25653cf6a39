"""Opening the store for a command, and finding the batch a person means.

Knows what BATCH may be on a command line: an id, the beginning of one, a name, or ``latest``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvq.cli.output import count, say
from kvq.cli.summary import state_counts
from kvq.worker.config import Settings
from kvq.worker.errors import SchemaOutOfDate, SettingsError, StoreError, StoreUnavailable, UnknownBatch
from kvq.worker.urls import masked

if TYPE_CHECKING:
    from kvq.worker.client import Batch, Client
    from kvq.worker.store import Store
    from kvq.worker.store_records import BatchProgress

_TELL_EVERY_S = 5.0

batch_argument = click.argument("batch", metavar="BATCH")
BATCH_HELP = "BATCH is an id, the beginning of one, a name, or 'latest'."


def open_store(settings: Settings, *, create: bool = False) -> Store:
    """Open the configured database; ``create`` lets a SQLite file come into being.

    Raises:
        SettingsError: when what ``db`` names is no database of ours.
        StoreUnavailable, SchemaOutOfDate: as the store says.
    """
    from kvq.worker.privacy import Privacy
    from kvq.worker.store import Store

    check_file(settings, must_exist=not create)
    with blaming_db(settings):
        return Store.open(settings.db, create=create, privacy=Privacy.from_settings(settings))


def check_file(settings: Settings, *, must_exist: bool) -> None:
    """Refuse a SQLite file that cannot be used before anything tries to; other databases pass.

    Raises:
        SettingsError: naming the file and what is wrong with it.
    """
    name = settings.db.removeprefix("sqlite:///")
    if "://" in name:
        return
    path, wrong = Path(name), None
    if path.exists():
        if not path.is_file():
            wrong = f"{name} is not a file"
        elif not os.access(path, os.R_OK | os.W_OK):
            wrong = f"no permission to read and write {name}"
    elif must_exist:
        wrong = f"there is no file {name}; `kvq run` and `kvq submit` create it, --db names another"
    elif not path.absolute().parent.is_dir():
        wrong = f"cannot create {name}: the folder {path.parent} does not exist"
    if wrong is not None:
        raise SettingsError("db", wrong, source=settings.sources.get("db"))


@contextmanager
def blaming_db(settings: Settings) -> Iterator[None]:
    """While a database is opened, what it refuses is the fault of the setting that names it."""
    try:
        yield
    except SchemaOutOfDate as err:
        upgrade = err.upgrade and f"{err.upgrade}{db_flag(settings)}"
        raise SchemaOutOfDate(url=err.url, found=err.found, expected=err.expected, upgrade=upgrade) from err
    except StoreUnavailable:
        raise
    except StoreError as err:
        said = str(err)
        message = said if masked(settings.db) in said else f"cannot use {masked(settings.db)}: {said}"
        raise SettingsError("db", message, source=settings.sources.get("db")) from err


def db_flag(settings: Settings) -> str:
    """What a command that is shown to a person must name, since this one named it by a flag: `` --db URL``."""
    return f" --db {shlex.quote(masked(settings.db))}" if settings.sources.get("db") == "--db" else ""


def find_batch(store: Store, name: str) -> str:
    """The id of the batch a person means.

    Raises:
        UnknownBatch: when there is none, or more than one.
    """
    if name == "latest":
        newest = store.list_batches(1)
        if not newest:
            raise UnknownBatch(name)
        return newest[0].batch_id
    return store.find_batch(name)


def say_forgotten(num_forgotten: int) -> None:
    """Why jobs that somebody wants to run again do not."""
    if num_forgotten:
        say(
            f"{count(num_forgotten, 'row')} cannot run again: the prompt was forgotten when the job ended "
            "(store_prompts=false); submit it again"
        )


def waiting_for(client: Client, batch: Batch) -> BatchProgress:
    """Wait for a batch, telling a person how far it is."""
    said = ""
    while True:
        try:
            return client.wait(batch, timeout=_TELL_EVERY_S)
        except TimeoutError:
            now = f"{batch.id[:8]}: {state_counts(client.status(batch))}"
            if now != said:
                say(now)
                said = now
