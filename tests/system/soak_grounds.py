"""Where the jobs of a soak lie, and what can go wrong there: Redis and PostgreSQL, or a folder with a SQLite file.

Owns the servers and the folder. Knows no worker, except by number where a limit is set on a process.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psycopg
import redis

from kvq.migrations import migrate
from kvq.worker.config import Settings
from tests.servers import PostgresServer, RedisServer
from tests.system.soak_plan import HEARTBEAT_S, LEASE_S

_DATABASE = "soak"
_FOLDER_BYTES = 192 << 20
_MNT_DETACH = 2


class Ground(Protocol):
    """Where jobs lie. ``worker_options``: how ``kvq worker`` is told."""

    worker_options: tuple[str, ...]

    @property
    def settings(self) -> Settings: ...
    def start(self) -> None: ...
    def remove(self) -> None: ...
    def troubles(self, pids: Callable[[], Sequence[int]]) -> list[Callable[[], str]]:
        """Each breaks something, mends it, and returns what that was."""


class Servers:
    """Redis with a file that is written at every command, and PostgreSQL."""

    worker_options: tuple[str, ...] = ()

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._redis = RedisServer(durable=True)
        self._postgres = PostgresServer()

    @property
    def settings(self) -> Settings:
        db = self._postgres.url_of(_DATABASE)
        return Settings(db=db, broker=self._redis.url, heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S)

    def start(self) -> None:
        self._redis.start()
        self._postgres.start()
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {_DATABASE}")
        migrate.upgrade(self.settings.db)

    def remove(self) -> None:
        self._redis.remove()
        self._postgres.remove()

    def troubles(self, pids: Callable[[], Sequence[int]]) -> list[Callable[[], str]]:
        return [self._lose_redis_file, self._stop_postgres, self._restart_redis, self._cut_connections]

    def _restart_redis(self) -> str:
        self._redis.kill()
        self._redis.start()
        return "Redis killed"

    def _lose_redis_file(self) -> str:
        self._redis.kill()
        self._redis.forget()
        self._redis.start()
        return "Redis killed, its file lost"

    def _stop_postgres(self) -> str:
        self._postgres.stop_immediately()
        time.sleep(self._draw.uniform(0.0, 2.0))
        self._postgres.start()
        return "PostgreSQL stopped immediately"

    def _cut_connections(self) -> str:
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (_DATABASE,)
            )
        with redis.Redis.from_url(self._redis.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_kill_filter(_type="pubsub", skipme=True)
        return "connections cut"


class SqliteFolder:
    """A SQLite file in a folder that can be full: a small tmpfs where that can be mounted.

    Elsewhere the processes get a limit on the size of files, which fails the same writes.
    """

    worker_options: tuple[str, ...] = ("--no-broker",)

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._folder = Path(tempfile.mkdtemp(prefix="kvq-soak-sqlite-"))
        self._mounted = False

    @property
    def settings(self) -> Settings:
        return Settings(db=f"sqlite:///{self._folder / 'kvq.db'}", heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S)

    def start(self) -> None:
        self._mounted = _mount_tmpfs(self._folder)
        migrate.upgrade(self.settings.db)

    def remove(self) -> None:
        if self._mounted:
            ctypes.CDLL(None).umount2(os.fsencode(self._folder), _MNT_DETACH)
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def troubles(self, pids: Callable[[], Sequence[int]]) -> list[Callable[[], str]]:
        return [self._fill if self._mounted else lambda: self._limit(pids())]

    def _fill(self) -> str:
        """Take every free block, keep them for a while that may outlast a lease, give them back."""
        ballast = self._folder / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(1 << 16)):
                        pass
                except OSError:
                    self._sleep()
        finally:
            ballast.unlink()
        return "disk full"

    def _limit(self, pids: Sequence[int]) -> str:
        before = {}
        for pid in pids:
            before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, before[pid][1]))
        self._sleep()
        for pid, limits in before.items():
            if Path(f"/proc/{pid}").exists():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        return "file size limited"

    def _sleep(self) -> None:
        time.sleep(self._draw.uniform(0.5, 1.5 * LEASE_S))


def _mount_tmpfs(folder: Path) -> bool:
    options = f"size={_FOLDER_BYTES}".encode()
    return bool(ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options) == 0)
