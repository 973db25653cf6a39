"""Soak: workers on real Redis and PostgreSQL while a killer breaks one thing after another.

``python -m tests.system.soak --minutes 5 --kills 100 --jobs 20000`` prints what was done and what came of it, as
JSON; exit code 1 when a promise was broken. Owns the servers, the workers, the killer and the verdict. Invariant of
the harness: what it expects follows from what it sent, never from what the store says it has.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psycopg
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from kvq.engine.engine import Engine
from kvq.migrations import migrate
from kvq.worker.audit import audit
from kvq.worker.config import Settings
from kvq.worker.errors import StoreUnavailable
from kvq.worker.jobs import Endpoint, JobState, NewJob
from kvq.worker.service import ServiceOptions, WorkerService
from kvq.worker.store import Store
from tests.models import engine_config, tiny_model
from tests.servers import PostgresServer, RedisServer
from tests.system.processes import START_TIMEOUT_S, Worker
from tests.waiting import wait_until

logger = logging.getLogger("soak")

LEASE_S = 6.0
HEARTBEAT_S = 1.0
DATABASE = "soak"
_LEASE_LOST = "was declared dead while it was silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done to whom. ``num_bodies``: distinct requests; each is asked for many times."""

    minutes: float
    kills: int
    jobs: int
    workers: int = 3
    seed: int = 0
    num_bodies: int = 400
    settle_s: float = 600.0


@dataclass(slots=True, kw_only=True)
class Report:
    """What was done, and what came of it. ``broken`` are sentences; none where every promise was kept."""

    plan: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    disturbances: dict[str, int] = field(default_factory=dict)
    jobs: int = 0
    sent_by_celery: int = 0
    duplicates_sent: int = 0
    sent_again_after_redis_lost_its_file: int = 0
    states: dict[str, int] = field(default_factory=dict)
    attempts_lost: int = 0
    jobs_run_more_than_once: int = 0
    dead_letters_retried: int = 0
    leases_lost: int = 0
    results_refused_by_the_fence: int = 0
    answers_compared_with_a_calm_run: int = 0
    audit: dict[str, bool] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def body(number: int) -> dict[str, Any]:
    """Prompts that share beginnings; half of the answers are drawn at random, from a seed of their own."""
    prompt = f"a prefix shared by every fifth prompt {number % 5} " * 4 + f"and number {number}"
    drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": 4 + number % 29, "ignore_eos": True, **drawn}


def job_id(number: int) -> str:
    return f"soak-{number}"


def job(number: int, plan: Plan) -> NewJob:
    return NewJob(
        job_id=job_id(number),
        custom_id=str(number),
        endpoint=Endpoint.COMPLETIONS,
        body=body(number % plan.num_bodies),
        line_no=number,
    )


