"""Alembic revisions and the function that applies them; imports nothing of ours."""
