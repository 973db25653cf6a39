"""One POST to a receiver's URL, to a public address only.

Owns what a webhook's URL may look like, which addresses may be connected to, and the connection: made to an address
that was checked, never to a name, so that a second answer of the DNS cannot change where it goes. Redirects are not
followed, proxies not used. Knows no SQL and no events.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvq.worker.errors import WebhookRefused, WebhookUndelivered

MAX_URL_CHARS = 2048
CONNECT_TIMEOUT_S = 10.0
TOTAL_TIMEOUT_S = 30.0

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[..., list[Any]]

# Public by number, and yet the host's own services: Azure's.
_CLOUD_SERVICES = frozenset({ipaddress.ip_address("168.63.129.16")})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A webhook's URL, taken apart. ``path`` includes the parameters."""

    secure: bool
    host: str
    port: int
    path: str


def parse_target(url: str) -> Target:
    """Take a URL apart.

    Raises:
        WebhookRefused: it is none that may be called.
    """
    if len(url) > MAX_URL_CHARS:
        raise WebhookRefused(f"the URL is longer than {MAX_URL_CHARS} characters")
    if not all("!" <= char <= "~" for char in url):
        raise WebhookRefused(
            "the URL may hold printable ASCII only: write other characters percent-encoded, a name in punycode"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as err:
        raise WebhookRefused(f"this is not a URL: {err}") from err
    if parts.scheme not in ("http", "https"):
        raise WebhookRefused("the URL must begin with https:// or http://")
    if not parts.hostname or port == 0:
        raise WebhookRefused("the URL names no host, or port 0")
    if parts.username is not None or parts.password is not None:
        raise WebhookRefused("the URL must not hold a user name or password: the receiver verifies the signature")
    secure = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(secure=secure, host=parts.hostname, port=port or (443 if secure else 80), path=path)


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    allow_private: bool = False,
    resolve: Resolve = socket.getaddrinfo,
    trust: ssl.SSLContext | None = None,
    total_timeout_s: float = TOTAL_TIMEOUT_S,
) -> int:
    """POST ``body``; the HTTP status of the answer, whose body is not read.

    Args:
        allow_private: connect to any address; else to public ones only.
        trust: how https is verified; by default against the system's authorities.
        total_timeout_s: seconds from the connection to the last header of the answer.

    Raises:
        WebhookRefused: the URL, or an address of its host, may not be called.
        WebhookUndelivered: nobody answered, or not in HTTP, or not in time.
    """
    target = parse_target(url)
    address = _checked_address(target, resolve, allow_private=allow_private)
    connection = _Connection(target, address, trust or ssl.create_default_context())
    try:
        with _deadline(connection, total_timeout_s):
            connection.request("POST", target.path, body=body, headers=dict(headers))
            return connection.getresponse().status
    except ssl.SSLCertVerificationError as err:
        raise WebhookUndelivered(f"the certificate of {target.host} is not trusted: {err.verify_message}") from err
    except (OSError, http.client.HTTPException, ValueError) as err:
        raise WebhookUndelivered(f"{target.host}: {str(err) or type(err).__name__}") from err
    finally:
        connection.close()


def refused_reason(address: Address) -> str | None:
    """Why an address may not be called; None for one anywhere on the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return refused_reason(inner)
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.is_multicast:
        return "multicast"
    if address in _CLOUD_SERVICES:
        return "cloud service"
    if address.is_reserved or not address.is_global or (address.version == 6 and address.is_site_local):
        return "private or reserved"
    return None


def _checked_address(target: Target, resolve: Resolve, *, allow_private: bool) -> tuple[int, Any]:
    """The socket family and address to connect to. One bad address among several refuses them all."""
    try:
        found = resolve(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        raise WebhookUndelivered(f"cannot find the host {target.host}: {err}") from err
    for _family, _type, _protocol, _name, where in found:
        reason = refused_reason(ipaddress.ip_address(where[0]))
        if reason is not None and not allow_private:
            raise WebhookRefused(
                f"{target.host} is at {where[0]}, a {reason} address, which is not called unless "
                "webhook_allow_private is set where the worker runs"
            )
    if not found:
        raise WebhookUndelivered(f"the host {target.host} has no address")
    family, _type, _protocol, _name, where = found[0]
    return family, where


class _Connection(http.client.HTTPConnection):
    """To one address; the name is for the Host header and the certificate."""

    def __init__(self, target: Target, address: tuple[int, Any], trust: ssl.SSLContext) -> None:
        super().__init__(target.host, target.port, timeout=CONNECT_TIMEOUT_S)
        self.default_port = 443 if target.secure else 80
        self._target = target
        self._address = address
        self._trust = trust

    def connect(self) -> None:
        family, where = self._address
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(where)
        if self._target.secure:
            self.sock = self._trust.wrap_socket(self.sock, server_hostname=self._target.host)

    def abandon(self) -> None:
        """Make whatever waits on the socket fail now. Any thread."""
        with contextlib.suppress(OSError, AttributeError):  # not connected yet, or closed meanwhile
            self.sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _deadline(connection: _Connection, timeout_s: float) -> Iterator[None]:
    """A socket's timeout is for one read; a receiver that sends a byte now and then would hold us for ever."""
    late = threading.Event()

    def abandon() -> None:
        late.set()
        connection.abandon()

    timer = threading.Timer(timeout_s, abandon)
    timer.daemon = True
    timer.start()
    cause: Exception | None = None
    try:
        yield
    except (OSError, http.client.HTTPException) as err:
        if not late.is_set():
            raise
        cause = err
    finally:
        timer.cancel()
    if late.is_set():  # headers that were cut off look like headers that have ended
        raise WebhookUndelivered(f"no whole answer within {timeout_s:g} s") from cause
