"""Celery messages: read as they lie in Redis, and built for Celery's own task handler.

Owns the format (Celery protocols 1 and 2 inside kombu's envelope). Knows neither Redis nor SQL.
Invariants: a message that names a task id always becomes a job, a bad one a job that has failed, so that its
sender gets an answer; what goes to Celery's handler carries no prompt, only a short description of it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from kombu import Message

from kvq.worker.errors import BrokerError, RowError
from kvq.worker.formats import parse_body
from kvq.worker.jobs import DEFAULT_TENANT, ClaimedJob, Endpoint, JobError, NewJob
from kvq.worker.json_values import distinct_members
from kvq.worker.limits import check_depth
from kvq.worker.lines import checked_dedup_key
from kvq.worker.tenants import tenant_name
from kvq.worker.unpacking import unpacked

TASK_NAME = "kvq.generate"
MAX_BODY_BYTES = 32 * 2**20
# Such a body in base64, and room for headers.
MAX_MESSAGE_BYTES = 48 * 2**20
_MAX_ID_CHARS = 512
_SHOWN_CHARS = 120

# Rebuilt or enforced by us; the rest of the headers goes along unchanged.
_DROPPED_HEADERS = frozenset({"argsrepr", "kwargsrepr", "eta", "expires", "compression"})
_LINKS = ("callbacks", "errbacks", "chain", "chord")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A task call, whatever protocol it came by."""

    headers: dict[str, Any]
    args: list[Any]
    kwargs: dict[str, Any]
    links: dict[str, Any]


def read_message(raw: bytes, queue: str) -> NewJob:
    """Turn a message into a job; one that cannot be run is a job with an error.

    Raises:
        BrokerError: it does not even say whose answer it asks for.
    """
    envelope = _object(_json(raw), "the message")
    try:
        check_depth(envelope)
    except RowError as err:
        raise BrokerError(err.message) from err
    properties = _object(envelope.get("properties") or {}, "its properties")
    headers = _object(envelope.get("headers") or {}, "its headers")
    if "id" in headers:
        _task_id(headers)
        try:
            call = _read_protocol_2(headers, _body(envelope, properties))
        except _Refused as err:
            return _failed_job(headers, properties, queue, err.error)
    else:
        try:
            call = _read_protocol_1(_body(envelope, properties))
        except _Refused as err:
            raise BrokerError(f"no task id, and {err.error.message}") from err
    return _job(call, properties, queue)


def handler_message(job: ClaimedJob, task_name: str, channel: Any) -> Message:
    """The message by which Celery's task handler learns of a claimed job. ``channel`` gets its ack or reject.

    The job is found by its id: instead of the body goes a description, so that prompts stay out of events,
    logs and inspect replies.
    """
    celery = job.celery or {}
    links = {name: (celery.get("links") or {}).get(name) for name in _LINKS}
    properties = dict(celery.get("properties") or {})
    headers = {
        "lang": "py",
        "retries": 0,
        "timelimit": [None, None],
        "root_id": job.job_id,
        "parent_id": None,
        "group": None,
        "ignore_result": job.celery is None,  # nobody waits for a job that did not come through Celery
        **(celery.get("headers") or {}),
        "id": job.job_id,
        "task": task_name,
        "argsrepr": "()",
        "kwargsrepr": repr(describe(job)),
        "eta": None,
        "expires": None,
    }
    return Message(
        body=json.dumps([[], describe(job), links]).encode(),
        delivery_tag=job.job_id,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"exchange": "", "routing_key": "", "redelivered": job.attempt > 1},
        headers=headers,
        properties={"correlation_id": job.job_id, **properties},
        accept={"application/json"},
        channel=channel,
    )


def request_context(job_id: str, task_name: str, celery: Mapping[str, Any]) -> dict[str, Any]:
    """The request dictionary of Celery's tracer, for a job whose message was handled elsewhere or never."""
    properties = celery.get("properties") or {}
    return {
        "retries": 0,
        "group": None,
        "root_id": job_id,
        "parent_id": None,
        **(celery.get("headers") or {}),
        **{name: (celery.get("links") or {}).get(name) for name in _LINKS},
        "id": job_id,
        "task": task_name,
        "argsrepr": "()",
        "kwargsrepr": "",
        "reply_to": properties.get("reply_to"),
        "correlation_id": properties.get("correlation_id"),
        "delivery_info": {"priority": properties.get("priority"), "redelivered": False},
        "is_eager": False,
    }


