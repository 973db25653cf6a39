"""Jobs that refer to an equal one instead of being run: dedup keys, and answers that are there already.

Owns the columns ``dedup_key``, ``same_as`` and ``held`` of jobs, and the look-ups of stored answers. Callers of the
functions hold the transaction. Invariants: a job that refers to an unfinished one is held, which hides it from those
who look for work, and is let go in the transaction that ends that one; where that one did not succeed, one of those
that were held is run in its place and the others refer to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from kvq.worker.database import Database
from kvq.worker.errors import ValueUnreadable
from kvq.worker.jobs import Endpoint, JobState, NewJob, StoredAnswer
from kvq.worker.privacy import Privacy
from kvq.worker.store_rows import clean_text

_ADVISORY_LOCK = 0x6B7672
_UNFINISHED = ("queued", "running")

_ANSWER = """
SELECT r.seq, j.job_id, j.endpoint, r.text, r.finish_reason, r.response, r.model, r.model_defaults, r.request_key,
       r.prompt_tokens, r.completion_tokens, r.seed
FROM results r JOIN jobs j ON j.seq = r.seq
WHERE j.state = 'succeeded' AND r.text IS NOT NULL AND r.response IS NOT NULL AND
"""


class AnswerStore:
    """The part of the store that is asked for answers that were given before."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def answers_by_key(self, request_keys: Collection[str]) -> dict[str, StoredAnswer]:
        """Answers of jobs that succeeded, as far as they are kept, by their request key."""
        key_by_stored = {self._db.privacy.blind(key): key for key in request_keys}
        stored = [key for key in key_by_stored if key is not None]
        rows = self._answers(f"r.request_key {self._db.among_texts('keys')}", keys=self._db.texts(stored))
        return {key_by_stored[row["request_key"]]: answer for row, answer in self._readable_answers(rows)}

    def answers_by_seq(self, seqs: Collection[int]) -> dict[int, StoredAnswer]:
        """The same by the seq of the job."""
        rows = self._answers(f"r.seq {self._db.among('seqs')}", seqs=self._db.numbers(seqs))
        return {row["seq"]: answer for row, answer in self._readable_answers(rows)}

    def _readable_answers(self, rows: Sequence[sa.RowMapping]) -> Iterator[tuple[sa.RowMapping, StoredAnswer]]:
        """An answer that is encrypted, and not for us, is none here: the job is computed."""
        for row in rows:
            with suppress(ValueUnreadable):
                yield row, _answer(row, self._db.privacy)

    def _answers(self, which: str, **values: Any) -> Sequence[sa.RowMapping]:
        statement = sa.text(f"{_ANSWER} {which} ORDER BY r.seq").columns(
            response=sa.JSON(none_as_null=True), model_defaults=sa.JSON()
        )
        with self._db.reading() as conn:
            return conn.execute(statement, values).mappings().all()


def _answer(row: sa.RowMapping, privacy: Privacy) -> StoredAnswer:
    text = privacy.open_text(row["text"], row["response"], row["job_id"])
    assert text is not None  # rows without one are left out
    return StoredAnswer(
        job_id=row["job_id"],
        endpoint=Endpoint(row["endpoint"]),
        text=text,
        finish_reason=row["finish_reason"],
        response=privacy.open_json(row["response"], row["job_id"], "response"),
        model=row["model"],
        model_defaults=row["model_defaults"],
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
        seed=row["seed"],
    )


def serialize(db: Database, conn: Connection, jobs: Sequence[NewJob]) -> None:
    """Before jobs with dedup keys are inserted: of two that bring the same new key, the second sees the first."""
    if db.on_postgres and any(job.dedup_key is not None for job in jobs):
        conn.execute(sa.text("SELECT pg_advisory_xact_lock(:number)"), {"number": _ADVISORY_LOCK})


def link(db: Database, conn: Connection, jobs: Sequence[NewJob], job_ids: Sequence[str], *, period_s: float) -> None:
    """After ``job_ids`` of ``jobs`` were inserted: make those refer to the job whose dedup key they repeat.

    That one is of the same queue and endpoint, was submitted within ``period_s``, is queued, running or succeeded,
    and runs itself. On PostgreSQL it is locked, so that it cannot end unseen before this transaction does.
    """
    keys = sorted({clean_text(job.dedup_key) or "" for job in jobs if job.dedup_key is not None})
    if not keys or not job_ids:
        return
    statement = sa.text(f"""
    SELECT j.seq, j.job_id, j.dedup_key, j.queue, j.endpoint, j.state FROM jobs j
    WHERE j.dedup_key {db.among_texts("keys")} AND j.same_as IS NULL
      AND j.state IN ('queued', 'running', 'succeeded') AND j.created_at >= {db.now_plus("age")}
    ORDER BY j.seq {"FOR SHARE OF j" if db.on_postgres else ""}
    """)
    rows = conn.execute(statement, {"keys": db.texts(keys), "age": -period_s}).all()
    fresh = set(map(clean_text, job_ids))
    originals: dict[tuple[str, str, str], sa.Row[Any]] = {}
    references = []
    for row in rows:
        key = (row.dedup_key, row.queue, row.endpoint)
        original = originals.get(key)
        if original is None or row.job_id not in fresh:
            originals[key] = row
        elif row.state == JobState.QUEUED:
            references.append({"seq": row.seq, "original": original.seq, "held": original.state in _UNFINISHED})
    if references:
        conn.execute(sa.text("UPDATE jobs SET same_as = :original, held = :held WHERE seq = :seq"), references)


def originals_in(conn: Connection, batch_id: str) -> list[int]:
    """The seqs of a batch's jobs for which others are held."""
    statement = sa.text("""
    SELECT DISTINCT h.same_as FROM jobs h JOIN jobs j ON j.seq = h.same_as WHERE h.held AND j.batch_id = :batch_id
    """)
    return list(conn.execute(statement, {"batch_id": batch_id}).scalars())


def let_go(db: Database, conn: Connection, seqs: Collection[int]) -> None:
    """Jobs have ended, in whatever state: those held for them go on.

    After a success they get its answer from whoever takes them up. Else the oldest is run and the others wait for it.
    """
    values = {"seqs": db.numbers(seqs)}
    waiting = f"held AND state = 'queued' AND same_as {db.among('seqs')}"
    if not seqs or conn.execute(sa.text(f"SELECT 1 FROM jobs WHERE {waiting} LIMIT 1"), values).first() is None:
        return
    conn.execute(
        sa.text(f"""
        UPDATE jobs SET held = FALSE WHERE {waiting}
           AND EXISTS (SELECT 1 FROM jobs o WHERE o.seq = jobs.same_as AND o.state = 'succeeded')
        """),
        values,
    )
    conn.execute(
        sa.text(f"""
        UPDATE jobs SET held = (seq <> heirs.heir), same_as = nullif(heirs.heir, seq)
        FROM (SELECT same_as AS original, min(seq) AS heir FROM jobs WHERE {waiting} GROUP BY same_as) AS heirs
        WHERE jobs.held AND jobs.state = 'queued' AND jobs.same_as = heirs.original
        """),
        values,
    )
