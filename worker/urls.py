"""URLs of brokers and databases: what may be shown of them, and what they leave open.

Knows no settings and connects to nothing. Invariant: a ``rediss://`` URL says how the server's certificate is verified
before any client reads it, since they differ in what they take silence for: redis-py verifies, kombu does not, and
Celery's result backend refuses.
"""

from __future__ import annotations

import inspect
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from kvq.worker.errors import SettingsError

SOCKET_SCHEMES = frozenset({"unix", "redis+socket"})
REDIS_SCHEMES = frozenset({"redis", "rediss"}) | SOCKET_SCHEMES
AMQP_SCHEMES = frozenset({"amqp", "amqps"})
_SECRET_PARAMETER = re.compile(r"([?&]\w*pass(?:word|wd|file)?=)[^&]*", re.IGNORECASE)
_SECRET_OF_USER = re.compile(r"(?<=://)([^:/?#@]*):.*@", re.DOTALL)
# Of a URL whose scheme, or its colon or slashes, were forgotten.
_SECRET_OF_SOMEBODY = re.compile(r"\A((?:[\w+]*//)?[^:/?#@]*):.*@", re.DOTALL)
_VERIFICATION = re.compile(r"(?<=[?&]ssl_cert_reqs=)[^&]*")
_VERIFICATIONS = ("required", "optional", "none")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def masked(value: str) -> str:
    """A URL without its passwords, which may also be among its parameters.

    It need not be a valid one: a password whose special characters were not escaped is hidden all the same.
    """
    of_user = _SECRET_OF_USER if "://" in value else _SECRET_OF_SOMEBODY
    return _SECRET_PARAMETER.sub(r"\1***", of_user.sub(r"\1:***@", value))


def for_psql(url: str) -> str:
    """The URL of a database as psql takes it, which asks for the password that is left out."""
    plain = _SECRET_OF_USER.sub(r"\1@", re.sub(r"\A\w+(\+\w+)?(?=://)", "postgresql", url))
    return masked(plain)


def is_half_a_url(value: str) -> bool:
    """True for ``user:password@host`` or ``postgresql//user:password@host``, which as a file's name nobody means."""
    return "://" not in value and _SECRET_OF_SOMEBODY.match(value) is not None


def is_redis(url: str) -> bool:
    """False for the URL of another broker, which has neither our doorbell nor our lists."""
    return scheme_of(url) in REDIS_SCHEMES


def scheme_of(url: str) -> str | None:
    """None where a URL cannot be read, which an unescaped character of its password may bring about."""
    if "://" not in url:
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts.scheme


def verified(setting: str, url: str, *, source: str | None = None) -> str:
    """The URL; one with ``rediss://`` says how the certificate is verified, in the spelling every client reads.

    That of a socket is as redis-py spells it: ``unix:///run/redis.sock?db=0``. See ``celery_url``.
    Without ``ssl_cert_reqs`` it is ``required``: by authority (``ssl_ca_certs``, or the system's) and by name.

    Raises:
        SettingsError: a parameter is unknown or has a value that is none, or a file that it names is not there.
    """
    if not is_redis(url):
        return url
    if scheme_of(url) in SOCKET_SCHEMES:
        url = _socket_url(setting, url, source)
    params = dict(parse_qsl(urlsplit(url).query))
    _check_parameters(setting, url, params, source)
    if scheme_of(url) != "rediss":
        return url
    for name in _FILES:
        if name in params and not Path(params[name]).is_file():
            raise SettingsError(setting, f"{name} names {params[name]}, and there is no such file", source=source)
    if (given := params.get("ssl_cert_reqs")) is None:
        return url + ("&" if urlsplit(url).query else "?") + "ssl_cert_reqs=required"
    wanted = given.removeprefix("CERT_").lower()  # CERT_REQUIRED is how Celery documents it
    if wanted not in _VERIFICATIONS:
        raise SettingsError(setting, f"ssl_cert_reqs must be {', '.join(_VERIFICATIONS)}, got {given!r}", source=source)
    return _VERIFICATION.sub(wanted, url)


def celery_url(url: str) -> str:
    """The URL as Celery spells it, which knows a Redis socket as ``redis+socket:///run/redis.sock?virtual_host=0``."""
    if scheme_of(url) != "unix":
        return url
    import redis

    found = redis.connection.parse_url(url)
    user, password = (quote(found.get(name, ""), safe="") for name in ("username", "password"))
    who = f"{user}:{password}@" if password else ""
    return f"redis+socket://{who}{quote(found['path'])}?virtual_host={found.get('db', 0)}"


def amqp_tls(url: str) -> tuple[str, dict[str, Any] | None]:
    """What kombu is to be given for a broker: its URL, and for an ``amqps://`` one how its certificate is verified.

    By authority (``ssl_ca_certs``, else the system's) and by name: left to itself kombu does not look at the name.
    """
    if scheme_of(url) != "amqps":
        return url, None
    parts = urlsplit(url)
    params = parse_qsl(parts.query)
    files = {name.removeprefix("ssl_"): value for name, value in params if name in _FILES}
    rest = urlencode([(name, value) for name, value in params if not name.startswith("ssl_")])
    options = {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": parts.hostname, **files}
    return urlunsplit(parts._replace(query=rest)), options


def _socket_url(setting: str, url: str, source: str | None) -> str:
    """As redis-py spells it."""
    parts = urlsplit(url)
    if parts.hostname or not parts.path.strip("/"):
        raise SettingsError(
            setting,
            f"three slashes begin the path of a socket: unix:///run/redis.sock, got {masked(url)!r}",
            source=source,
        )
    params = [("db" if name == "virtual_host" else name, value) for name, value in parse_qsl(parts.query)]
    return f"unix://{parts.netloc}{parts.path}" + (f"?{urlencode(params)}" if params else "")


def _check_parameters(setting: str, url: str, params: Mapping[str, str], source: str | None) -> None:
    """What redis-py would only find wrong when it connects, and then not as an error of the connection."""
    import redis

    known = {
        name
        for kind in (*redis.SSLConnection.__mro__, redis.ConnectionPool)
        for name in inspect.signature(kind.__init__).parameters
    }
    if unknown := sorted(set(params) - known):
        raise SettingsError(
            setting, f"the URL has parameters that Redis's client does not know: {unknown}", source=source
        )
    try:
        redis.connection.parse_url(url)
    except ValueError as err:
        raise SettingsError(setting, f"this is no URL of Redis: {err}", source=source) from err
