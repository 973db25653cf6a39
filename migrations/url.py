"""Where the database is: one spelling for every way people write it.

Owns the reading of database URLs; opens nothing.
"""

from __future__ import annotations

from sqlalchemy.engine import URL, make_url


def database_url(text: str) -> URL:
    """Read ``sqlite:///path``, a bare path, or ``postgresql://...`` (``postgres://`` too).

    PostgreSQL is always spoken to through psycopg 3.

    Raises:
        ValueError: another kind of database.
    """
    if "://" not in text:
        return URL.create("sqlite", database=text)
    url = make_url(text)
    backend = url.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if backend == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise ValueError("an in-memory SQLite database cannot be shared: give a file, as in sqlite:///kvq.db")
        return url.set(drivername="sqlite")
    raise ValueError(f"database {backend!r} is not supported: use sqlite:///PATH or postgresql://USER@HOST/NAME")
