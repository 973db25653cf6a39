"""Settings: where they come from, which wins, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvq.engine.config import EngineConfig
from kvq.worker.config import Settings, load_settings, setting_fields
from kvq.worker.errors import SettingsError
from kvq.worker.urls import celery_url, for_psql, masked


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, toml: str | None = None
) -> Settings:
    if toml is not None:
        Path("kvq.toml").write_text(toml, encoding="utf-8")
    return load_settings(flags, environ=environ or {})


def refused(*args: Any, **kwargs: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(*args, **kwargs)
    return caught.value


def test_flags_win_over_the_environment_that_over_the_file_and_that_over_defaults() -> None:
    toml = 'db = "file.db"\nqueue = "file"\nmodel = "file"\nlease_s = 99\n'
    environ = {"KVQ_DB": "env.db", "KVQ_QUEUE": "env"}
    settings = load({"db": "flag.db", "queue": None}, environ, toml)
    assert (settings.db, settings.queue, settings.engine["model"], settings.lease_s) == ("flag.db", "env", "file", 99.0)
    assert settings.heartbeat_s == 5.0
    assert settings.sources == {"db": "--db", "queue": "KVQ_QUEUE", "model": "kvq.toml", "lease_s": "kvq.toml"}


def test_every_engine_setting_is_a_setting_of_the_same_name() -> None:
    names = {f.name for f in setting_fields()}
    assert {f.name for f in dataclasses.fields(EngineConfig)} <= names
    assert all(f.help for f in setting_fields())


def test_engine_settings_reach_the_engine_with_their_types() -> None:
    environ = {
        "KVQ_MODEL": "/models/x",
        "KVQ_MAX_MODEL_LEN": "512",
        "KVQ_GPU_MEMORY_UTILIZATION": "0.5",
        "KVQ_ENFORCE_EAGER": "true",
        "KVQ_ENABLE_PREFIX_CACHING": "0",
        "KVQ_KV_CACHE_MEMORY": "1.5GiB",
    }
    config = load(environ=environ).engine_config()
    assert config == EngineConfig(
        model="/models/x",
        max_model_len=512,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory=3 << 29,
    )


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "setting", "source"),
    [
        ({"modl": "x"}, {}, None, "modl", "--modl"),
        ({}, {"KVQ_MODL": "x"}, None, "modl", "KVQ_MODL"),
        ({}, {}, 'modl = "x"', "modl", "kvq.toml"),
        ({}, {"KVQ_WINDOW": "many"}, None, "window", "KVQ_WINDOW"),
        ({}, {"KVQ_WINDOW": "0"}, None, "window", "KVQ_WINDOW"),
        ({}, {"KVQ_ENFORCE_EAGER": "perhaps"}, None, "enforce_eager", "KVQ_ENFORCE_EAGER"),
        ({}, {}, "enforce_eager = 1", "enforce_eager", "kvq.toml"),
        ({}, {}, 'window = ["a"]', "window", "kvq.toml"),
        ({}, {}, "[engine]\nmodel = 'x'", "engine", "kvq.toml"),
        ({}, {"KVQ_BLOCK_SIZE": "7"}, None, "block_size", "KVQ_BLOCK_SIZE"),
        ({}, {"KVQ_GPU_MEMORY_UTILIZATION": "1.0"}, None, "gpu_memory_utilization", "KVQ_GPU_MEMORY_UTILIZATION"),
        ({}, {"KVQ_KV_CACHE_MEMORY": "much"}, None, "kv_cache_memory", "KVQ_KV_CACHE_MEMORY"),
        ({}, {"KVQ_BROKER": "kafka://me:secret@host"}, None, "broker", "KVQ_BROKER"),
        ({"lease_s": 6.0}, {}, None, "lease_s", "--lease-s"),
        ({"log_level": "loud"}, {}, None, "log_level", "--log-level"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name_and_source(
    flags: dict[str, Any], environ: dict[str, str], toml: str | None, setting: str, source: str
) -> None:
    error = refused({"model": "/m", **flags}, environ, toml)
    assert error.setting == setting
    assert setting in str(error)
    assert source in str(error)
    assert "secret" not in str(error)


def test_a_misspelt_setting_gets_a_suggestion() -> None:
    assert "did you mean max_model_len?" in str(refused(environ={"KVQ_MAX_MODEL_LENGTH": "5"}))


def test_the_variables_of_the_tests_and_empty_ones_are_no_settings() -> None:
    environ = {"KVQ_TEST_REDIS_URL": "redis://x", "KVQ_TEST_PG_URL": "x", "KVQ_BROKER": "", "PATH": "x"}
    assert load(environ=environ) == load()


def test_a_file_that_was_asked_for_must_exist_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml"):
        load_settings(config="none.toml", environ={})
    with pytest.raises(SettingsError, match=r"none\.toml"):
        load_settings(environ={"KVQ_CONFIG": "none.toml"})
    assert "not valid TOML" in str(refused(toml="db = "))
    other = tmp_path / "other.toml"
    other.write_text('queue = "other"', encoding="utf-8")
    assert load_settings(config=other, environ={}).queue == "other"
    assert load_settings(environ={"KVQ_CONFIG": str(other)}).queue == "other"


def test_the_result_backend_is_the_broker_unless_set() -> None:
    assert load(environ={"KVQ_BROKER": "redis://a/0"}).result_backend == "redis://a/0"
    both = load(environ={"KVQ_BROKER": "redis://a/0", "KVQ_RESULT_BACKEND": "redis://b/1"})
    assert both.result_backend == "redis://b/1"


@pytest.mark.parametrize(
    ("given", "ours", "celerys"),
    [
        ("unix:///run/r.sock", "unix:///run/r.sock", "redis+socket:///run/r.sock?virtual_host=0"),
        ("unix://:p%40w@/a%20b?db=3", "unix://:p%40w@/a%20b?db=3", "redis+socket://:p%40w@/a%20b?virtual_host=3"),
        ("unix:///r?username=u&password=p/w", "unix:///r?username=u&password=p%2Fw", "redis+socket://u:p%2Fw@/r?virtual_host=0"),
        ("redis+socket://u:p@/r?virtual_host=2", "unix://u:p@/r?db=2", "redis+socket://u:p@/r?virtual_host=2"),
    ],
)  # fmt: skip
def test_a_redis_socket_is_named_as_redis_or_as_celery_names_it(given: str, ours: str, celerys: str) -> None:
    settings = load(environ={"KVQ_BROKER": given})
    assert (settings.broker, settings.result_backend) == (ours, ours)
    assert celery_url(ours) == celerys


@pytest.mark.parametrize("url", ["unix://run/redis.sock", "redis+socket://", "unix:///", "unix://:geheim@host/r.sock"])
def test_a_socket_without_a_path_of_its_own_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(
        SettingsError, match=r"three slashes begin the path of a socket: unix:///run/redis.sock"
    ) as refused:
        load(environ={"KVQ_BROKER": url})
    assert "geheim" not in str(refused.value)


def test_several_served_names_come_from_any_source() -> None:
    assert load({"served_model_name": ("a", "b")}).served_model_name == ("a", "b")
    assert load(environ={"KVQ_SERVED_MODEL_NAME": "a, b"}).served_model_name == ("a", "b")
    assert load(toml='served_model_name = ["a", "b"]').served_model_name == ("a", "b")


def test_a_model_answers_to_its_own_name_and_those_given() -> None:
    settings = load({"model": "/models/Tiny-1B", "served_model_name": ("gpt-4o",)})
    assert settings.served_names() == ("gpt-4o", "Tiny-1B", "/models/Tiny-1B")


def test_without_any_model_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq.worker.config.default_model", lambda: None)
    settings = load()
    with pytest.raises(SettingsError) as caught:
        settings.engine_config()
    for way in ("--model", "KVQ_MODEL", "kvq.toml"):
        assert way in str(caught.value)


def test_the_demo_model_stands_in_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq.worker.config.default_model", lambda: "package:demo")
    assert load().engine_config().model == "package:demo"
    assert load({"model": "/m"}).engine_config().model == "/m"


def test_psql_is_shown_a_url_that_it_can_read_and_no_password() -> None:
    assert for_psql("postgresql+psycopg://me:secret@host/db") == "postgresql://me@host/db"
    assert for_psql("postgres://me:a/b@c@host/db?sslmode=require") == "postgresql://me@host/db?sslmode=require"
    assert "secret" not in for_psql("postgresql://me@host/db?password=secret")


def test_passwords_are_masked() -> None:
    assert masked("postgresql://me:secret@host:5432/db") == "postgresql://me:***@host:5432/db"
    assert masked("redis://:secret@host/0") == "redis://:***@host/0"
    assert masked("kvq.db") == "kvq.db"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("postgresql://me:secret@host/db?sslmode=require", "postgresql://me:***@host/db?sslmode=require"),
        ("postgresql://me@host/db?password=secret&x=1", "postgresql://me@host/db?password=***&x=1"),
        ("postgresql://me:secret@host/db?sslpassword=secret", "postgresql://me:***@host/db?sslpassword=***"),
        ("kvq.db", "kvq.db"),
    ],
)
def test_a_url_is_shown_without_its_passwords_wherever_they_are(url: str, shown: str) -> None:
    assert masked(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@h/0",
        "redis://:s3cret/x@h:1/0",
        "redis://:s3cret#?@x@h:1/0",
        "postgresql://u:s3cret@h/n?sslmode=verify-full",
        "postgresql://h/n?user=u&password=s3cret",
        "postgresql//u:s3cret@h/n",
        "//u:s3cret@h/n",
    ],
)
def test_a_password_is_hidden_even_where_its_special_characters_were_not_escaped(url: str) -> None:
    assert "s3cret" not in masked(url)


def test_a_broker_url_that_cannot_be_read_is_refused_without_being_shown() -> None:
    with pytest.raises(SettingsError, match="written as %XX") as caught:
        Settings(broker="redis://:s3cret/x@h:1/0")
    assert "s3cret" not in str(caught.value)
