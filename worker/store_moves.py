"""Moves of jobs that do not come from a worker's own result: ended by others, or put back in the queue.

The single place, beside the bulk claim and finish, where a state changes; callers hold the rows' locks. Invariant:
a move is one of LEGAL_MOVES, and with it go the result row, the note in job_attempts and the outbox row.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.jobs import LEGAL_MOVES, TERMINAL_STATES, JobError, JobState
from kvq.worker.store_dedup import let_go
from kvq.worker.store_privacy import HAS_PROMPT, forget_ended
from kvq.worker.store_rows import clean_text
from kvq.worker.store_webhooks import wait_for_next_end

CANCELLED = JobError(code="cancelled", message="cancelled on request")


class Cause(StrEnum):
    """Why a running job stops without a result of its worker; ``RELEASED`` and ``LOST`` are attempt outcomes."""

    RELEASED = "released"
    LOST = "lost"
    ENDED = "ended"


def end(
    db: Database,
    conn: Connection,
    seqs: Collection[int],
    *,
    start: JobState,
    to: JobState,
    error: JobError,
    cause: Cause = Cause.ENDED,
    recheck: str = "TRUE",
) -> list[int]:
    """Move jobs from ``start`` to the terminal state ``to`` with ``error`` as their result; returns those moved.

    ``recheck`` is a condition on ``jobs j`` that must still hold; a lost job's crash is counted.
    """
    assert to in LEGAL_MOVES[start]
    assert to in TERMINAL_STATES
    moved = _move(db, conn, seqs, start=start, to=to, sets=_charge(cause), recheck=recheck)
    if not moved:
        return []
    # Queue wait and whole duration count from the moment the job could have run.
    due = db.later_of("j.created_at", "coalesce(j.not_before, j.created_at)")
    among = db.among("seqs")
    given = {"seqs": db.numbers(moved)}
    conn.execute(
        sa.text(f"""
        INSERT INTO results (seq, attempt, worker_id, model, error_code, error_message, queue_ms, e2e_ms)
        SELECT j.seq, j.attempt, j.owner, j.model, :code, :message,
               1000 * {db.seconds_between(due, "j.claimed_at")}, 1000 * {db.seconds_between(due, db.now)}
        FROM jobs j WHERE j.seq {among}
        """),
        {**given, "code": clean_text(error.code), "message": clean_text(error.message)},
    )
    _note(db, conn, moved, outcome=to.value if cause is Cause.ENDED else cause.value)
    forget_ended(db, conn, moved)
    conn.execute(
        sa.text(f"""
        INSERT INTO outbox (kind, seq)
        SELECT 'celery', p.seq FROM job_payloads p WHERE p.seq {among} AND p.celery IS NOT NULL
        """),
        given,
    )
    let_go(db, conn, moved)
    return moved


def put_back(
    db: Database, conn: Connection, seqs: Collection[int], *, cause: Cause, recheck: str = "TRUE"
) -> list[int]:
    """Move running jobs back to queued; returns those moved.

    A released claim is not charged as an attempt; a lost one counts as a crash.
    """
    assert cause is not Cause.ENDED
    sets = f"owner = NULL, claimed_at = NULL, {_charge(cause)}"
    moved = _move(db, conn, seqs, start=JobState.RUNNING, to=JobState.QUEUED, sets=sets, recheck=recheck)
    _note(db, conn, moved, outcome=cause.value)
    return moved


def release_held(db: Database, conn: Connection, worker_id: str, seqs: Collection[int] | None = None) -> int:
    """Give back what ``worker_id`` runs (all, or those of ``seqs``); returns how many jobs that were.

    A job whose end was requested meanwhile is cancelled instead.
    """
    chosen = "TRUE" if seqs is None else f"j.seq {db.among('seqs')}"
    rows = conn.execute(
        sa.text(f"""
        SELECT j.seq, j.cancel_requested FROM jobs j
        WHERE j.owner = :worker_id AND j.state = 'running' AND {chosen} ORDER BY j.seq {db.for_update("j")}
        """),
        {"worker_id": worker_id} | ({} if seqs is None else {"seqs": db.numbers(seqs)}),
    ).all()
    put_back(db, conn, [row.seq for row in rows if not row.cancel_requested], cause=Cause.RELEASED)
    unwanted = [row.seq for row in rows if row.cancel_requested]
    end(db, conn, unwanted, start=JobState.RUNNING, to=JobState.CANCELLED, error=CANCELLED)
    return len(rows)


def try_again(db: Database, conn: Connection, seqs: Collection[int], *, start: JobState) -> list[int]:
    """Move jobs that ended without success back to queued, crashes forgiven; their result is dropped.

    Those whose prompt was forgotten stay as they are. A deadline is dropped too, since the one who asks for another
    try wants it run.
    """
    assert JobState.QUEUED in LEGAL_MOVES[start]
    sets = "owner = NULL, claimed_at = NULL, crashes = 0, cancel_requested = FALSE, deadline = NULL, held = FALSE"
    recheck = f"EXISTS (SELECT 1 FROM job_payloads p WHERE p.seq = j.seq AND {HAS_PROMPT})"
    moved = _move(db, conn, seqs, start=start, to=JobState.QUEUED, sets=sets, recheck=recheck)
    for table in ("results", "outbox") if moved else ():
        conn.execute(sa.text(f"DELETE FROM {table} WHERE seq {db.among('seqs')}"), {"seqs": db.numbers(moved)})
    if moved:
        wait_for_next_end(db, conn, moved)
    return moved


def _charge(cause: Cause) -> str:
    if cause is Cause.RELEASED:
        return "attempt = attempt - 1"
    return "crashes = crashes + 1" if cause is Cause.LOST else "crashes = crashes"


def _move(
    db: Database,
    conn: Connection,
    seqs: Collection[int],
    *,
    start: JobState,
    to: JobState,
    sets: str,
    recheck: str,
) -> list[int]:
    if not seqs:
        return []
    statement = sa.text(f"""
    UPDATE jobs AS j SET state = :to, {sets}
    WHERE j.seq {db.among("seqs")} AND j.state = :start AND {recheck}
    RETURNING seq
    """)
    parameters = {"to": to.value, "start": start.value, "seqs": db.numbers(seqs)}
    return list(conn.execute(statement, parameters).scalars())


def _note(db: Database, conn: Connection, seqs: Collection[int], *, outcome: str) -> None:
    if not seqs:
        return
    conn.execute(
        sa.text(f"""
        UPDATE job_attempts SET ended_at = {db.now}, outcome = :outcome
        WHERE seq {db.among("seqs")} AND ended_at IS NULL
        """),
        {"outcome": outcome, "seqs": db.numbers(seqs)},
    )