class Soak:
    """One run. Everything random is drawn from the plan's seed; what the machine makes of it is not."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.report = Report(plan=asdict(plan))
        self._folder = folder
        self._random = random.Random(plan.seed)
        self._model = tiny_model(folder / "tiny")
        self._redis = RedisServer(durable=True)
        self._postgres = PostgresServer()
        self._workers: list[Worker] = []
        self._num_started = 0
        self._done = threading.Event()
        self._disturbances: Counter[str] = Counter()
        self._failures: list[BaseException] = []
        # Even numbers come through SQL, odd ones through Celery.
        self._by_sql = list(range(0, plan.jobs, 2))
        self._by_celery = list(range(1, plan.jobs, 2))

    @property
    def settings(self) -> Settings:
        return Settings(
            db=self._postgres.url_of(DATABASE), broker=self._redis.url, heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S
        )

    def run(self) -> Report:
        """The whole of it; the report's ``broken`` says whether all went well."""
        began_s = time.monotonic()
        with self._running_servers(), Store.open(self.settings.db) as store:
            for _ in range(self.plan.workers):
                self._start_worker()
            for worker in self._workers:
                worker.wait_ready()
            senders = [self._thread(self._submit, store), self._thread(self._send, store)]
            self._disturb(time.monotonic() + 60 * self.plan.minutes)
            for thread in senders:
                thread.join(self.plan.settle_s)
            if self._failures:
                raise self._failures[0]
            self._settle(store)
            for worker in self._workers:
                # One that was started while PostgreSQL was down has said so and ended: a supervisor's case.
                if (code := worker.stop()) != 0 and "the database is unavailable" not in worker.log:
                    self.report.broken.append(f"a worker that was told to stop ended with {code}: {worker.log[-2000:]}")
            self._judge(store)
        self.report.seconds = round(time.monotonic() - began_s, 1)
        self.report.disturbances = dict(sorted(self._disturbances.items()))
        return self.report

    # -- servers and workers -------------------------------------------------------------------------------

    @contextmanager
    def _running_servers(self) -> Iterator[None]:
        self._redis.start()
        self._postgres.start()
        try:
            with psycopg.connect(self._postgres.url, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {DATABASE}")
            migrate.upgrade(self.settings.db)
            yield
        finally:
            self._done.set()
            for worker in self._workers:
                worker.kill()
            self._redis.remove()
            self._postgres.remove()

    def _start_worker(self) -> None:
        settings: dict[str, object] = {
            "db": self.settings.db,
            "broker": self.settings.broker,
            "model": self._model,
            "device": "cpu",
            "kv_cache_memory": "64MiB",
            "max_num_seqs": 8,
            "heartbeat_s": HEARTBEAT_S,
            "lease_s": LEASE_S,
            "drain_timeout": 30,
        }
        self._workers.append(Worker(self._folder / f"worker-{self._num_started}", settings))
        self._num_started += 1

    def _thread(self, work: Callable[[Store], None], store: Store) -> threading.Thread:
        def run() -> None:
            try:
                work(store)
            except BaseException as err:
                self._failures.append(err)
                raise

        thread = threading.Thread(target=run, name=work.__name__, daemon=True)
        thread.start()
        return thread

    # -- those who bring work ------------------------------------------------------------------------------

    def _submit(self, store: Store) -> None:
        """Batches into SQL, some of them twice; while the database is away, again and again."""
        size = max(1, len(self._by_sql) // 10)
        for start in range(0, len(self._by_sql), size):
            jobs = [job(number, self.plan) for number in self._by_sql[start : start + size]]
            batch_id = f"batch-{start}"
            for _ in range(1 + self._random.randrange(2)):
                self._until_taken(lambda batch_id=batch_id: store.create_batch(batch_id=batch_id))  # type: ignore[misc]
                self._until_taken(lambda jobs=jobs, batch_id=batch_id: store.insert_jobs(jobs, batch_id=batch_id))  # type: ignore[misc]
            self._done.wait(0.5 * 60 * self.plan.minutes / 10)

    def _until_taken(self, call: Callable[[], object]) -> None:
        while not self._done.is_set():
            try:
                call()
            except StoreUnavailable:
                self._done.wait(0.5)
            else:
                return

    def _send(self, _: Store) -> None:
        """Messages, spread over half the time; every tenth is sent twice."""
        draw = random.Random(self.plan.seed + 1)
        pause_s = 0.5 * 60 * self.plan.minutes / max(1, len(self._by_celery) // 50)
        with Celery("sender", broker=self._redis.url, set_as_current=False) as app:
            for place, number in enumerate(self._by_celery):
                self._deliver(app, number)
                self.report.sent_by_celery += 1
                if draw.random() < 0.1:
                    self._deliver(app, self._by_celery[draw.randrange(place + 1)])
                    self.report.duplicates_sent += 1
                if place % 50 == 49:
                    self._done.wait(pause_s)

    def _deliver(self, app: Celery, number: int) -> None:
        while not self._done.is_set():
            with suppress(OperationalError, redis.RedisError, OSError):
                app.send_task(
                    "kvq.generate",
                    kwargs=body(number % self.plan.num_bodies),
                    queue="kvq",
                    task_id=job_id(number),
                    retry=False,
                )
                return
            self._done.wait(0.2)

    # -- the killer ----------------------------------------------------------------------------------------

    def _disturb(self, until_s: float) -> None:
        others = [
            self._stop_worker_past_its_lease,
            self._lose_redis_file,
            self._stop_postgres,
            self._restart_redis,
            self._cut_connections,
        ]
        interval_s = 60 * self.plan.minutes / max(1, self.plan.kills)
        due_s = time.monotonic()
        number = 0
        while self._disturbances["worker killed"] < self.plan.kills and not self._failures:
            if self._done.wait(max(0.0, min(due_s, until_s) - time.monotonic())) or time.monotonic() > until_s:
                return
            # In turn, so that a short run meets all of it.
            if number % 2 == 0:
                others[number // 2 % len(others)]()
            self._kill_worker()
            number += 1
            due_s += interval_s * self._random.uniform(0.5, 1.5)

    def _kill_worker(self) -> None:
        victim = self._ready_worker()
        victim.kill()
        self._note_log(victim)
        self._workers.remove(victim)
        self._disturbances["worker killed"] += 1
        self._start_worker()

    def _ready_worker(self) -> Worker:
        """One that runs jobs, waited for: killing or freezing one that is still loading proves little."""

        def ready() -> list[Worker]:
            return [worker for worker in self._workers if "engine ready" in worker.log]

        return self._random.choice(wait_until(ready, timeout_s=START_TIMEOUT_S, what="a worker to be ready"))

    def _restart_redis(self) -> None:
        self._redis.kill()
        self._redis.start()
        self._disturbances["Redis killed"] += 1

    def _lose_redis_file(self) -> None:
        self._redis.kill()
        self._redis.forget()
        self._redis.start()
        self._disturbances["Redis killed, its file lost"] += 1

    def _stop_postgres(self) -> None:
        self._postgres.stop_immediately()
        self._done.wait(self._random.uniform(0.0, 2.0))
        self._postgres.start()
        self._disturbances["PostgreSQL stopped immediately"] += 1

    def _stop_worker_past_its_lease(self) -> None:
        worker = self._ready_worker()
        worker.send(signal.SIGSTOP)
        self._done.wait(LEASE_S + 5.0)
        worker.send(signal.SIGCONT)
        # The others were there to take its jobs; it must find out by itself, and go on under another name.
        worker.wait_for_log(_LEASE_LOST)
        self._disturbances["worker frozen past its lease"] += 1

    def _cut_connections(self) -> None:
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (DATABASE,))
        with redis.Redis.from_url(self._redis.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_kill_filter(_type="pubsub", skipme=True)
        self._disturbances["connections cut"] += 1

    def _note_log(self, worker: Worker) -> None:
        for line in worker.log.splitlines():
            if "results were refused" in line:
                self.report.results_refused_by_the_fence += int(line.split(" results were refused")[0].split()[-1])
            elif _LEASE_LOST in line:
                self.report.leases_lost += 1

    # -- the verdict ---------------------------------------------------------------------------------------

    def _settle(self, store: Store) -> None:
        """Wait until all has ended; what Redis lost with its file is sent again by those who sent it."""
        deadline_s = time.monotonic() + self.plan.settle_s

        def wait(condition: Callable[[], bool], what: str) -> None:
            wait_until(condition, timeout_s=max(1.0, deadline_s - time.monotonic()), what=what)

        wait(lambda: not self._messages_left(), "the intake to be done")
        with Celery("sender", broker=self._redis.url, set_as_current=False) as app:
            for number in self._by_celery:
                if store.job(job_id(number)) is None:
                    self._deliver(app, number)
                    self.report.sent_again_after_redis_lost_its_file += 1
        wait(lambda: not self._messages_left(), "the intake to be done")
        while True:
            wait(lambda: self._count("state IN ('queued', 'running')") == 0, "every job to end")
            retried = store.retry_where(batch_id=None, states=[JobState.DEAD])
            self.report.dead_letters_retried += retried
            if not retried:
                break
        wait(lambda: self._rows("SELECT count(*) FROM outbox") == [(0,)], "the outbox to be drained")

    def _messages_left(self) -> int:
        with redis.Redis.from_url(self._redis.url) as client:
            return sum(client.llen(key) for key in ("kvq", *(f"kvq\x06\x16{step}" for step in (3, 6, 9)))) + int(
                client.hlen("kvq:unacked")
            )

    def _rows(self, statement: str) -> list[Any]:
        with psycopg.connect(self.settings.db) as connection:
            return connection.execute(statement).fetchall()

    def _count(self, condition: str) -> int:
        return int(self._rows(f"SELECT count(*) FROM jobs WHERE {condition}")[0][0])

    def _judge(self, store: Store) -> None:
        report, broken = self.report, self.report.broken
        for worker in self._workers:
            self._note_log(worker)
        for check in audit(store, self.settings):
            report.audit[check.invariant] = check.holds
            broken.extend(check.problems)
            if check.note:
                broken.append(check.note)
        rows = self._rows("SELECT j.job_id, j.state, r.text FROM jobs j LEFT JOIN results r ON r.seq = j.seq")
        report.jobs = len(rows)
        report.states = dict(Counter(row[1] for row in rows))
        wanted = {job_id(number) for number in range(self.plan.jobs)}
        found = Counter(row[0] for row in rows)
        if missing := wanted - found.keys():
            broken.append(f"{len(missing)} jobs were lost, such as {min(missing)}")
        if strange := found.keys() - wanted:
            broken.append(f"{len(strange)} jobs are nobody's, such as {min(strange)}")
        if failed := [row for row in rows if row[1] != "succeeded"]:
            broken.append(f"{len(failed)} jobs did not succeed, such as {failed[0][:2]}")
        report.attempts_lost = self._rows("SELECT count(*) FROM job_attempts WHERE outcome = 'lost'")[0][0]
        report.jobs_run_more_than_once = self._count("attempt > 1")
        calm = self._calm_answers()
        differing = [row[0] for row in rows if row[2] != calm[int(row[0].split("-")[1]) % self.plan.num_bodies]]
        report.answers_compared_with_a_calm_run = len(rows)
        if differing:
            broken.append(f"{len(differing)} answers differ from those of a calm run, such as that of {differing[0]}")

    def _calm_answers(self) -> dict[int, str | None]:
        """The same requests on one engine that nobody disturbs, in other company."""
        numbers = range(min(self.plan.num_bodies, self.plan.jobs))
        with Store.open(str(self._folder / "calm.db"), create=True) as store:
            store.create_batch(batch_id="calm")
            store.insert_jobs([job(number, self.plan) for number in numbers], batch_id="calm")
            config = engine_config(self._model, max_num_seqs=16)
            service = WorkerService(store, lambda: Engine.load(config), options=ServiceOptions(model="tiny"))
            service.start()
            service.run_until_idle("calm")
            service.drain(0)
            return {int(row.custom_id): row.text for row in store.iter_results("calm")}


@click.command()
@click.option("--minutes", type=float, default=5.0, show_default=True, help="How long things are broken.")
@click.option("--kills", type=int, default=100, show_default=True, help="Most workers killed while they run jobs.")
@click.option("--jobs", type=int, default=20_000, show_default=True)
@click.option("--workers", type=int, default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(minutes: float, kills: int, jobs: int, workers: int, seed: int) -> None:
    """Break things for a while, then see whether every promise was kept."""
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="kvq-soak-") as folder:
        plan = Plan(minutes=minutes, kills=kills, jobs=jobs, workers=workers, seed=seed)
        report = Soak(plan, Path(folder)).run()
    click.echo(json.dumps(asdict(report), indent=2))
    sys.exit(1 if report.broken else 0)


if __name__ == "__main__":
    main()
