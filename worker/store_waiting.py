"""What waits, as planners look at it: rows of the queue that could run now. Reserves and changes nothing.

Owns the statements that find waiting jobs. Invariant: each is served by an index and reads no more than it returns,
plus the rows it is told to leave out, however many wait.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.errors import ValueUnreadable
from kvq.worker.jobs import DEFAULT_TENANT, Endpoint, Lane, WaitingJob
from kvq.worker.schema import Instant

logger = logging.getLogger(__name__)

# Sorts before every priority, every flow, every name of a queue.
_FIRST = {"priority": -(2**31), "flow": -1, "queue": ""}
# Behind so many jobs that this process has no key for, it sees no others.
_MOST_UNREADABLE = 10_000
_MOST_LANES = 1_000_000


class WaitingStore:
    """The part of the store that is asked what could run."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def peek(self, queue: str, *, limit: int, exclude_seqs: Collection[int] = ()) -> list[WaitingJob]:
        """The jobs of ``queue`` that could run now, best first: (priority, crashes, age). Reserves nothing."""
        return self._peek(
            "j.queue = :queue AND j.state = 'queued' AND NOT j.held",
            order="j.priority, j.crashes, j.seq",
            limit=limit,
            exclude_seqs=exclude_seqs,
            queue=queue,
        )

    def peek_fresh(
        self, queue: str, *, limit: int, exclude_seqs: Collection[int] = (), exclude_tenants: Collection[str] = ()
    ) -> list[WaitingJob]:
        """Those of ``peek`` that have not crashed, and are of none of these tenants."""
        values, condition = {}, ""
        if exclude_tenants:
            values["tenants"] = self._db.texts(list(exclude_tenants))
            among = self._db.among_texts("tenants")
            condition = f"AND NOT EXISTS (SELECT 1 FROM flows b WHERE b.flow = j.flow AND b.tenant {among})"
        return self._peek(
            f"j.queue = :queue AND j.state = 'queued' AND j.crashes = 0 AND NOT j.held {condition}",
            order="j.priority, j.crashes, j.seq",
            limit=limit,
            exclude_seqs=exclude_seqs,
            queue=queue,
            **values,
        )

    def peek_suspects(self, queue: str, *, limit: int, exclude_seqs: Collection[int] = ()) -> list[WaitingJob]:
        """Those of ``peek`` that were running when a worker was lost, by priority and age."""
        return self._peek(
            "j.queue = :queue AND j.state = 'queued' AND j.crashes > 0 AND NOT j.held",
            order="j.priority, j.seq",
            limit=limit,
            exclude_seqs=exclude_seqs,
            queue=queue,
        )

    def peek_lane(self, lane: Lane, *, limit: int, exclude_seqs: Collection[int] = ()) -> list[WaitingJob]:
        """The jobs of a lane that could run now, oldest first."""
        which = "j.priority = :priority AND j.flow = :flow"
        if self._db.on_postgres:
            # As equalities they would let it walk the primary key instead, over all that has ended.
            which = "(j.priority, j.flow, j.seq) > (:priority, :flow, 0) AND (j.priority, j.flow) <= (:priority, :flow)"
        return self._peek(
            f"j.queue = :queue AND {which} AND j.state = 'queued' AND j.crashes = 0 AND NOT j.held",
            order="j.priority, j.flow, j.seq",
            limit=limit,
            exclude_seqs=exclude_seqs,
            queue=lane.queue,
            priority=lane.priority,
            flow=lane.flow,
        )

    def lanes(self, queue: str, *, limit: int, after: tuple[int, int] | None = None) -> list[Lane]:
        """The lanes of ``queue`` in which something waits (due or not), by (priority, flow), from behind ``after``."""
        with self._db.reading() as conn:
            return waiting_lanes(self._db, conn, queue, after=after, limit=limit)

    def _peek(
        self, where: str, *, order: str, limit: int, exclude_seqs: Collection[int], **values: Any
    ) -> list[WaitingJob]:
        unreadable = self._db.privacy.unreadable_seqs
        while True:
            known = exclude_seqs if not unreadable else unreadable.union(exclude_seqs)
            rows = self._waiting_rows(where, order=order, limit=limit, exclude_seqs=known, **values)
            readable = [job for row in rows if (job := self._waiting_job(row)) is not None]
            if len(readable) == len(rows) or len(unreadable) >= _MOST_UNREADABLE:
                return readable

    def _waiting_job(self, row: dict[str, Any]) -> WaitingJob | None:
        """The row decrypted; None where it is for others to run, who have the key."""
        privacy = self._db.privacy
        try:
            body = privacy.open_body(row["body"], row["job_id"])
        except ValueUnreadable as err:
            if len(privacy.unreadable_seqs) < _MOST_UNREADABLE:
                logger.error("a job is left to workers that can read it: %s", err)
                privacy.unreadable_seqs.add(row["seq"])
            return None
        return WaitingJob(**{**row, "endpoint": Endpoint(row["endpoint"]), "body": body})

    def _waiting_rows(
        self, where: str, *, order: str, limit: int, exclude_seqs: Collection[int], **values: Any
    ) -> list[dict[str, Any]]:
        known = f"AND j.seq {self._db.not_among('known')}" if exclude_seqs else ""
        statement = sa.text(f"""
        SELECT j.seq, j.job_id, j.endpoint, j.priority, j.crashes, j.created_at, j.flow, j.same_as,
               coalesce((SELECT f.tenant FROM flows f WHERE f.flow = j.flow), '{DEFAULT_TENANT}') AS tenant
        FROM jobs j
        WHERE {where} AND NOT j.cancel_requested
          AND (j.not_before IS NULL OR j.not_before <= {self._db.now})
          AND (j.deadline IS NULL OR j.deadline > {self._db.now})
          AND NOT EXISTS (SELECT 1 FROM queues q WHERE q.name = :queue AND q.paused)
          {known}
        ORDER BY {order} LIMIT :limit
        """).columns(created_at=Instant())
        # Apart, by key: joined, and with a limit that is not known when it is planned, payloads may be read whole.
        payloads = sa.text(f"SELECT seq, body FROM job_payloads WHERE seq {self._db.among('seqs')}").columns(
            body=sa.JSON()
        )
        values["limit"] = limit
        if exclude_seqs:
            values["known"] = self._db.numbers(exclude_seqs)
        with self._db.reading() as conn:
            rows = conn.execute(statement, values).mappings().all()
            if not rows:
                return []
            seqs = self._db.numbers([row["seq"] for row in rows])
            bodies = {row.seq: row.body for row in conn.execute(payloads, {"seqs": seqs})}
        return [{**row, "body": bodies[row["seq"]]} for row in rows if row["seq"] in bodies]


