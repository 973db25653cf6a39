"""Forgetting in SQL: prompts when their job ends, answers once they are told. Callers hold the transaction.

Owns the columns ``forget_prompt`` and ``forget_answer`` of job_payloads: what the one who submitted a job wants
forgotten. What this process itself may not keep (``db.privacy``) is forgotten besides. Invariant: forgetting is part
of the transaction that ends the job (or reports it told), so that no state in between can be seen or left behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.errors import ValueUnreadable
from kvq.worker.jobs import JobError, JobOutcome
from kvq.worker.privacy import without_quotations

# The body of a job whose prompt was forgotten, as a condition on ``job_payloads p``.
HAS_PROMPT = "CAST(p.body AS text) <> 'null'"


def note_wishes(db: Database, conn: Connection, job_ids: Sequence[str]) -> None:
    """After jobs were inserted: note what is to be forgotten of them, and forget the refused ones at once."""
    privacy = db.privacy
    if not job_ids or not (privacy.forget_prompts or privacy.forget_answers):
        return
    which = f"seq IN (SELECT j.seq FROM jobs j WHERE j.job_id {db.among_texts('job_ids')}"
    values = {"job_ids": db.texts(job_ids), "prompt": privacy.forget_prompts, "answer": privacy.forget_answers}
    wishes = "forget_prompt = :prompt, forget_answer = :answer"
    conn.execute(sa.text(f"UPDATE job_payloads SET {wishes} WHERE {which})"), values)
    if privacy.forget_prompts:
        refused = f"UPDATE job_payloads SET body = 'null' WHERE {which} AND j.state = 'failed')"
        conn.execute(sa.text(refused), {"job_ids": values["job_ids"]})


def forget_ended(db: Database, conn: Connection, seqs: Collection[int]) -> None:
    """Jobs have ended: their prompts go where that is wished, and answers that nobody waits for in Celery."""
    wished = _wished(db, conn, seqs)
    _clear(db, conn, "job_payloads", "body = 'null'", [row.seq for row in wished if row.prompt])
    unawaited = [row.seq for row in wished if row.answer and not row.awaited]
    _clear(db, conn, "results", "text = NULL, response = NULL", unawaited)


def forget_told(db: Database, conn: Connection, seqs: Collection[int]) -> None:
    """The senders of these jobs know how they ended: answers go where that is wished, and what a prompt came with.

    Celery's headers and links, which may quote the prompt, were kept until now to tell them by.
    """
    wished = _wished(db, conn, seqs)
    _clear(db, conn, "job_payloads", "celery = NULL", [row.seq for row in wished if row.prompt])
    _clear(db, conn, "results", "text = NULL, response = NULL", [row.seq for row in wished if row.answer])


def _wished(db: Database, conn: Connection, seqs: Collection[int]) -> Sequence[sa.Row[Any]]:
    """The jobs of which something is to be forgotten, and what."""
    if not seqs:
        return []
    statement = sa.text(f"""
    SELECT p.seq, p.forget_prompt OR :prompts AS prompt, p.forget_answer OR :answers AS answer,
           p.celery IS NOT NULL AS awaited
    FROM job_payloads p
    WHERE p.seq {db.among("seqs")} AND (p.forget_prompt OR p.forget_answer OR :prompts OR :answers)
    """).columns(prompt=sa.Boolean(), answer=sa.Boolean(), awaited=sa.Boolean())
    privacy = db.privacy
    values = {"seqs": db.numbers(seqs), "prompts": privacy.forget_prompts, "answers": privacy.forget_answers}
    return conn.execute(statement, values).all()


def _clear(db: Database, conn: Connection, table: str, sets: str, seqs: Collection[int]) -> None:
    if seqs:
        statement = sa.text(f"UPDATE {table} SET {sets} WHERE seq {db.among('seqs')}")
        conn.execute(statement, {"seqs": db.numbers(seqs)})


def without_prompts(db: Database, conn: Connection, outcomes: Sequence[JobOutcome]) -> list[JobOutcome]:
    """Outcomes whose errors quote nothing of a prompt that is to be forgotten or is encrypted."""
    seqs = [outcome.seq for outcome in outcomes if outcome.error is not None]
    if not seqs:
        return list(outcomes)
    statement = sa.text(f"""
    SELECT p.seq, p.body FROM job_payloads p WHERE p.seq {db.among("seqs")} AND (p.forget_prompt OR :hides)
    """).columns(body=sa.JSON())
    rows = conn.execute(statement, {"seqs": db.numbers(seqs), "hides": db.privacy.hides_prompts})
    body_by_seq = {row.seq: row.body for row in rows}
    return [_quiet(db, outcome, body_by_seq) for outcome in outcomes]


def _quiet(db: Database, outcome: JobOutcome, body_by_seq: dict[int, object]) -> JobOutcome:
    error = outcome.error
    if error is None or outcome.seq not in body_by_seq:
        return outcome
    try:
        body = db.privacy.open_json(body_by_seq[outcome.seq], outcome.job_id, "body")
        message = without_quotations(error.message, body)
    except ValueUnreadable:
        message = "the reason is not stored, since it may quote the prompt"
    return replace(outcome, error=JobError(code=error.code, message=message))
