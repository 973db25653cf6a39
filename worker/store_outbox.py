"""The outbox: what has to be told to others after a commit, at least once.

Owns the rows' schedule. Invariants: a row exists from the commit that ended its job until somebody reports it
told; while one worker is telling it, the others do not see it, for a limited time.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.errors import ValueUnreadable
from kvq.worker.privacy import Privacy
from kvq.worker.store_privacy import forget_told
from kvq.worker.store_records import OutboxRow
from kvq.worker.store_rows import clean_text

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 300.0

_READ = """
SELECT o.id, o.kind, j.job_id, j.state, p.celery, r.attempt, r.response, r.error_code, r.error_message
FROM outbox o
JOIN jobs j ON j.seq = o.seq
JOIN job_payloads p ON p.seq = o.seq
JOIN results r ON r.seq = o.seq
"""


class OutboxStore:
    """The part of the store that holds notifications still to be sent."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def outbox_pending(self, limit: int, *, worker_id: str | None = None, hold_s: float = 30.0) -> list[OutboxRow]:
        """Take up to ``limit`` rows that are due, oldest first; they are nobody else's for ``hold_s``.

        With ``worker_id`` only rows of jobs that this worker finished, that no worker finished (cancelled,
        expired, dead), or whose worker is not live any more.
        """
        return self._db.write_at_once(lambda conn: self._take(conn, limit, worker_id, hold_s))

    def _take(self, conn: Connection, limit: int, worker_id: str | None, hold_s: float) -> list[OutboxRow]:
        values: dict[str, Any] = {"limit": limit, "hold": hold_s}
        whose = "TRUE"
        if worker_id is not None:
            values["worker_id"] = worker_id
            whose = """(o.worker_id IS NULL OR o.worker_id = :worker_id OR NOT EXISTS
                        (SELECT 1 FROM workers w WHERE w.worker_id = o.worker_id AND w.state = 'live'))"""
        take = f"""
        UPDATE outbox SET next_at = {self._db.now_plus("hold")}, tries = tries + 1
        WHERE id IN (SELECT o.id FROM outbox o WHERE o.next_at <= {self._db.now} AND {whose}
                     ORDER BY o.id LIMIT :limit {self._db.for_update("o", skip_locked=True)})
        RETURNING id
        """
        if self._db.on_postgres:
            read = f"WITH taken AS ({take}) {_READ} WHERE o.id IN (SELECT id FROM taken) ORDER BY o.id"
        else:
            ids = list(conn.execute(sa.text(take), values).scalars())
            if not ids:
                return []
            read, values = f"{_READ} WHERE o.id {self._db.among('ids')} ORDER BY o.id", {"ids": self._db.numbers(ids)}
        statement = sa.text(read).columns(celery=sa.JSON(), response=sa.JSON())
        rows = conn.execute(statement, values).mappings().all()
        return [told for row in rows if (told := self._decrypted(conn, row)) is not None]

    def _decrypted(self, conn: Connection, row: sa.RowMapping) -> OutboxRow | None:
        """The row decrypted; None, and left to a worker that has the key, where this one has not."""
        try:
            return _outbox_row(row, self._db.privacy)
        except ValueUnreadable as err:
            logger.error("the end of job %s cannot be told from here: %s", row["job_id"], err)
            self._back_off(conn, row["id"], str(err))
            return None

    def outbox_done(self, ids: Collection[int]) -> None:
        """The rows were told: forget them."""
        if not ids:
            return
        self._db.write(lambda conn: self._forget_rows(conn, f"id {self._db.among('ids')}", ids=self._db.numbers(ids)))

    def outbox_done_for(self, job_ids: Iterable[str]) -> None:
        """The ends of these jobs were told by other means: forget their rows."""
        job_ids = list(job_ids)
        if not job_ids:
            return
        which = f"seq IN (SELECT seq FROM jobs WHERE job_id {self._db.among_texts('job_ids')})"
        self._db.write(lambda conn: self._forget_rows(conn, which, job_ids=self._db.texts(job_ids)))

    def _forget_rows(self, conn: Connection, which: str, **values: Any) -> None:
        seqs = list(conn.execute(sa.text(f"DELETE FROM outbox WHERE {which} RETURNING seq"), values).scalars())
        forget_told(self._db, conn, seqs)

    def outbox_leave(self, worker_id: str) -> int:
        """Rows of a live worker that cannot tell them are for any worker from now on; their number."""
        whose = {"worker_id": worker_id}
        with self._db.reading() as conn:
            if (
                conn.execute(sa.text("SELECT 1 FROM outbox WHERE worker_id = :worker_id LIMIT 1"), whose).first()
                is None
            ):
                return 0
        leave = sa.text("UPDATE outbox SET worker_id = NULL WHERE worker_id = :worker_id RETURNING id")
        return self._db.write(lambda conn: len(conn.execute(leave, whose).all()))

    def outbox_failed(self, outbox_id: int, error: str) -> int:
        """The row could not be told: it is due again after a pause that doubles with every try. How many there were."""
        return self._db.write(lambda conn: self._back_off(conn, outbox_id, error))

    def _back_off(self, conn: Connection, outbox_id: int, error: str) -> int:
        values: dict[str, Any] = {"id": outbox_id, "error": clean_text(error)}
        tries = int(conn.execute(sa.text("SELECT tries FROM outbox WHERE id = :id"), values).scalar() or 0)
        if not tries:
            return 0
        values["pause"] = min(MAX_BACKOFF_S, 2.0 ** min(tries, 10))
        statement = sa.text(f"""
        UPDATE outbox SET last_error = :error, next_at = {self._db.now_plus("pause")} WHERE id = :id
        """)
        conn.execute(statement, values)
        return tries


def _outbox_row(row: sa.RowMapping, privacy: Privacy) -> OutboxRow:
    error = None
    if row["error_code"] is not None:
        error = {"code": row["error_code"], "message": row["error_message"]}
    payload = {
        "celery": privacy.open_json(row["celery"], row["job_id"], "celery"),
        "state": row["state"],
        "attempt": row["attempt"],
        "response": privacy.open_json(row["response"], row["job_id"], "response"),
        "error": error,
    }
    return OutboxRow(id=row["id"], kind=row["kind"], job_id=row["job_id"], payload=payload)
