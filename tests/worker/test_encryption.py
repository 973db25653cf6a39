"""What the database holds under a key: nothing that can be read, moved or changed; and the keys."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import sqlalchemy as sa

from kvq.migrations.url import database_url
from kvq.worker.errors import SettingsError, ValueUnreadable
from kvq.worker.jobs import Endpoint, JobError, JobMetrics, JobState
from kvq.worker.privacy import parse_keys
from tests.factories import claim_all, failure_of, new_batch, new_job, new_worker
from tests.worker.private_stores import (
    ANSWER,
    KEYS,
    MARK,
    OpenStore,
    Sql,
    answered,
    everything,
    secret_job,
    succeed,
    text_of,
)


def test_prompts_answers_and_headers_are_unreadable_in_the_database_and_whole_outside(
    open_store: OpenStore, store_url: str
) -> None:
    store = open_store(KEYS[0])
    jobs = [secret_job(1), secret_job(2, celery={"links": {"chain": [MARK]}})]
    batch_id = new_batch(store, jobs)
    assert [job.body for job in store.peek("kvq", limit=9)] == [job.body for job in jobs]
    worker_id = new_worker(store)
    claimed = claim_all(store, worker_id)
    assert [job.body for job in claimed] == [job.body for job in jobs]
    assert claimed[1].celery == jobs[1].celery
    partial = answered(claimed[1], state=JobState.CANCELLED, error=JobError(code="cancelled", message="on request"))
    store.finish(worker_id, [answered(claimed[0]), partial])
    held = everything(store_url)
    assert MARK not in held
    assert ANSWER not in held
    first, second = store.iter_results(batch_id)
    assert (first.text, first.response) == (ANSWER, {"id": first.job_id, "choices": [{"text": ANSWER}]})
    assert (second.state, second.text) == (JobState.CANCELLED, ANSWER)
    assert store.job_body(first.job_id) == jobs[0].body
    (told,) = store.outbox_pending(9)
    assert told.payload["celery"] == jobs[1].celery
    assert told.payload["response"] == second.response
    assert "kvq1." in (open_view(store_url) or "")


def open_view(store_url: str) -> str | None:
    engine = sa.create_engine(database_url(store_url), poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        text: str | None = connection.execute(sa.text("SELECT text FROM job_results ORDER BY line_no LIMIT 1")).scalar()
    engine.dispose()
    return text


def test_without_the_key_everything_but_the_text_can_be_read_and_the_error_names_the_setting(
    open_store: OpenStore,
) -> None:
    batch_id = new_batch(open_store(KEYS[0]), [secret_job()])
    succeed(open_store(KEYS[0]))
    for reader in (open_store(), open_store(KEYS[1])):
        assert reader.batch_progress(batch_id).succeeded == 1
        assert reader.summary(batch_id).progress.completion_tokens == 5
        with pytest.raises(ValueUnreadable, match=r"the (text|response|body) of job .* encryption_key"):
            list(reader.iter_results(batch_id))


def test_keys_are_replaced_by_putting_the_new_one_first(open_store: OpenStore, sql: Sql) -> None:
    old_batch = new_batch(open_store(KEYS[0]), [secret_job(1)])
    succeed(open_store(KEYS[0]))
    both = open_store(KEYS[1], KEYS[0])
    new = new_batch(both, [secret_job(2)])
    succeed(both)
    for batch_id in (old_batch, new):
        assert [row.text for row in both.iter_results(batch_id)] == [ANSWER]
    assert [row.text for row in open_store(KEYS[1]).iter_results(new)] == [ANSWER]
    with pytest.raises(ValueUnreadable):
        list(open_store(KEYS[1]).iter_results(old_batch))


def test_what_was_stored_before_there_was_a_key_is_read_as_it_is(open_store: OpenStore) -> None:
    batch_id = new_batch(open_store(), [secret_job(1), secret_job(2)])
    keyed = open_store(KEYS[0])
    worker_id = new_worker(keyed)
    first, second = claim_all(keyed, worker_id)
    open_store().finish(worker_id, [answered(first)])
    keyed.finish(worker_id, [answered(second)])
    assert [row.text for row in keyed.iter_results(batch_id)] == [ANSWER, ANSWER]


def test_a_worker_without_the_key_leaves_the_job_to_others_and_goes_on_with_what_it_can_read(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    submitter = open_store(KEYS[0])
    submitter.insert_jobs([secret_job(number) for number in range(1, 6)])
    open_store().insert_jobs([secret_job(6)])
    for other in (open_store(), open_store(KEYS[1])):
        assert [job.body["prompt"] for job in other.peek("kvq", limit=2)] == [f"{MARK} 6"]
        assert [job.body["prompt"] for job in other.peek("kvq", limit=2)] == [f"{MARK} 6"]
    assert caplog.text.count("a job is left to workers that can read it") == 10, "once a job and process"
    assert "encryption_key is not set here" in caplog.text
    assert "does not hold that key" in caplog.text
    assert len(claim_all(submitter, new_worker(submitter))) == 6, "nothing was lost"


def test_an_end_that_cannot_be_read_here_is_told_by_one_who_can(
    open_store: OpenStore, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(KEYS[0])
    store.insert_jobs([secret_job(celery={"headers": {}})])
    succeed(store)
    assert open_store().outbox_pending(9) == []
    assert "cannot be told from here" in caplog.text
    sql("UPDATE outbox SET next_at = '2020-01-01 00:00:00.000'")
    assert len(store.outbox_pending(9)) == 1


def test_a_value_moved_to_another_job_or_changed_is_refused(open_store: OpenStore, sql: Sql) -> None:
    store = open_store(KEYS[0])
    batch_id = new_batch(store, [secret_job(1), secret_job(2)])
    succeed(store)
    first, second = store.iter_results(batch_id)
    sql(
        "UPDATE results SET response = (SELECT r.response FROM results r WHERE r.seq = :a) WHERE seq = :b",
        a=first.seq,
        b=second.seq,
    )
    assert store.job(first.job_id) is not None
    with pytest.raises(ValueUnreadable, match="was changed since it was encrypted"):
        store.job(second.job_id)


def test_bodies_are_rewritten_under_the_key(open_store: OpenStore, store_url: str) -> None:
    store = open_store(KEYS[0])
    batch_id = new_batch(store, [secret_job()])
    worker_id = new_worker(store)
    store.finish(worker_id, [failure_of(job) for job in claim_all(store, worker_id)])
    store.retry_where(batch_id=batch_id, states=[JobState.FAILED], rewrite=lambda _, body: {**body, "max_tokens": 77})
    (job,) = store.peek("kvq", limit=9)
    assert job.body["max_tokens"] == 77
    assert MARK not in everything(store_url)


def test_an_equal_answer_is_found_by_its_key_under_the_same_keys_alone(open_store: OpenStore, sql: Sql) -> None:
    store = open_store(KEYS[0])
    store.insert_jobs([secret_job()])
    worker_id = new_worker(store)
    store.finish(worker_id, [answered(job, request_key="hash") for job in claim_all(store, worker_id)])
    ((stored,),) = sql("SELECT request_key FROM results")
    assert stored not in (None, "hash")
    assert store.answers_by_key(["hash", "other"])["hash"].text == ANSWER
    assert open_store(KEYS[1]).answers_by_key(["hash"]) == {}
    ((seq,),) = sql("SELECT seq FROM results")
    assert store.answers_by_seq([seq])[seq].text == ANSWER
    assert open_store(KEYS[1]).answers_by_seq([seq]) == {}, "it is computed rather than waited for"


def test_what_only_looks_encrypted_is_read_as_it_is(open_store: OpenStore) -> None:
    store = open_store()
    odd = {"kvq_encrypted": "not a token"}
    batch_id = new_batch(store, [new_job(1, body=odd)])
    worker_id = new_worker(store)
    (job,) = claim_all(store, worker_id)
    text = "kvq1.00000000.abc"
    store.finish(worker_id, [answered(job, text=text)])
    assert [row.text for row in store.iter_results(batch_id)] == [text]
    assert store.job_body(job.job_id) == odd


def test_awkward_ids_and_values_come_back_from_under_a_key(open_store: OpenStore) -> None:
    store = open_store(KEYS[0])
    job = new_job(1, job_id="a\0b\ud800", body={"prompt": "a\0b \ud800 ü"}, endpoint=Endpoint.COMPLETIONS)
    store.insert_jobs([job])
    worker_id = new_worker(store)
    (claimed,) = claim_all(store, worker_id)
    assert claimed.body == job.body
    outcome = answered(claimed, response={"logprob": float("nan"), "text": "ü\0"}, metrics=JobMetrics())
    store.finish(worker_id, [outcome])
    row = store.job(claimed.job_id)
    assert row is not None
    assert row.response == {"logprob": None, "text": "ü\0"}


def test_keys_come_from_the_setting_and_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# the newest first\n{text_of(KEYS[1])}\n\n{text_of(KEYS[0])}\n")
    assert parse_keys(None, str(path)) == (KEYS[1], KEYS[0])
    assert parse_keys(text_of(KEYS[2], KEYS[0]), str(path)) == (KEYS[2], KEYS[0], KEYS[1])
    urlsafe = base64.urlsafe_b64encode(b"\xfb\xff" * 16).decode()
    assert parse_keys(urlsafe, None) == (b"\xfb\xff" * 16,)
    assert parse_keys(f"{text_of(KEYS[0])}\n", None) == (KEYS[0],)


@pytest.mark.parametrize("bad", ["short", "c2hvcnQ=", text_of(KEYS[0])[:-4] + "====", "ü" * 44])
def test_a_key_that_is_none_is_refused_without_being_shown(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{bad}\n")
    for setting, args in (("encryption_key", (bad, None)), ("encryption_key_file", (None, str(path)))):
        with pytest.raises(SettingsError, match=f"^{setting}: ") as caught:
            parse_keys(*args)
        assert bad not in str(caught.value)


def test_a_file_of_keys_must_be_there_and_hold_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*none: No such file"):
        parse_keys(None, str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# none yet\n")
    with pytest.raises(SettingsError, match="holds no key"):
        parse_keys(None, str(tmp_path / "empty"))
