"""What the database itself says, asked behind the store's back."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from kvq.migrations.url import database_url


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    """The rows of one SELECT, over a connection of its own."""
    engine = sa.create_engine(database_url(url), poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(statement))]
    finally:
        engine.dispose()
