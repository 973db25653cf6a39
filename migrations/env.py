"""Runs the revisions inside one transaction on the connection that migrate.py passes in.

Alembic executes this file; nothing imports it. It opens no connection and reads no ini file.
"""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, render_as_batch=connection.dialect.name == "sqlite")
context.run_migrations()
