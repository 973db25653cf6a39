"""The look-ahead window: everybody has rows in it, and looking costs no more the longer the queue is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from kvq.worker.database import Database
from kvq.worker.jobs import Lane
from kvq.worker.store import Store
from kvq.worker.window import MAX_SUSPECTS, Window
from tests.factories import claim_all, new_batch, new_job, new_worker


def window_of(store: Store, size: int, *, tokens: int = 4_000_000, by_lane: bool = True) -> Window:
    return Window(store, queue="kvq", size=size, tokens=tokens, by_lane=by_lane)


def batch_of(store: Store, num_jobs: int, name: str, **changes: Any) -> str:
    return new_batch(store, [new_job(i, custom_id=name, **changes) for i in range(num_jobs)])


def test_a_batch_behind_a_long_one_has_rows_in_the_window_at_the_next_look(store: Store) -> None:
    first = batch_of(store, 50, "first")
    window = window_of(store, 16)
    assert len(window.look()) == 16
    second = batch_of(store, 10, "second")
    found = window.look()
    assert 0 < len(found) <= 8
    lanes = {lane.batch_id: lane.flow for lane in store.lanes("kvq", limit=10)}
    assert {row.flow for row in found} == {lanes[second]}
    assert lanes.keys() == {first, second}


def test_the_window_is_shared_between_lanes_and_what_one_cannot_fill_goes_to_the_others(store: Store) -> None:
    for name, num_jobs in (("a", 40), ("b", 3), ("c", 40)):
        batch_of(store, num_jobs, name)
    rows = window_of(store, 30).look()
    by_flow = Counter(row.flow for row in rows)
    assert sorted(by_flow.values()) == [3, 13, 13]  # less than a row for each is left
    assert len({row.seq for row in rows}) == 29


def test_nothing_is_read_twice_until_it_is_forgotten(store: Store) -> None:
    batch_of(store, 5, "a")
    window = window_of(store, 10)
    rows = window.look()
    assert len(rows) == 5
    assert window.look() == []
    window.forget([rows[0].seq])
    assert [row.seq for row in window.look()] == [rows[0].seq]


def test_more_urgent_rows_come_in_first_and_less_urgent_ones_fill_what_is_left(store: Store) -> None:
    batch_of(store, 20, "late", priority=5)
    batch_of(store, 4, "soon", priority=1)
    rows = window_of(store, 10).look()
    assert [row.priority for row in rows] == [1] * 4 + [5] * 6


def test_tenants_that_may_not_start_are_passed_over(store: Store) -> None:
    batch_of(store, 5, "broke", tenant="broke")
    batch_of(store, 5, "rich", tenant="rich")
    for by_lane in (True, False):
        rows = window_of(store, 20, by_lane=by_lane).look(without_tenants={"broke"})
        assert {row.tenant for row in rows} == {"rich"}


def test_suspects_behind_a_queue_longer_than_the_window_are_seen(store: Store) -> None:
    batch_of(store, 30, "suspect")
    worker_id = new_worker(store)
    assert claim_all(store, worker_id)
    store.bury_worker(worker_id)
    store.reap(lease_s=60)
    batch_of(store, 100, "fresh", priority=-1)
    for by_lane in (True, False):
        rows = window_of(store, 8, by_lane=by_lane).look()
        assert Counter(row.crashes for row in rows) == {1: MAX_SUSPECTS, 0: 8}


def test_many_lanes_take_turns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq.worker.window._MAX_LANES", 3)
    for number in range(7):
        batch_of(store, 4, str(number))
    window = window_of(store, 3)
    seen: set[int] = set()
    for _ in range(4):
        rows = window.look()
        seen |= {row.flow for row in rows}
        window.forget([row.seq for row in rows])
    assert len(seen) == 7


def test_lanes_are_those_with_something_to_do(store: Store) -> None:
    batch_of(store, 3, "a")
    batch_of(store, 2, "b", priority=-2)
    batch_of(store, 1, "elsewhere", queue="other")
    store.insert_jobs([new_job(1, tenant="acme")])
    lanes = store.lanes("kvq", limit=10)
    assert [(lane.priority, lane.tenant, bool(lane.batch_id)) for lane in lanes] == [
        (-2, "default", True),
        (0, "default", True),
        (0, "acme", False),
    ]
    after = (lanes[1].priority, lanes[1].flow)
    assert store.lanes("kvq", limit=10, after=after) == lanes[2:]
    assert len(store.lanes("other", limit=10)) == 1
    assert claim_all(store, new_worker(store))
    assert store.lanes("kvq", limit=10) == []


def test_looking_walks_indexes_and_sorts_nothing_however_much_waits(
    store: Store, store_url: str, sql: Callable[..., list[Any]]
) -> None:
    """The plans of the statements in the loop, on a table large enough that they matter."""
    batch_of(store, 6_000, "long")
    batch_of(store, 50, "short")
    statements: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "jobs j" in statement:
            statements.append((statement, parameters))

    lane = Lane(queue="kvq", priority=0, flow=store.lanes("kvq", limit=1)[0].flow, tenant="default", batch_id="")
    database = Database(store_url)
    with Store(database) as other:
        sa.event.listen(database._engine, "before_cursor_execute", note)
        other.lanes("kvq", limit=100)
        other.peek_lane(lane, limit=100)
        other.peek_fresh("kvq", limit=100)
        other.peek_suspects("kvq", limit=16)
        assert len(statements) == 4
        explain = "EXPLAIN " if database.on_postgres else "EXPLAIN QUERY PLAN "
        for statement, parameters in list(statements):
            with database.reading() as conn:
                plan = "\n".join(str(row) for row in conn.exec_driver_sql(explain + statement, parameters))
            assert any(index in plan for index in ("jobs_sharing", "jobs_waiting", "jobs_suspect")), plan
            # The lanes, few as they are, may be sorted after the walk.
            scans = ["Seq Scan on jobs", "SCAN j'"] + ([] if "walk" in statement else ["Sort", "B-TREE FOR ORDER"])
            assert not any(scan in plan for scan in scans), plan


@pytest.mark.parametrize("by_lane", [True, False])
def test_of_long_rows_as_many_are_read_as_the_bound_on_tokens_allows(store: Store, by_lane: bool) -> None:
    batch_of(store, 900, "rows")
    window = window_of(store, 4096, tokens=50_000, by_lane=by_lane)
    rows = window.look()
    assert len(rows) == 256  # nothing is known of them yet
    assert not window.runs_low
    for _ in rows:
        window.learn(100)
    assert not window.runs_low
    rows += window.look()
    assert len(rows) == 500
    for _ in range(20_000):
        window.learn(200)
    window.forget([row.seq for row in rows[:240]])
    assert window.look() == []
    window.forget([row.seq for row in rows[240:400]])
    assert len(window.look()) == 150


def test_of_short_rows_more_are_read_as_soon_as_that_is_known(store: Store) -> None:
    batch_of(store, 900, "rows")
    window = window_of(store, 800)
    for _ in window.look():
        window.learn(10)
    assert window.runs_low
    assert len(window.look()) == 544
    assert len(window) == 800
    assert not window.runs_low
