"""A full queue holds back those who bring more, and says so once."""

from __future__ import annotations

from kvq.worker.backlog import Backlog
from kvq.worker.store import Store
from tests.factories import claim_all, new_batch, new_job, new_worker


class Time:
    """A clock that moves when somebody sleeps; meanwhile a worker takes everything."""

    def __init__(self, store: Store) -> None:
        self.now_s = 0.0
        self._store = store

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        claim_all(self._store, new_worker(self._store))


def test_jobs_wait_for_room_and_the_person_is_told_once_each_time(store: Store) -> None:
    said: list[str] = []
    time = Time(store)
    backlog = Backlog(store, "kvq", bound=3, on_full=said.append, clock=time.clock, sleep=time.sleep)
    brought = 0
    for job in backlog.paced([new_job(i) for i in range(8)]):
        assert store.num_queued("kvq", at_most=100) < 3
        new_batch(store, [job])
        brought += 1
    assert brought == 8
    assert len(said) == 2
    assert "holds 3 waiting jobs (max_queued)" in said[0]


def test_a_queue_is_counted_again_only_after_something_was_brought_to_it(store: Store) -> None:
    now_s = 0.0
    backlog = Backlog(store, "kvq", bound=5, clock=lambda: now_s)
    assert backlog.room() == 5
    new_batch(store, [new_job(i) for i in range(4)])
    now_s = 10.0
    assert backlog.room() == 5
    backlog.took(1)
    assert backlog.room() == 1


def test_a_full_queue_is_counted_until_there_is_room(store: Store) -> None:
    now_s = 0.0
    backlog = Backlog(store, "kvq", bound=2, on_full=lambda _: None, clock=lambda: now_s)
    new_batch(store, [new_job(i) for i in range(2)])
    assert backlog.room() == 0
    claim_all(store, new_worker(store))
    now_s = 10.0
    assert backlog.room() == 2
