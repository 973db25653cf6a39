"""What a worker asks of PostgreSQL again and again reads as much of a long queue as of a short one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from kvq.migrations.url import database_url
from kvq.worker.store import Store
from tests.factories import new_batch, new_job, new_worker, outcome_of

_NUM_QUEUED = 5_000
_FEW = 100


@pytest.fixture(scope="module", params=[None, timedelta(days=1)], ids=["without deadlines", "with deadlines"])
def long_queue_url(request: pytest.FixtureRequest, make_pg_database: Callable[..., str], _pg_template: str) -> str:
    """A database with thousands of queued jobs of one batch, none of them due."""
    url = make_pg_database(_pg_template)
    deadline = None if request.param is None else datetime.now(UTC) + request.param
    with Store.open(url) as store:
        jobs = [new_job(number, deadline=deadline) for number in range(1, _NUM_QUEUED + 1)]
        new_batch(store, jobs)
    _on_its_own(url, "VACUUM (ANALYZE) jobs, job_payloads")
    return url


def _claim_and_finish(store: Store, worker_id: str) -> None:
    waiting = store.peek_fresh("kvq", limit=10)
    claimed = store.claim(worker_id, [job.seq for job in waiting])
    assert store.finish(worker_id, [outcome_of(job) for job in claimed]).accepted == {job.seq for job in claimed}


ASKED = {
    "heartbeat": lambda store, worker_id: store.heartbeat(worker_id),
    "cancel requests": lambda store, worker_id: store.cancel_requests(worker_id),
    "deadlines": lambda store, _: store.expire_due(),
    "the dead": lambda store, _: store.reap(lease_s=30.0, bury_silent=True),
    "webhooks": lambda store, _: store.webhooks_due(),
    "answers to send": lambda store, worker_id: store.outbox_pending(100, worker_id=worker_id),
    "budgets": lambda store, _: store.tenant_budgets(),
    "suspects": lambda store, _: store.peek_suspects("kvq", limit=10),
    "lanes": lambda store, _: store.lanes("kvq", limit=10),
    "claim and finish": _claim_and_finish,
}


@pytest.mark.parametrize("what", ASKED)
def test_what_is_asked_again_and_again_does_not_walk_the_queue(long_queue_url: str, what: str) -> None:
    with Store.open(long_queue_url) as store:
        worker_id = new_worker(store)
    before = _rows_read(long_queue_url)

    with Store.open(long_queue_url) as store:
        ASKED[what](store, worker_id)

    assert _rows_read(long_queue_url) - before <= _FEW


def _rows_read(url: str) -> int:
    """Of jobs, by all sessions that have ended: that is when a session's figures are there for sure."""
    read = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'jobs'"
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    while _on_its_own(url, others):
        pass
    return _on_its_own(url, read)


def _on_its_own(url: str, statement: str) -> Any:
    engine = sa.create_engine(database_url(url), poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        result = connection.execute(sa.text(statement))
        return result.scalar_one() if result.returns_rows else None
