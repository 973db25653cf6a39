"""A receiver of webhooks: a real HTTP server that answers as it is told and keeps what it got."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One POST."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.body)
        return event

    def is_signed_with(self, key: bytes) -> bool:
        """Verify as the specification's own libraries do: any one of the signatures will do."""
        signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode() + self.body
        wanted = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        return f"v1,{wanted}" in self.headers["webhook-signature"].split(" ")


class Receiver:
    """Listens on a free port of this machine.

    Args:
        answers: the status of each request in turn; 200 once they are used up.
        trust: makes it speak TLS.
    """

    def __init__(self, answers: Sequence[int] = (), trust: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self.answers = list(answers)
        self.location = "/elsewhere"
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        if trust is not None:
            self._server.socket = trust.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                # Before it is answered, since the test looks as soon as it is.
                receiver.received.append(Received(path=self.path, headers=headers, body=body))
                status = receiver.answers.pop(0) if receiver.answers else 200
                self.send_response(status)
                if status in (301, 302, 303, 307, 308):
                    self.send_header("location", receiver.location)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def receiver(answers: Sequence[int] = (), trust: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver for the length of a block."""
    opened = Receiver(answers, trust)
    try:
        yield opened
    finally:
        opened.close()
