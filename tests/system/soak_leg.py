"""One leg of a soak: on one ground, with one crew, until all that was sent has ended.

Owns the order: start, break things, let it settle, stop, judge.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import redis
from sqlalchemy.exc import SQLAlchemyError

from kvq.worker.errors import StoreUnavailable
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from tests.system.calm import body, write_file
from tests.system.rows import query
from tests.system.soak_crew import Crew
from tests.system.soak_grounds import Ground
from tests.system.soak_plan import HEARTBEAT_S, LEASE_S, Plan, Report, job_id
from tests.system.soak_poison import Poison, judge_poison
from tests.system.soak_senders import Senders
from tests.system.soak_verdict import judge
from tests.waiting import wait_until

# Kills to one of the other troubles.
_KILLS_PER_TROUBLE = 4
_JOBS_PER_KILL = 10
_LONGEST_PAUSE_S = 4.0
_DEAD = "jobs WHERE state = 'dead'"


class Leg:
    """One run. Everything random is drawn from the plan's seed; what the machine makes of it is not."""

    def __init__(
        self, plan: Plan, ground: Ground, *, model: Path, calm: Mapping[int, str | None], folder: Path
    ) -> None:
        self._plan = plan
        self._ground = ground
        self._calm = calm
        self._folder = folder
        self._model = model
        self._random = random.Random(plan.seed)
        self._troubles: Counter[str] = Counter()
        self._began_s = 0.0
        self._report = Report()

    def run(self) -> Report:
        """The whole of it; the report's ``broken`` says whether all went well."""
        began_s = time.monotonic()
        self._ground.start()
        try:
            with Store.open(self._ground.settings.db) as store:
                self._run(store)
        finally:
            self._ground.remove()
        self._report.seconds = round(time.monotonic() - began_s, 1)
        return self._report

    def _run(self, store: Store) -> None:
        plan, settings = self._plan, self._ground.settings
        numbers = list(range(plan.jobs))
        # Half through SQL; the others by Celery or, where there is no broker, half of them by a file.
        in_file = {job_id(number): body(number % plan.num_bodies) for number in numbers[1::4]}
        files = [] if settings.broker else [write_file(self._folder / "run.jsonl", in_file)]
        by_sql = numbers[0::2] if settings.broker else numbers[0::2] + numbers[3::4]
        poison = Poison(self._folder / "poison")
        crew = Crew(
            self._folder,
            {
                **{"db": settings.db, "model": self._model, "device": "cpu", "kv_cache_memory": "16MiB"},
                **{"max_num_seqs": 16, "heartbeat_s": HEARTBEAT_S, "lease_s": LEASE_S, "drain_timeout": 30},
                **({"broker": settings.broker} if settings.broker else {}),
            },
            *self._ground.worker_options,
            num_workers=plan.workers,
            files=files,
            environ=poison.environ,
            draw=self._random,
        )
        senders = Senders(plan, progress=lambda: self._progress(crew))
        try:
            crew.start()
            poison.send(store)
            self._began_s = time.monotonic()
            senders.submit(store, by_sql)
            if settings.broker:
                senders.send(settings.broker, numbers[1::2])
            self._break_things(crew)
            senders.join(plan.settle_s)
            self._settle(store, crew, senders, poison)
            crew.stop()
            self._note(crew, senders, poison)
            judge(self._report, plan, store, settings, self._calm)
            judge_poison(self._report, settings.db)
        finally:
            senders.stop()
            poison.stop()
            crew.end()

    def _progress(self, crew: Crew) -> float:
        if not self._began_s:
            return 0.0
        by_time = (time.monotonic() - self._began_s) / (60 * self._plan.minutes) if self._plan.minutes else 1.0
        by_kills = crew.counts["worker killed"] / self._plan.kills if self._plan.kills else 1.0
        return min(by_time, by_kills)

    def _break_things(self, crew: Crew) -> None:
        troubles: list[Callable[[], str | None]] = [crew.freeze, *self._ground.troubles(crew.pids)]
        number = 0
        while self._progress(crew) < 1.0:
            # In turn, beginning at once, so that a short run meets all of it.
            if number % _KILLS_PER_TROUBLE == 0 or number < len(troubles):
                place = number if number < len(troubles) else number // _KILLS_PER_TROUBLE
                if said := troubles[place % len(troubles)]():
                    self._troubles[said] += 1
            crew.tend()
            crew.kill()
            number += 1
            self._let_work()

    def _let_work(self) -> None:
        """Some jobs end before the next kill, unless that takes too long: nothing could be lost otherwise."""
        until_s = time.monotonic() + self._random.uniform(0.5, 2.0) * _LONGEST_PAUSE_S
        before = None
        while time.monotonic() < until_s:
            with suppress(SQLAlchemyError):
                ended = self._count("results")
                before = ended if before is None else before
                if ended >= before + _JOBS_PER_KILL:
                    return
            time.sleep(0.1)

    # -- until all has ended -------------------------------------------------------------------------------

    def _settle(self, store: Store, crew: Crew, senders: Senders, poison: Poison) -> None:
        """Wait until all has ended; what Redis lost with its file is sent again by those who sent it."""
        settings = self._ground.settings
        deadline_s = time.monotonic() + self._plan.settle_s

        def wait(condition: Callable[[], bool], what: str) -> None:
            def holds() -> bool:
                crew.tend()
                with suppress(StoreUnavailable):
                    return condition()
                return False

            wait_until(holds, timeout_s=max(1.0, deadline_s - time.monotonic()), what=what)

        try:
            if settings.broker is not None:
                wait(lambda: not self._messages_left(), "the intake to be done")
                lost = [n for n in range(1, self._plan.jobs, 2) if store.job(job_id(n)) is None]
                senders.deliver(settings.broker, lost)
                self._report.sent_again_after_redis_lost_its_file += len(lost)
                wait(lambda: not self._messages_left(), "the intake to be done")
            while True:
                wait(lambda: not self._count("jobs WHERE state IN ('queued', 'running')"), "every job to end")
                if poison.look_after_the_dead(store, self._report):
                    continue
                # A file's run that was killed before it had submitted all of it may bring new jobs, and dead ones.
                wait(lambda: not crew.files_left or bool(self._count(_DEAD)), "kvq run to end")
                if not self._count(_DEAD):
                    break
            wait(lambda: not self._count("outbox"), "the outbox to be drained")
        except AssertionError as err:
            self._report.broken.append(str(err))

    def _messages_left(self) -> int:
        broker = self._ground.settings.broker
        assert broker is not None
        keys = QueueKeys(queue="kvq")
        with redis.Redis.from_url(broker) as client:
            return sum(int(client.llen(key)) for key in keys.waiting) + int(client.hlen(keys.unacked))

    def _count(self, what: str) -> int:
        return int(query(self._ground.settings.db, f"SELECT count(*) FROM {what}")[0][0])

    def _note(self, crew: Crew, senders: Senders, poison: Poison) -> None:
        report = self._report
        report.disturbances = dict(sorted((crew.counts + self._troubles).items()))
        report.killed_by_poison_jobs = poison.num_killed
        report.killed_while_they_ran_jobs = crew.killed_at_work
        report.ended_as_the_database_was_away_and_started_again = crew.ended_away
        report.leases_lost = crew.leases_lost
        report.results_refused_by_the_fence = crew.results_refused
        report.sent = dict(sorted(senders.counts.items()))
        if self._ground.settings.broker is None:
            report.sent["jobs in a file for kvq run"] = len(range(1, self._plan.jobs, 4))
        report.broken.extend(crew.broken)
