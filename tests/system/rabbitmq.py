"""RabbitMQ for real: ``python -m tests.system.rabbitmq`` where a ``rabbitmq-server`` is on the PATH.

Celery sends jobs over ``amqp://`` while the worker is killed: in the middle of taking messages in, of computing, at
random; and RabbitMQ itself is stopped and started again. At the end every job has exactly one result, in SQL and for
its sender, and no message is left. The server has private ports and keeps its data in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import amqp
import redis
import sqlalchemy as sa
from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError

from kvq.migrations import migrate
from kvq.migrations.url import database_url
from kvq.worker.keys import QueueKeys
from kvq.worker.store import Store
from tests.models import tiny_model
from tests.servers import PostgresServer, RedisServer, ServerProcess, free_port
from tests.system.processes import Worker
from tests.waiting import wait_until

KEYS = QueueKeys(queue="kvq")
# Where the first workers kill themselves; those after them are killed at random.
FAILPOINTS = ("after_pop:2", "after_inbox:2", "mid_step:9")


class RabbitServer:
    """RabbitMQ on free local ports, with a name server (epmd) of its own."""

    def __init__(self) -> None:
        found = shutil.which("rabbitmq-server")
        if found is None:
            raise SystemExit("there is no rabbitmq-server on the PATH (Debian: apt-get install rabbitmq-server)")
        self._command = found
        self._folder = Path(tempfile.mkdtemp(prefix="kvq-rabbitmq-"))
        self._folder.chmod(0o777)  # Debian's command runs the server as its own user
        self.port = free_port()
        self._epmd_port = free_port()
        (self._folder / "rabbitmq.conf").write_text(
            "vm_memory_high_watermark.relative = 0.9\ndisk_free_limit.absolute = 1MB\n"
        )
        self._environ = {
            "RABBITMQ_NODENAME": f"kvq-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self._folder / "data"),
            "RABBITMQ_LOG_BASE": str(self._folder / "logs"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self._folder / "rabbitmq.conf"),
            "RABBITMQ_PID_FILE": str(self._folder / "rabbitmq.pid"),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        self._process = ServerProcess(self._folder, stop_signal="TERM")

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        settings = [f"{name}={value}" for name, value in self._environ.items()]
        self._process.launch(["env", *settings, self._command])
        wait_until(self._answers, timeout_s=240, what=f"RabbitMQ to answer; its log is {self._folder}/log")

    def _answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=2) as connection:
                connection.ensure_connection(max_retries=1, timeout=2)
        except (OSError, amqp.AMQPError, OperationalError):
            time.sleep(0.2)
            return False
        return True

    def stop(self) -> None:
        """As an operator does. The command is a shell that waits for the server: that is the one to be told."""
        pid_file = self._folder / "rabbitmq.pid"
        if pid_file.exists():
            pid = int(pid_file.read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=60, what="RabbitMQ to end")
            pid_file.unlink(missing_ok=True)
        self._process.stop()

    def remove(self) -> None:
        self.stop()
        subprocess.run(
            ["epmd", "-port", str(self._epmd_port), "-kill"],
            check=False,
            capture_output=True,
            env={**os.environ, "ERL_EPMD_ADDRESS": "127.0.0.1"},
        )
        shutil.rmtree(self._folder, ignore_errors=True)


class Run:
    """One run: servers, a sender that goes on sending, and a worker that is killed and started again."""

    def __init__(self, folder: Path, *, jobs: int, kills: int, seed: int) -> None:
        self._folder = folder
        self._num_jobs = jobs
        self._num_kills = kills
        self._draw = random.Random(seed)
        self._broker = RabbitServer()
        self._backend = RedisServer()
        self._postgres = PostgresServer()
        self._num_sent = 0
        self._num_workers = 0
        self.num_resent = 0
        self.num_restarts = 0

    def __enter__(self) -> Run:
        for server in (self._broker, self._backend, self._postgres):
            server.start()
        migrate.upgrade(self._postgres.url)
        self._model = tiny_model(self._folder / "model")
        return self

    def __exit__(self, *_exc: object) -> None:
        for server in (self._broker, self._backend, self._postgres):
            server.remove()

    def go(self) -> dict[str, Any]:
        """Send, kill, wait for the end; the figures. AssertionError where a job was lost or doubled."""
        began_s = time.monotonic()
        sender = threading.Thread(target=self._send_all, daemon=True)
        sender.start()
        for number in range(self._num_kills):
            failpoint = FAILPOINTS[number] if number < len(FAILPOINTS) else ""
            worker = self._worker(failpoint)
            try:
                if failpoint:
                    worker.wait_killed()
                elif number % 2:
                    # It stays alive meanwhile, and is killed when it has taken messages in again.
                    worker.wait_ready()
                    self._broker.stop()
                    self.num_restarts += 1
                    worker.wait_for_log("the broker is away")
                    self._broker.start()
                    self._wait_for_news()
                else:
                    worker.wait_ready()
                    time.sleep(self._draw.uniform(0, 1.5))
                assert failpoint or worker.exit_code is None, worker.log
            finally:
                worker.kill()
        worker = self._worker()
        try:
            sender.join(600)
            wait_until(self._all_ended, timeout_s=900, what="every job to end")
            wait_until(self._all_told, timeout_s=60, what="every sender to be told")
            assert worker.stop() == 0, worker.log
        finally:
            worker.kill()
        return {**self._verdict(), "seconds": round(time.monotonic() - began_s)}

    def _worker(self, failpoint: str = "") -> Worker:
        settings = {
            "db": self._postgres.url,
            "broker": self._broker.url,
            "result_backend": self._backend.url,
            "model": self._model,
            "device": "cpu",
            "kv_cache_memory": "64MiB",
            "max_num_seqs": 8,
        }
        self._num_workers += 1
        return Worker(self._folder / f"worker-{self._num_workers}", settings, failpoints=failpoint)

    def _send_all(self) -> None:
        """Every tenth twice, under the same id. What the broker did not take is sent again."""
        with Celery(broker=self._broker.url, set_as_current=False) as app:
            app.conf.broker_transport_options = {"confirm_publish": True}
            while self._num_sent < self._num_jobs:
                number = self._num_sent
                body = {"prompt": f"number {number}", "max_tokens": 6, "ignore_eos": True}
                try:
                    for _ in range(2 if number % 10 == 0 else 1):
                        app.send_task("kvq.generate", kwargs=body, queue=KEYS.queue, task_id=f"job-{number}")
                except Exception:  # noqa: BLE001 - RabbitMQ is being started again
                    self.num_resent += 1
                    time.sleep(0.2)
                else:
                    self._num_sent += 1
                    if number % 20 == 19:
                        time.sleep(0.5)  # so that it goes on while workers come and go

    def _sql(self, statement: str) -> list[Any]:
        engine = sa.create_engine(database_url(self._postgres.url), poolclass=sa.pool.NullPool)
        with engine.connect() as connection:
            return list(connection.execute(sa.text(statement)).all())

    def _all_ended(self) -> bool:
        return self._sql("SELECT count(*) FROM results") == [(self._num_jobs,)]

    def _wait_for_news(self) -> None:
        """Until messages come in, or none are left to come."""
        ((before,),) = self._sql("SELECT count(*) FROM jobs")
        wait_until(
            lambda: before == self._num_jobs or self._sql("SELECT count(*) FROM jobs") > [(before,)],
            timeout_s=120,
            what="messages after RabbitMQ is back",
        )

    def _all_told(self) -> bool:
        return self._sql("SELECT count(*) FROM outbox") == [(0,)]

    def _verdict(self) -> dict[str, Any]:
        ((jobs, succeeded),) = self._sql("SELECT count(*), count(*) FILTER (WHERE state = 'succeeded') FROM jobs")
        ((results, distinct),) = self._sql("SELECT count(*), count(DISTINCT seq) FROM results")
        ((again,),) = self._sql(
            "SELECT count(*) FROM (SELECT seq FROM job_attempts GROUP BY seq HAVING count(*) > 1) a"
        )
        with redis.Redis.from_url(self._backend.url) as server:
            told = sum(1 for _ in server.scan_iter("celery-task-meta-job-*", count=1000))
        left = {name: self._depth(name) for name in (KEYS.queue, KEYS.poison)}
        with Store.open(self._postgres.url) as store:
            broken = store.check_integrity()
        assert jobs == succeeded == results == distinct == told == self._num_jobs, (jobs, succeeded, results, told)
        assert left == {KEYS.queue: 0, KEYS.poison: 0}, left
        assert broken == [], broken
        return {
            "jobs": jobs,
            "succeeded once": distinct,
            "told": told,
            "ran more than once": again,
            "workers killed": self._num_kills,
            "RabbitMQ stopped and started under a worker": self.num_restarts,
            "messages sent twice": (self._num_jobs + 9) // 10,
            "publications the broker refused while away": self.num_resent,
        }

    def _depth(self, name: str) -> int:
        """Messages that lie in a queue; 0 where there is none of the name."""
        with Connection(self._broker.url) as connection:
            try:
                return int(connection.default_channel.queue_declare(name, passive=True).message_count)
            except amqp.NotFound:
                return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Jobs by Celery over RabbitMQ, to a worker that is killed meanwhile.")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvq-rabbitmq-run-") as folder,
        Run(Path(folder), jobs=options.jobs, kills=options.kills, seed=options.seed) as run,
    ):
        for name, figure in run.go().items():
            print(f"{name:<45} {figure:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
