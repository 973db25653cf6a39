"""What is kept of prompts and answers: forgotten when a job has ended, encrypted until then, or both, or neither.

Owns the keys, the form of an encrypted value, and what of a record is changed before it is stored and after it was
read. Knows no SQL: which statements forget is store_privacy's. Invariants: an encrypted value is bound to its job and
column, so that it cannot be moved to another; a value that cannot be decrypted is never taken for an empty one.
Cipher: AES-256-GCM (NIST SP 800-38D) with a random 96-bit nonce; a key is good for 2^32 values (section 8.3).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.worker.errors import SettingsError, ValueUnreadable
from kvq.worker.jobs import JobError, JobOutcome, NewJob
from kvq.worker.store_rows import clean_text, json_text

if TYPE_CHECKING:
    from kvq.worker.config import Settings

KEY_BYTES = 32
_NONCE_BYTES = 12
_MARK = "kvq_encrypted"
_TOKEN = re.compile(r"kvq1\.([0-9a-f]{8})\.([A-Za-z0-9_-]+)")
_GENERATE = "`openssl rand -base64 32` writes one"
# Fields of a body that ask for the prompt to be part of the answer.
_ECHOING = ("echo", "prompt_logprobs")
# A run of so many characters that an error's message shares with the prompt is taken for a quotation.
_QUOTED_CHARS = 8
_ELISION = "..."


class Keyring:
    """Keys by id: the first encrypts, all of them decrypt.

    Args:
        keys: of 32 bytes each, at least one.

    Raises:
        SettingsError: the package ``cryptography`` is not installed.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as err:
            raise SettingsError(
                "encryption_key", "needs the package cryptography: pip install 'kvq[encryption]'"
            ) from err
        assert keys
        assert all(len(key) == KEY_BYTES for key in keys)
        self._invalid = InvalidTag
        self._cipher_by_id = {key_id(key): AESGCM(key) for key in keys}
        self._first_id = key_id(keys[0])
        self._blind_key = hmac.digest(keys[0], b"kvq request keys", "sha256")

    def seal(self, text: str, *, place: str) -> str:
        """Encrypt; ``place`` must be the same when it is opened."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher_by_id[self._first_id].encrypt(
            nonce, text.encode("utf-8", "surrogatepass"), place.encode()
        )
        return f"kvq1.{self._first_id}.{base64.urlsafe_b64encode(nonce + sealed).decode().rstrip('=')}"

    def open(self, token: str, *, place: str) -> str:
        """Decrypt what ``seal`` made.

        Raises:
            ValueUnreadable: by another key, or of another place, or damaged.
        """
        match = _TOKEN.fullmatch(token)
        cipher = self._cipher_by_id.get(match[1]) if match else None
        if match is None or cipher is None:
            raise unreadable(token, place, len(self._cipher_by_id))
        raw = base64.urlsafe_b64decode(match[2] + "=" * (-len(match[2]) % 4))
        try:
            plain: bytes = cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], place.encode())
        except (self._invalid, ValueError) as err:
            raise ValueUnreadable(f"what is stored as {place} was changed since it was encrypted") from err
        return plain.decode("utf-8", "surrogatepass")

    def blind(self, value: str) -> str:
        """The same for the same value under these keys, and no help in guessing it without them."""
        return hmac.new(self._blind_key, value.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Privacy:
    """What one process keeps, and by which keys it reads.

    Args:
        keyring: encrypts bodies, answers and Celery headers; None stores them as they are.
        forget_prompts: prompts are gone from the database once their job has ended.
        forget_answers: answers are never stored, or only until their Celery sender has them.
        unreadable_seqs: of waiting jobs that this process found it cannot read; they wait for another.
    """

    keyring: Keyring | None = None
    forget_prompts: bool = False
    forget_answers: bool = False
    unreadable_seqs: set[int] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def from_settings(cls, settings: Settings) -> Privacy:
        """As configured.

        Raises:
            SettingsError: a key is none, the file of keys cannot be read, or the package is missing.
        """
        keys = parse_keys(settings.encryption_key, settings.encryption_key_file)
        return cls(
            keyring=Keyring(keys) if keys else None,
            forget_prompts=not settings.store_prompts,
            forget_answers=not settings.store_outputs,
        )

    @property
    def hides_prompts(self) -> bool:
        """True when nothing but the encrypted body itself may hold a prompt: no message of an error, no event."""
        return self.forget_prompts or self.keyring is not None

    # -- what goes in ------------------------------------------------------------------------------------

    def seal_job(self, job: NewJob) -> NewJob:
        """A job as it is to be inserted."""
        if not self.hides_prompts:
            return job
        error = job.error
        if error is not None:
            error = JobError(code=error.code, message=without_quotations(error.message, job.body))
        return replace(
            job,
            body=self.seal_json(self.runnable(job.body), job.job_id, "body"),
            celery=None if job.celery is None else self.seal_json(job.celery, job.job_id, "celery"),
            error=error,
        )

    def seal_outcome(self, outcome: JobOutcome) -> JobOutcome:
        """The end of a job as it is to be stored."""
        if not self.hides_prompts:
            return outcome
        text, response = outcome.text, outcome.response
        if self.keyring is not None and text is not None:
            text = self.keyring.seal(text, place=_place(outcome.job_id, "text"))
        return replace(
            outcome,
            text=text,
            response=None if response is None else self.seal_json(response, outcome.job_id, "response"),
            request_key=None if outcome.request_key is None else self.blind(outcome.request_key),
        )

    def seal_json(self, value: Mapping[str, Any], job_id: str, column: str) -> dict[str, Any]:
        """The value, or an object that holds it encrypted."""
        if self.keyring is None:
            return dict(value)
        return {_MARK: self.keyring.seal(json_text(dict(value)), place=_place(job_id, column))}

    def blind(self, request_key: str) -> str | None:
        """A request key as it is stored: it follows from the prompt, which could be guessed by it."""
        if self.forget_prompts:
            return None
        return request_key if self.keyring is None else self.keyring.blind(request_key)

    # -- what comes out ----------------------------------------------------------------------------------

    def open_json(self, value: Any, job_id: str, column: str) -> Any:
        """What ``seal_json`` was given; a value that is not encrypted comes as it is.

        Raises:
            ValueUnreadable: it is encrypted, and not for us.
        """
        token = sealed_token(value)
        return value if token is None else json.loads(self._open(token, _place(job_id, column)))

    def open_text(self, text: str | None, response: Any, job_id: str) -> str | None:
        """The text of an answer, which is encrypted where the response beside it (as stored) is.

        Raises:
            ValueUnreadable: it is encrypted, and not for us.
        """
        if text is None or sealed_token(response) is None:
            return text
        return self._open(text, _place(job_id, "text"))

    def open_body(self, value: Any, job_id: str) -> dict[str, Any]:
        """The body of a job that is to be run here, without what may not be answered here.

        Raises:
            ValueUnreadable: it is encrypted, and not for us.
        """
        body: dict[str, Any] = self.open_json(value, job_id, "body")
        return self.runnable(body)

    def runnable(self, body: dict[str, Any]) -> dict[str, Any]:
        """A body that does not ask for the prompt in the answer, where prompts are forgotten."""
        if not self.forget_prompts or not any(name in body for name in _ECHOING):
            return body
        return {name: value for name, value in body.items() if name not in _ECHOING}

    def _open(self, token: str, place: str) -> str:
        if self.keyring is None:
            raise unreadable(token, place, 0)
        return self.keyring.open(token, place=place)


def sealed_token(value: Any) -> str | None:
    """The encrypted value in what was read from a JSON column; None where it is plain."""
    if not (isinstance(value, dict) and len(value) == 1):
        return None
    token = value.get(_MARK)
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else None


def unreadable(token: str, place: str, num_keys: int) -> ValueUnreadable:
    """The error for a value of a key that is not there."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        return ValueUnreadable(f"what is stored as {place} is no encrypted value of ours")
    have = "encryption_key is not set here" if not num_keys else "encryption_key (or its file) does not hold that key"
    return ValueUnreadable(f"{place} is encrypted with the key {match[1]}, and {have}")