def waiting_lanes(
    db: Database,
    conn: Connection,
    queue: str | None = None,
    *,
    after: tuple[int, int] | None = None,
    limit: int = _MOST_LANES,
) -> list[Lane]:
    """The lanes of ``queue`` (None: of all queues) in which something waits.

    Walks the index jobs_sharing from one lane to the next, so that it costs a look-up a lane and none a job.
    """
    in_queue = "TRUE" if queue is None else "n.queue = :queue"
    statement = sa.text(f"""
    WITH RECURSIVE walk(queue, priority, flow, place) AS (
        SELECT CAST(:queue AS text), CAST(:priority AS integer), CAST(:flow AS bigint), 0
        UNION ALL
        SELECT n.queue, n.priority, n.flow, w.place + 1
        FROM walk w JOIN jobs n ON n.seq = (
            SELECT j.seq FROM jobs j
            WHERE j.state = 'queued' AND j.crashes = 0 AND NOT j.held
              AND (j.queue, j.priority, j.flow) > (w.queue, w.priority, w.flow)
            ORDER BY j.queue, j.priority, j.flow, j.seq LIMIT 1)
        WHERE w.place < :limit AND {in_queue}
    )
    SELECT w.queue, w.priority, w.flow,
           coalesce((SELECT f.tenant FROM flows f WHERE f.flow = w.flow), '{DEFAULT_TENANT}') AS tenant,
           coalesce((SELECT f.batch_id FROM flows f WHERE f.flow = w.flow), '') AS batch_id
    FROM walk w WHERE w.place > 0 ORDER BY w.place
    """)
    values: dict[str, Any] = {**_FIRST, "limit": limit}
    if queue is not None:
        values["queue"] = queue
    if after is not None:
        values["priority"], values["flow"] = after
    return [Lane(**row) for row in conn.execute(statement, values).mappings()]
