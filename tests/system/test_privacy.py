"""Privacy of real workers and the command: keys and wishes from settings, through a broker and without one."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from kvq import Client
from kvq.cli.main import run
from kvq.migrations.url import database_url
from kvq.worker.store import Store
from tests.clients import celery_client
from tests.system.conftest import WorkerMaker
from tests.waiting import wait_until

MARK = "the-secret-of-the-prompt"
KEY, OTHER = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
BODY = {"prompt": f"{MARK} and more", "max_tokens": 4, "echo": True}


@pytest.fixture
def dump(store_url: str) -> Callable[[], str]:
    """All rows of all tables as text."""

    def read() -> str:
        engine = sa.create_engine(database_url(store_url), poolclass=sa.pool.NullPool)
        with engine.connect() as connection:
            tables = sa.inspect(connection).get_table_names()
            rows = [connection.execute(sa.text(f'SELECT * FROM "{table}"')).all() for table in tables]
        engine.dispose()
        return str(rows)

    return read


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
def test_with_a_key_nobody_reads_prompts_or_answers_without_it_and_nothing_is_lost_meanwhile(
    redis_url: str,
    store_url: str,
    start_worker: WorkerMaker,
    dump: Callable[[], str],
    sql: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Client(db=store_url, encryption_key=KEY) as client, celery_client(redis_url) as sender:
        batch = client.submit([BODY] * 3)
        stranger = start_worker("--no-broker", db=store_url, encryption_key=OTHER)
        stranger.wait_for_log("a job is left to workers that can read it")
        assert "does not hold that key" in stranger.log
        assert stranger.stop() == 0
        assert client.status(batch).queued == 3
        worker = start_worker(db=store_url, broker=redis_url, encryption_key=f"{KEY},{OTHER}", log_level="debug")
        answer = sender.send_task("kvq.generate", kwargs=BODY, queue="kvq").get(timeout=120)
        assert answer["choices"][0]["text"].startswith(MARK)
        assert client.wait(batch, timeout=120).succeeded == 3
        texts = [row.text for row in client.results(batch)]
        assert all(text is not None and text.startswith(MARK) for text in texts)
        wait_until(lambda: sql("SELECT count(*) FROM outbox") == [(0,)])
        assert MARK not in dump()
        assert worker.stop() == 0
        assert MARK not in worker.log
        assert KEY not in worker.log
    for name in [name for name in os.environ if name.startswith("KVQ_")]:
        monkeypatch.delenv(name)
    assert run(["results", batch.id, "--db", store_url, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "encryption_key is not set here" in captured.err
    monkeypatch.setenv("KVQ_ENCRYPTION_KEY", KEY)
    assert run(["export", batch.id, "--db", store_url, "--output", "-"]) == 0
    assert capsys.readouterr().out.count(MARK) == 3
    assert run(["config", "show"]) == 0
    assert KEY not in capsys.readouterr().out


def test_a_worker_that_keeps_no_prompts_answers_celery_and_leaves_none(
    redis_url: str, sqlite_url: str, start_worker: WorkerMaker
) -> None:
    worker = start_worker(db=sqlite_url, broker=redis_url, store_prompts=False, store_outputs=False, log_level="debug")
    with celery_client(redis_url) as sender:
        bad = sender.send_task("kvq.generate", kwargs={"prompt": MARK, "temperature": MARK}, queue="kvq")
        good = sender.send_task("kvq.generate", kwargs=BODY, queue="kvq")
        answer = good.get(timeout=120)
        assert answer["usage"]["completion_tokens"] == 4
        assert MARK not in answer["choices"][0]["text"], "it is not echoed"
        with pytest.raises(Exception, match="temperature") as refused:
            bad.get(timeout=120)
        assert MARK not in str(refused.value)
    with Store.open(sqlite_url) as store:
        wait_until(lambda: not store.check_outbox(lease_s=0), timeout_s=60)
    assert worker.stop() == 0
    path = str(database_url(sqlite_url).database)
    held = b"".join(file.read_bytes() for file in (Path(path), Path(f"{path}-wal")) if file.exists())
    assert MARK.encode() not in held
    assert answer["choices"][0]["text"].encode() not in held
    assert MARK not in worker.log
