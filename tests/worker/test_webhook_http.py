"""Where a webhook may go: public addresses, by http or verified https, never by a detour."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from kvq.worker.errors import WebhookRefused, WebhookUndelivered
from kvq.worker.webhook_http import parse_target, post, refused_reason
from tests.receivers import receiver
from tests.tls import certificate


def at(*addresses: str) -> Any:
    """A resolver that finds every name at these addresses."""

    def resolve(_host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return resolve


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::a00:1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2002:7f00:1::",
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert refused_reason(ipaddress.ip_address(address)) is not None


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822", "::ffff:8.8.8.8"])
def test_a_public_address_is_called(address: str) -> None:
    assert refused_reason(ipaddress.ip_address(address)) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
def test_every_spelling_of_this_machine_is_refused_before_anything_is_sent(host: str) -> None:
    with receiver() as hook:
        with pytest.raises((WebhookRefused, WebhookUndelivered)):
            post(f"http://{host}:{hook.port}/", b"{}", {})
        assert hook.received == []


def test_one_private_address_among_public_ones_refuses_the_name() -> None:
    with pytest.raises(WebhookRefused, match=r"10\.0\.0\.7, a private or reserved .* webhook_allow_private"):
        post("http://host.test/", b"{}", {}, resolve=at("93.184.216.34", "10.0.0.7"))


def test_the_connection_goes_to_the_address_that_was_checked_and_the_name_is_asked_for_once() -> None:
    asked = []
    with receiver() as hook:

        def resolve(host: str, port: int, **_: Any) -> list[Any]:
            asked.append(host)
            return at("127.0.0.1")(host, port)  # type: ignore[no-any-return]

        status = post(
            f"http://rebinding.test:{hook.port}/a?b=c", b"{}", {"x-a": "b"}, allow_private=True, resolve=resolve
        )
        assert status == 200
        assert asked == ["rebinding.test"]
        (got,) = hook.received
        assert (got.path, got.headers["host"], got.headers["x-a"]) == (
            "/a?b=c",
            f"rebinding.test:{hook.port}",
            "b",
        )


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_answer_and_not_followed_to_wherever(status: int) -> None:
    with receiver([status]) as hook, receiver() as inside:
        hook.location = inside.url
        assert post(hook.url, b"{}", {}, allow_private=True) == status
        assert [got.path for got in hook.received] == ["/hook"]
        assert inside.received == []


def test_a_name_whose_second_answer_is_private_is_never_asked_a_second_time() -> None:
    answers = [at("127.0.0.1"), at("127.0.0.2")]  # two addresses of this machine, the second stands for any other
    with receiver() as hook, socket.create_server(("127.0.0.2", hook.port)) as rebound:
        rebound.setblocking(False)

        def resolve(host: str, port: int, **_: Any) -> list[Any]:
            return answers.pop(0)(host, port)  # type: ignore[no-any-return]

        assert post(f"http://rebinding.test:{hook.port}/", b"{}", {}, allow_private=True, resolve=resolve) == 200
        assert len(hook.received) == len(answers) == 1
        with pytest.raises(BlockingIOError):
            rebound.accept()


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with receiver() as hook:
        assert post(hook.url, b"{}", {}, allow_private=True) == 200


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/", "https:// or http://"),
        ("file:///etc/passwd", "https:// or http://"),
        ("host/hook", "https:// or http://"),
        ("http://", "no host"),
        ("http://host:0/", "no host"),
        ("http://host:99999/", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("http://me:secret@host/", "user name or password"),
        ("http://host/a b", "ASCII"),
        ("http://host/\r\nx: y", "ASCII"),
        ("http://höst/", "ASCII"),
        ("http://host/" + "a" * 2048, "longer than"),
    ],
)
def test_a_url_that_may_not_be_called_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(WebhookRefused, match=reason) as caught:
        parse_target(url)
    assert str(caught.value).startswith("webhook: ")
    assert "secret" not in str(caught.value)


def test_nobody_there_and_no_such_host_say_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(WebhookUndelivered, match=r"127\.0\.0\.1: .*refused"):
            post(f"http://127.0.0.1:{taken.getsockname()[1]}/", b"{}", {}, allow_private=True)
    with pytest.raises(WebhookUndelivered, match="cannot find the host"):
        post("http://no-such-host.invalid/", b"{}", {})


def test_a_receiver_that_drips_for_ever_is_left_at_the_deadline() -> None:
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 200 OK\r\nx-a: ")
            while not ended.wait(0.02):
                try:
                    peer.sendall(b"a")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        try:
            with pytest.raises(WebhookUndelivered, match=r"no whole answer within 0\.3 s"):
                post(
                    f"http://127.0.0.1:{server.getsockname()[1]}/",
                    b"{}",
                    {},
                    allow_private=True,
                    total_timeout_s=0.3,
                )
        finally:
            ended.set()
            thread.join()


def test_https_is_verified_by_authority_and_by_name(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "hook.test")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(pem)
    trusting = ssl.create_default_context(cafile=str(pem))
    with receiver(trust=serving) as hook:

        def call(host: str, trust: ssl.SSLContext | None) -> int:
            url = f"https://{host}:{hook.port}/"
            return post(url, b"{}", {}, allow_private=True, resolve=at("127.0.0.1"), trust=trust)

        assert call("hook.test", trusting) == 200
        with pytest.raises(WebhookUndelivered, match=r"the certificate of hook\.test is not trusted"):
            call("hook.test", None)
        with pytest.raises(WebhookUndelivered, match=r"the certificate of other\.test is not trusted"):
            call("other.test", trusting)
        assert len(hook.received) == 1