def describe(job: ClaimedJob) -> dict[str, Any]:
    """A job for inspect and Flower: what and how long, never the whole prompt, and nothing of a private one."""
    if job.private:
        return {"prompt": "<private>", "max_tokens": job.body.get("max_tokens"), "attempt": job.attempt}
    if job.endpoint is Endpoint.CHAT:
        messages = job.body.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        text = last.get("content") if isinstance(last, dict) else None
    else:
        text = job.body.get("input" if job.endpoint is Endpoint.EMBEDDINGS else "prompt")
    shown = text if isinstance(text, str) else f"<{type(text).__name__}>"
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}... ({len(shown)} characters)"
    return {"prompt": shown, "max_tokens": job.body.get("max_tokens"), "attempt": job.attempt}


class _Refused(Exception):
    """The call cannot be run; its sender is told ``error``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = JobError(code=code, message=message)


def _job(call: _Call, properties: Mapping[str, Any], queue: str) -> NewJob:
    headers = call.headers
    job_id = _task_id(headers)
    error: JobError | None = None
    not_before = deadline = dedup_key = None
    tenant = DEFAULT_TENANT
    endpoint = Endpoint.of(call.kwargs)
    try:
        _check_call(call)
        not_before = _instant("eta", headers.get("eta"))
        deadline = _instant("expires", headers.get("expires"))
        tenant = _tenant(headers, call.kwargs)
        dedup_key = checked_dedup_key(headers.get("dedup_key"))
        parse_body(endpoint, call.kwargs)
    except RowError as err:
        error = JobError(code=err.code, message=err.message)
    except _Refused as err:
        error = err.error
    model = call.kwargs.get("model")
    return NewJob(
        job_id=job_id,
        custom_id=job_id,
        endpoint=endpoint,
        body=call.kwargs,
        queue=queue,
        priority=_priority(properties),
        model=model if isinstance(model, str) else None,
        not_before=not_before,
        deadline=deadline,
        celery=_celery(headers, properties, call.links),
        error=error,
        tenant=tenant,
        dedup_key=dedup_key,
    )


def _failed_job(headers: dict[str, Any], properties: Mapping[str, Any], queue: str, error: JobError) -> NewJob:
    """A job for a call whose body cannot be read: its sender is told why."""
    job_id = _task_id(headers)
    return NewJob(
        job_id=job_id,
        custom_id=job_id,
        endpoint=Endpoint.CHAT,
        body={},
        queue=queue,
        celery=_celery(headers, properties, {}),
        error=error,
    )


def _celery(headers: Mapping[str, Any], properties: Mapping[str, Any], links: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "headers": {name: value for name, value in headers.items() if name not in _DROPPED_HEADERS},
        "properties": {
            name: properties[name] for name in ("reply_to", "correlation_id", "priority") if name in properties
        },
        "links": {name: links[name] for name in _LINKS if links.get(name)},
    }


def _check_call(call: _Call) -> None:
    if call.headers.get("task") != TASK_NAME:
        raise _Refused("unknown_task", f"the task {call.headers.get('task')!r} is not run here, only {TASK_NAME!r} is")
    if call.args:
        raise _Refused(
            "invalid_value", f"{TASK_NAME} takes no positional arguments; give the request body as keyword arguments"
        )
    given = [name for name in ("prompt", "messages", "input") if name in call.kwargs]
    if len(given) > 1:
        raise _Refused("invalid_value", f"{', '.join(given)}: give one of them")
    if not given:
        raise _Refused(
            "missing_field",
            "messages: is missing; give messages for a chat, prompt for a completion, or input for an embedding",
        )


def _read_protocol_2(headers: dict[str, Any], body: Any) -> _Call:
    if not (isinstance(body, list) and len(body) == 3):
        raise _Refused("invalid_value", "the body must be [args, kwargs, links]")
    args, kwargs, links = body
    return _call(headers, args, kwargs, links or {})


def _read_protocol_1(body: Any) -> _Call:
    if not isinstance(body, dict):
        raise _Refused("invalid_value", "the body is not an object")
    names = ("id", "task", "eta", "expires", "retries", "timelimit")
    headers = {name: body[name] for name in names if body.get(name) is not None}
    headers["group"] = body.get("taskset")
    links = {name: body.get(name) for name in _LINKS}
    return _call(headers, body.get("args") or [], body.get("kwargs") or {}, links)


def _call(headers: dict[str, Any], args: Any, kwargs: Any, links: Any) -> _Call:
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not isinstance(links, dict):
        raise _Refused("invalid_type", "args must be a list, kwargs and links objects")
    for part in (headers, args, kwargs, links):
        try:
            check_depth(part)
        except RowError as err:
            raise _Refused(err.code, err.message) from err
    _check_links(links)
    return _Call(headers=headers, args=args, kwargs=kwargs, links=links)


def _check_links(links: Mapping[str, Any]) -> None:
    """Refuse now what Celery could not call when the job has ended."""
    for name in ("callbacks", "errbacks", "chain"):
        signatures = links.get(name) or []
        if not (isinstance(signatures, list) and all(_is_signature(signature) for signature in signatures)):
            raise _Refused("invalid_value", f"{name}: must be a list of task signatures")
    if links.get("chord") is not None and not _is_signature(links["chord"]):
        raise _Refused("invalid_value", "chord: must be a task signature")


def _is_signature(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("task"), str)
        and isinstance(value.get("args", []), list)
        and isinstance(value.get("kwargs", {}), dict)
        and isinstance(value.get("options", {}), dict)
    )


def _task_id(headers: Mapping[str, Any]) -> str:
    task_id = headers.get("id")
    if not isinstance(task_id, str) or not 0 < len(task_id) <= _MAX_ID_CHARS:
        raise BrokerError(f"the task id must be a string of 1 to {_MAX_ID_CHARS} characters")
    return task_id


def _priority(properties: Mapping[str, Any]) -> int:
    """Celery's 0 to 9 as it is: on Redis as in SQL the smaller number runs earlier."""
    priority = properties.get("priority")
    return min(9, max(0, int(priority))) if isinstance(priority, int) else 0


