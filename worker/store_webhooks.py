"""Webhooks in the store: which ends of batches are to be announced, and how far each announcement is.

Owns the table ``webhooks``: open (the batch is being submitted), waiting (for its end), pending (the event is
written down and due), delivered, failed (given up). Knows no HTTP. Invariants: an event is written once, in one
transaction with the look that found the batch ended, and stays the same at every try; while one worker delivers
it, no other is given it, until that worker is gone or its hold is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.schema import batch_progress, webhooks
from kvq.worker.store_records import BatchEvent, BatchProgress, WebhookDelivery, WebhookRow
from kvq.worker.store_rows import clean_text

MAX_TRIES = 12
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 6 * 3600.0
_CHUNK = 100

_ENDED = """NOT EXISTS (SELECT 1 FROM jobs j WHERE j.batch_id = w.batch_id AND j.state IN ('queued', 'running'))"""


def pause_after(tries: int) -> float:
    """Seconds until the next try after ``tries`` have failed: 1, 4, 16, ... and at most six hours."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 4.0 ** min(tries - 1, 20))


class WebhookStore:
    """The part of the store that holds announcements of batch ends."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add_webhook(self, batch_id: str, url: str) -> None:
        """The end of the batch is to be announced to ``url``, once ``arm_webhook`` says that all its jobs are in.

        Repeated while the batch is open, the last URL counts; later it changes nothing.
        """
        statement = sa.text("""
        INSERT INTO webhooks (batch_id, url) VALUES (:batch_id, :url)
        ON CONFLICT (batch_id) DO UPDATE SET url = excluded.url WHERE webhooks.state = 'open'
        """)
        self._db.write(lambda conn: conn.execute(statement, {"batch_id": batch_id, "url": url}))

    def arm_webhook(self, batch_id: str) -> None:
        """All jobs of the batch are in: its end may be announced from now on. Safe to repeat."""
        statement = sa.text("UPDATE webhooks SET state = 'waiting' WHERE batch_id = :batch_id AND state = 'open'")
        self._db.write(lambda conn: conn.execute(statement, {"batch_id": batch_id}))

    def webhook(self, batch_id: str) -> WebhookRow | None:
        """How far the announcement of a batch is; None where none was asked for."""
        with self._db.reading() as conn:
            return read_webhook(conn, batch_id)

    def webhooks_due(self) -> bool:
        """True when a batch has ended unannounced or an event is due. Only reads."""
        statement = sa.text(f"""
        SELECT 1 FROM webhooks w
        WHERE (w.state = 'waiting' AND {_ENDED}) OR (w.state = 'pending' AND {self._is_due()}) LIMIT 1
        """)
        with self._db.reading() as conn:
            return conn.execute(statement).first() is not None

    def write_events(self, describe: Callable[[BatchProgress], BatchEvent]) -> int:
        """Write down the events of batches that have ended; returns how many. Any number of workers may at once."""
        return self._db.write(lambda conn: self._write_events(conn, describe))

    def _write_events(self, conn: Connection, describe: Callable[[BatchProgress], BatchEvent]) -> int:
        # A job of the batch that is retried meanwhile finds the row locked, waits, and makes it wait again.
        ended = sa.text(f"""
        SELECT w.batch_id FROM webhooks w WHERE w.state = 'waiting' AND {_ENDED}
        ORDER BY w.batch_id LIMIT {_CHUNK} {self._db.for_update("w", skip_locked=True)}
        """)
        batch_ids = list(conn.execute(ended).scalars())
        written = 0
        for batch_id in batch_ids:
            query = sa.select(batch_progress).where(batch_progress.c.batch_id == batch_id)
            progress = BatchProgress(**conn.execute(query).mappings().one())
            if not progress.finished:
                continue
            event = describe(progress)
            statement = sa.text(f"""
            UPDATE webhooks SET state = 'pending', event_id = :event_id, payload = :payload, tries = 0,
                   next_at = {self._db.now}, last_error = NULL
            WHERE batch_id = :batch_id
            """)
            conn.execute(statement, {"batch_id": batch_id, "event_id": event.id, "payload": event.payload})
            written += 1
        return written

    def claim_webhook(self, worker_id: str, *, hold_s: float) -> WebhookDelivery | None:
        """Take the event that has been due longest; it is nobody else's for ``hold_s``, or until the worker is gone.

        None where nothing is due, or this worker holds no lease.
        """
        return self._db.write(lambda conn: self._claim_webhook(conn, worker_id, hold_s))

    def _claim_webhook(self, conn: Connection, worker_id: str, hold_s: float) -> WebhookDelivery | None:
        find = sa.text(f"""
        SELECT w.batch_id FROM webhooks w WHERE w.state = 'pending' AND {self._is_due()}
          AND EXISTS (SELECT 1 FROM workers k WHERE k.worker_id = :worker_id AND k.state = 'live')
        ORDER BY w.next_at, w.batch_id LIMIT 1 {self._db.for_update("w", skip_locked=True)}
        """)
        batch_id = conn.execute(find, {"worker_id": worker_id}).scalar()
        if batch_id is None:
            return None
        take = sa.text(f"""
        UPDATE webhooks SET tries = tries + 1, worker_id = :worker_id, next_at = {self._db.now_plus("hold")}
        WHERE batch_id = :batch_id RETURNING batch_id, url, event_id, payload, tries
        """)
        values = {"batch_id": batch_id, "worker_id": worker_id, "hold": hold_s}
        return WebhookDelivery(**conn.execute(take, values).mappings().one())

    def webhook_delivered(self, delivery: WebhookDelivery) -> None:
        """The receiver has it."""
        statement = sa.text(f"""
        UPDATE webhooks SET state = 'delivered', worker_id = NULL, next_at = NULL, last_error = NULL,
               ended_at = {self._db.now}
        WHERE batch_id = :batch_id AND event_id = :event_id AND state = 'pending'
        """)
        values = {"batch_id": delivery.batch_id, "event_id": delivery.event_id}
        self._db.write(lambda conn: conn.execute(statement, values))

    def webhook_failed(self, delivery: WebhookDelivery, error: str, *, final: bool = False) -> bool:
        """A try failed: it is due again after a pause, or given up (``final``, or the last try). True if given up.

        Nothing changes when somebody else holds it by now.
        """
        given_up = final or delivery.tries >= MAX_TRIES
        values: dict[str, Any] = {
            "batch_id": delivery.batch_id,
            "event_id": delivery.event_id,
            "tries": delivery.tries,
            "error": clean_text(error),
        }
        if given_up:
            sets = f"state = 'failed', next_at = NULL, ended_at = {self._db.now}"
        else:
            sets = f"next_at = {self._db.now_plus('pause')}"
            values["pause"] = pause_after(delivery.tries)
        statement = sa.text(f"""
        UPDATE webhooks SET {sets}, worker_id = NULL, last_error = :error
        WHERE batch_id = :batch_id AND event_id = :event_id AND tries = :tries AND state = 'pending'
        """)
        self._db.write(lambda conn: conn.execute(statement, values))
        return given_up

    def note_webhooks(self, sentence: str) -> int:
        """Say on every event nobody has tried yet why it waits; returns on how many it was said."""
        statement = sa.text("""
        UPDATE webhooks SET last_error = :sentence WHERE state = 'pending' AND tries = 0 AND last_error IS NULL
        """)
        return self._db.write(lambda conn: conn.execute(statement, {"sentence": sentence}).rowcount)

    def _is_due(self) -> str:
        return f"""(w.next_at <= {self._db.now} OR (w.worker_id IS NOT NULL AND NOT EXISTS
                    (SELECT 1 FROM workers k WHERE k.worker_id = w.worker_id AND k.state = 'live')))"""


def read_webhook(conn: Connection, batch_id: str) -> WebhookRow | None:
    """The announcement of a batch's end, as people may see it."""
    columns = (webhooks.c[name] for name in WebhookRow.__dataclass_fields__)
    row = conn.execute(sa.select(*columns).where(webhooks.c.batch_id == batch_id)).mappings().first()
    return None if row is None else WebhookRow(**{**row, "url": shown_url(row["url"])})


def wait_for_next_end(db: Database, conn: Connection, seqs: Sequence[int]) -> None:
    """Jobs run again: the ends of their batches that are past, told or not, give way to the ones to come."""
    # Whatever its state, so that a row which is being looked at is waited for.
    statement = sa.text(f"""
    UPDATE webhooks SET state = 'waiting', event_id = NULL, payload = NULL, tries = 0, next_at = NULL,
           worker_id = NULL, last_error = NULL, ended_at = NULL
    WHERE state <> 'open' AND batch_id IN (SELECT j.batch_id FROM jobs j WHERE j.seq {db.among("seqs")})
    """)
    conn.execute(statement, {"seqs": db.numbers(seqs)})


def shown_url(url: str) -> str:
    """For people: a receiver's URL may carry its secret among the parameters."""
    return f"{url.partition('?')[0]}?***" if "?" in url else url
