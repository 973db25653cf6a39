"""``kvq db``: create or upgrade the tables, and tell which revision they are at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvq.cli.batches import blaming_db, check_file, db_flag
from kvq.cli.options import json_option, settings_options
from kvq.cli.output import print_json, say
from kvq.worker.config import Settings
from kvq.worker.errors import SettingsError, StoreUnavailable
from kvq.worker.failpoints import Failpoints
from kvq.worker.urls import masked


@click.group("db")
def command() -> None:
    """Create or upgrade the database tables.

    A SQLite file is created and upgraded by `kvq run`, `kvq submit` and `kvq worker` too; PostgreSQL by this
    command only.
    """


@command.command()
@settings_options("db")
def upgrade(settings: Settings) -> None:
    """Bring the tables to this version's revision. Safe to run again, and by several processes at once."""
    from kvq.migrations import migrate

    check_file(settings, must_exist=False)
    with _opening(settings):
        before = migrate.current(settings.db)
        migrate.upgrade(settings.db, before_commit=lambda: Failpoints.from_environment().hit("during_migrate"))
        after = migrate.current(settings.db)
    if before == after:
        say(f"{masked(settings.db)} is already at revision {after}")
    else:
        say(f"{masked(settings.db)}: {before or 'no tables'} -> revision {after}")


@command.command()
@settings_options("db")
@json_option
def current(settings: Settings, as_json: bool) -> None:
    """Print the revision of the tables (none where there are no tables yet)."""
    from kvq.migrations import migrate

    with _opening(settings):
        revision = migrate.current(settings.db)
    needed = migrate.head()
    if as_json:
        print_json({"current": revision, "head": needed})
    else:
        click.echo(revision or "none")
    if not migrate.is_known(revision):
        say(f"this version of kvq knows revisions up to {needed}: use the newer kvq that made these tables")
    elif revision != needed:
        say(f"this version of kvq needs revision {needed}: run `kvq db upgrade{db_flag(settings)}`")


@command.command("grant-reader")
@click.argument("role", metavar="ROLE")
@settings_options("db")
def grant_reader(role: str, settings: Settings) -> None:
    """Let a PostgreSQL role read the views, and nothing else.

    The views show states, answers, errors and figures; prompts are in the tables, which stay closed. ROLE is created
    without a login where there is none: grant it to the users who are to read.
    """
    from kvq.worker.store_roles import grant_reader

    check_file(settings, must_exist=True)
    with blaming_db(settings):
        created = grant_reader(settings.db, role)
    say(f"role {role} {'was created and ' if created else ''}may read the views of {masked(settings.db)}")


@contextmanager
def _opening(settings: Settings) -> Iterator[None]:
    """Alembic is called below the store, so its errors are the driver's."""
    from sqlalchemy.exc import OperationalError, SQLAlchemyError

    where = masked(settings.db)
    try:
        yield
    except OperationalError as err:
        raise StoreUnavailable(f"cannot use the database {where}: {err.orig}") from err
    except (SQLAlchemyError, ValueError, OSError) as err:
        reason = getattr(err, "orig", None) or err
        raise SettingsError("db", f"cannot use {where}: {reason}", source=settings.sources.get("db")) from err