def _tenant(headers: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """The header ``tenant`` (apply_async's ``headers``), else ``tenant`` in the body's metadata, else the default."""
    metadata = body.get("metadata")
    value = headers.get("tenant")
    if value is None and isinstance(metadata, dict):
        value = metadata.get("tenant")
    if value is None:
        return DEFAULT_TENANT
    if not isinstance(value, str):
        raise _Refused("invalid_type", f"tenant: must be text, got {type(value).__name__}")
    try:
        return tenant_name(value)
    except ValueError as err:
        raise _Refused("invalid_value", f"tenant: {err}"[:200]) from err


def _instant(name: str, value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        instant = datetime.fromisoformat(value)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):  # in UTC it may lie before the year 1, or after 9999
        raise _Refused("invalid_value", f"{name}: must be an ISO 8601 time, got {value!r}"[:200]) from None


def _body(envelope: Mapping[str, Any], properties: Mapping[str, Any]) -> Any:
    content_type = envelope.get("content-type")
    if content_type != "application/json":
        raise _Refused("invalid_value", f"the content type must be application/json, got {content_type!r}"[:200])
    body = envelope.get("body")
    if not isinstance(body, str):
        raise _Refused("invalid_type", "the body must be a string")
    if len(body) > MAX_BODY_BYTES:
        raise _Refused("invalid_value", f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    data = body.encode("utf-8", "surrogatepass")
    if properties.get("body_encoding") == "base64":
        try:
            data = base64.b64decode(data, validate=True)
        except binascii.Error as err:
            raise _Refused("invalid_value", f"the body is not base64: {err}") from err
    compression = (envelope.get("headers") or {}).get("compression")
    if compression:
        try:
            data = unpacked(data, compression, most=MAX_BODY_BYTES)
        except ValueError as err:
            raise _Refused("invalid_value", f"the body: {err}") from err
    try:
        return _json(data)
    except BrokerError as err:
        raise _Refused("invalid_json", f"the body: {err}") from err


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=distinct_members)
    except (ValueError, RecursionError) as err:
        raise BrokerError(f"not valid JSON: {err}") from err


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BrokerError(f"{what} is not a JSON object")
    return value
