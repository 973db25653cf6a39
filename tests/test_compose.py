"""compose.yaml and the image: valid by the compose specification, and safe by what they promise."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvq.cli.main import COMMANDS
from kvq.worker.config import load_settings

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def specification() -> dict[str, Any]:
    """The compose specification's JSON schema, as check-jsonschema ships it."""
    path = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def duration_s(text: str) -> float:
    unit_s = {"s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * unit_s[unit] for number, unit in re.findall(r"([\d.]+)([smh])", text))


def test_the_file_follows_the_compose_specification() -> None:
    schema = specification()
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    errors = [f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(COMPOSE)]
    assert errors == []


def test_the_check_would_notice_a_mistake() -> None:
    schema = specification()
    broken = {**COMPOSE, "services": {**SERVICES, "worker": {**SERVICES["worker"], "stop_grace": "1s"}}}
    with pytest.raises(jsonschema.ValidationError, match="stop_grace"):
        jsonschema.validate(broken, schema)


def test_redis_keeps_what_it_accepted() -> None:
    options = SERVICES["redis"]["command"]
    assert options[options.index("--appendonly") + 1] == "yes"
    assert options[options.index("--maxmemory-policy") + 1] == "noeviction"
    assert any(volume.endswith(":/data") for volume in SERVICES["redis"]["volumes"])


@pytest.mark.parametrize("name", ["redis", "postgres"])
def test_servers_say_when_they_are_healthy_and_keep_their_data_in_volumes(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    (volume,) = service["volumes"]
    assert volume.partition(":")[0] in COMPOSE["volumes"]


def test_servers_are_not_reachable_from_other_machines() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_tables_are_upgraded_once_before_a_worker_starts() -> None:
    assert SERVICES["migrate"]["command"] == ["db", "upgrade"]
    assert SERVICES["migrate"]["restart"] == "no"
    assert SERVICES["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert SERVICES["worker"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert SERVICES["worker"]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_a_worker_gets_longer_to_stop_than_its_drain_takes() -> None:
    worker = SERVICES["worker"]
    assert worker["init"] is True
    drain_s = load_settings(environ=environment("worker")).drain_timeout
    assert drain_s + 10 <= duration_s(worker["stop_grace_period"])


def test_a_worker_reserves_a_gpu() -> None:
    (device,) = SERVICES["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "gpu" in device["capabilities"]


def test_each_gpu_has_a_worker_of_its_own() -> None:
    """A reservation of one GPU is always that of the first, and workers scaled up would share it."""
    shown = re.search(
        r"^  # worker-1:\n(?:  #  .*\n)+", (ROOT / "compose.yaml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert shown is not None
    second = yaml.safe_load(shown[0].replace("  # ", "  "))
    jsonschema.validate({**COMPOSE, "services": {**SERVICES, **second}}, specification())
    assert second["worker-1"]["extends"] == "worker"
    visible = [service["environment"]["CUDA_VISIBLE_DEVICES"] for service in (SERVICES["worker"], second["worker-1"])]
    assert visible == ["0", "1"]


def test_flower_and_tools_start_only_when_asked_for() -> None:
    assert SERVICES["flower"]["profiles"] == ["flower"]
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        "redis",
        "postgres",
        "migrate",
        "worker",
    }


def test_every_command_is_in_exec_form_and_is_one_of_ours() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r'^ENTRYPOINT \["kvq"\]$', dockerfile, re.MULTILINE)
    assert re.search(r'^CMD \["worker"\]$', dockerfile, re.MULTILINE)
    for name, service in SERVICES.items():
        assert isinstance(service.get("command", []), list), name
        if service["image"] == "kvq" and "entrypoint" not in service:
            assert service["command"][0] in COMMANDS
        assert isinstance(service.get("entrypoint", []), list), name


@pytest.mark.parametrize("name", ["migrate", "worker", "submit"])
def test_every_setting_in_the_environment_is_known(name: str) -> None:
    settings = load_settings(environ=environment(name))
    assert settings.db == "postgresql://kvq:kvq@postgres:5432/kvq"
    assert settings.broker == "redis://redis:6379/0"


def test_the_image_holds_the_source_and_nothing_private() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert "*" in ignored
    for name in ("cli", "engine", "kernels", "migrations", "src", "worker"):
        assert f"!{name}/" in ignored
    for name in re.findall(r'(?:readme|license-files) = \[?"([^"]+)"', (ROOT / "pyproject.toml").read_text()):
        assert f"!{name}" in ignored


def environment(name: str) -> dict[str, str]:
    """A service's environment with compose's ``${NAME:-default}`` replaced by the default."""
    return {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for key, value in SERVICES[name]["environment"].items()}
