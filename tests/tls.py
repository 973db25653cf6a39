"""Certificates, and a door that speaks TLS before a server that does not.

The servers that come in wheels are built without TLS. A ``TlsDoor`` ends it as a proxy in front of a database does:
certificates and names are checked by the client under test, over real sockets. PostgreSQL's clients ask for TLS in its
own words first; those are answered here too.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# PostgreSQL's protocol, "SSLRequest" and "GSSENCRequest": their length (8) and their codes.
_SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
_GSS_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x30"


def certificate(folder: Path, host: str, name: str = "certificate") -> Path:
    """A certificate for ``host`` that signs itself, with its key, as PEM: it is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path


class TlsDoor:
    """Listens with TLS on a free port of this machine, and passes on what it hears in plain.

    Args:
        pem: the certificate and its key.
        behind: the address of the server, or its Unix socket.
        of_postgres: the client says in PostgreSQL's protocol that it wants TLS, before it begins.

    ``num_trusting`` counts the connections whose client, having seen the certificate, began to speak.
    """

    def __init__(self, pem: Path, behind: tuple[str, int] | Path, *, of_postgres: bool = False) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(pem)
        self._behind = behind
        self._of_postgres = of_postgres
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.num_trusting = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            sockets = [self._server, *self._open]
        for each in sockets:
            with contextlib.suppress(OSError):  # closed meanwhile
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:  # shut down
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            self._hold(stack, peer)
            try:
                if self._of_postgres:
                    _answer_ssl_request(peer)
                secured = self._context.wrap_socket(peer, server_side=True)
            except OSError:  # the client does not trust the certificate, or goes
                return
            self._hold(stack, secured)
            try:
                # A client that finds fault with the certificate after the handshake says nothing.
                first = secured.recv(65536)
                if not first:
                    return
                with self._lock:
                    self.num_trusting += 1
                server = self._hold(stack, self._connect())
                server.sendall(first)
            except OSError:  # the client goes, or the server is away: so is its door
                return
            back = threading.Thread(target=_pass_on, args=(server, secured), daemon=True)
            back.start()
            _pass_on(secured, server)
            back.join()

    def _connect(self) -> socket.socket:
        if isinstance(self._behind, tuple):
            return socket.create_connection(self._behind)
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(self._behind))
        return server

    def _hold(self, stack: contextlib.ExitStack, opened: socket.socket) -> socket.socket:
        with self._lock:
            self._open.add(opened)
        stack.callback(opened.close)
        stack.callback(self._open.discard, opened)
        return opened


def _answer_ssl_request(peer: socket.socket) -> None:
    while (request := peer.recv(8, socket.MSG_WAITALL)) == _GSS_REQUEST:
        peer.sendall(b"N")
    if request != _SSL_REQUEST:
        raise ConnectionError("it does not want TLS")
    peer.sendall(b"S")


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until either end closes; then the other learns of it."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