def key_id(key: bytes) -> str:
    """Tells keys apart without telling them."""
    return hmac.digest(key, b"kvq key id", "sha256")[:4].hex()


def parse_keys(text: str | None, path: str | None) -> tuple[bytes, ...]:
    """The keys of ``encryption_key`` and of the lines of ``encryption_key_file``, in this order.

    Raises:
        SettingsError: naming the setting, never a key.
    """
    keys = [_key(word, "encryption_key") for word in (text or "").replace(",", " ").split()]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as err:
            reason = err.strerror if isinstance(err, OSError) else "is not ASCII text"
            raise SettingsError("encryption_key_file", f"cannot read {path}: {reason}") from None
        words = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not words:
            raise SettingsError("encryption_key_file", f"{path} holds no key; {_GENERATE}")
        keys += [_key(word, "encryption_key_file") for word in words]
    return tuple(dict.fromkeys(keys))


def _key(word: str, setting: str) -> bytes:
    try:
        key = base64.b64decode(word.replace("-", "+").replace("_", "/"), validate=True)
    except ValueError:  # no base64, or not even ASCII
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(setting, f"each key must be {KEY_BYTES} bytes in base64; {_GENERATE}")
    return key


def without_quotations(message: str, body: Any) -> str:
    """An error's message without what it quotes of a body: long runs of it, and short values in quotation marks."""
    quoted = bytearray(len(message))
    for text in _texts(body):
        spellings = {text, repr(text)[1:-1], json.dumps(text)[1:-1]}
        if len(text) < _QUOTED_CHARS:
            marks = [f"{mark}{spelling}{mark}" for spelling in spellings for mark in "'\"" if spelling]
            for mark in marks:
                _cover(quoted, message, mark)
            continue
        for spelling in spellings:
            for start in range(len(message) - _QUOTED_CHARS + 1):
                if message[start : start + _QUOTED_CHARS] in spelling:
                    quoted[start : start + _QUOTED_CHARS] = b"\1" * _QUOTED_CHARS
    pieces = re.finditer(rb"\x00+|\x01+", bytes(quoted))
    return "".join(_ELISION if quoted[p.start()] else message[p.start() : p.end()] for p in pieces)


def _cover(quoted: bytearray, message: str, part: str) -> None:
    start = message.find(part)
    while start >= 0:
        quoted[start : start + len(part)] = b"\1" * len(part)
        start = message.find(part, start + 1)


def _texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value; names of fields are ours or wrong, and told."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _place(job_id: str, column: str) -> str:
    return f"the {column} of job {clean_text(job_id)}"
