"""Webhooks: tells a receiver that a batch has ended, signed, at least once.

Owns the event, its signature (Standard Webhooks 1.0.0: https://www.standardwebhooks.com) and the thread of a worker
that delivers. Which events there are and when each is due is the store's; how they travel is webhook_http's.
Invariants: a try is counted before it is made; an event is delivered only once a 2xx answer is on record, so a
worker that dies in between leaves it to be sent again, under the same id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

import kvq
from kvq.worker.errors import SettingsError, StoreError, WebhookRefused, WebhookUndelivered
from kvq.worker.failpoints import Failpoints
from kvq.worker.outage import Outage
from kvq.worker.store_records import BatchEvent, BatchProgress, WebhookDelivery
from kvq.worker.webhook_http import TOTAL_TIMEOUT_S, post

if TYPE_CHECKING:
    from kvq.worker.store import Store

logger = logging.getLogger(__name__)

_PREFIX = "whsec_"
_POLL_S = 2.0
# As many commits as come meanwhile are looked at together.
_GATHER_S = 1.0
_ERROR_PAUSE_S = 1.0
# Longer than any try can take, the search for the host's address included.
HOLD_S = 4 * TOTAL_TIMEOUT_S
_GONE = 410
_NO_SECRET = "no worker can sign it: webhook_secret is not set where the worker runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    """How events are sent.

    Args:
        keys: every one of them signs, so that a secret can be replaced without a gap; none: nothing is sent.
        allow_private: whether receivers may be at private addresses.
    """

    keys: tuple[bytes, ...] = ()
    allow_private: bool = False


def signing_keys(secret: str | None) -> tuple[bytes, ...]:
    """The keys of the setting ``webhook_secret``: several, with spaces between, where each begins with ``whsec_``.

    Base64 follows ``whsec_``, as the specification has it. The bytes of any other text are one key, spaces included.

    Raises:
        SettingsError: what follows ``whsec_`` is no base64.
    """
    if not secret:
        return ()
    words = secret.split()
    if not all(word.startswith(_PREFIX) for word in words):
        return (secret.encode(),)
    return tuple(_key(word) for word in words)


def _key(word: str) -> bytes:
    try:
        key = base64.b64decode(word.removeprefix(_PREFIX), validate=True)
    except ValueError:  # no base64, or not even ASCII
        key = b""
    if not key:
        raise SettingsError("webhook_secret", "must be base64 after whsec_, as `openssl rand -base64 32` writes it")
    return key


def sign(key: bytes, event_id: str, timestamp: int, payload: bytes) -> str:
    """``v1,`` and the base64 of HMAC-SHA256 over ``id.timestamp.payload``."""
    digest = hmac.new(key, f"{event_id}.{timestamp}.".encode() + payload, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def headers_of(keys: Sequence[bytes], event_id: str, timestamp: int, payload: bytes) -> dict[str, str]:
    """The headers of one try. ``timestamp`` is the try's, in seconds, so that old ones can be refused as replays."""
    return {
        "content-type": "application/json",
        "user-agent": f"kvq/{kvq.__version__}",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(sign(key, event_id, timestamp, payload) for key in keys),
    }


def event_of(progress: BatchProgress) -> BatchEvent:
    """The event of a batch that has ended: its type, and its counters as ``kvq status --json`` has them."""
    event_id = f"msg_{uuid4().hex}"
    data = {field.name: _plain(getattr(progress, field.name)) for field in fields(progress)}
    payload = {
        "id": event_id,
        "type": event_type(progress),
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "data": {"id": progress.batch_id, **data},
    }
    return BatchEvent(id=event_id, payload=json.dumps(payload, separators=(",", ":")))


def event_type(progress: BatchProgress) -> str:
    """Why it is over: rows were cancelled, or expired; none succeeded; or else it is simply completed."""
    if progress.cancelled:
        return "batch.cancelled"
    if progress.expired:
        return "batch.expired"
    if progress.total and not progress.succeeded:
        return "batch.failed"
    return "batch.completed"


def _plain(value: object) -> object:
    return value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value


class WebhookSender:
    """Writes down the events of ended batches and delivers them, on a thread of its own.

    Args:
        identity: the worker id to deliver under, as of now.
        on_fault: called when the thread ends by an error of ours.
    """

    def __init__(
        self,
        store: Store,
        *,
        identity: Callable[[], str],
        options: WebhookOptions,
        on_fault: Callable[[Exception], None],
        failpoints: Failpoints | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._identity = identity
        self._options = options
        self._on_fault = on_fault
        self._failpoints = failpoints or Failpoints()
        self._wall_clock = wall_clock
        self._no_webhooks = Outage("cannot read the webhooks", logger)
        self._thread = threading.Thread(target=self._run, name="kvq-webhooks", daemon=True)
        self._bell = threading.Event()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start delivering, what earlier workers left first."""
        self._thread.start()

    def ring(self) -> None:
        """Something was committed: a batch may have ended."""
        self._bell.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the delivery under way, if it takes no longer than ``timeout_s``; others deliver the rest."""
        self._stopping.set()
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def deliver_due(self) -> int:
        """Write down what has ended and try once all that is due; returns how many tries were made.

        Raises:
            StoreError: the database is away; what was tried and not recorded is tried again.
        """
        if not self._store.webhooks_due():
            return 0
        self._store.write_events(event_of)
        if not self._options.keys:
            if self._store.note_webhooks(_NO_SECRET):
                logger.error("a webhook is due, and %s", _NO_SECRET)
            return 0
        num_tries = 0
        while not self._stopping.is_set():
            delivery = self._store.claim_webhook(self._identity(), hold_s=HOLD_S)
            if delivery is None:
                break
            self._try(delivery)
            num_tries += 1
        return num_tries

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._bell.clear()
                try:
                    self.deliver_due()
                except StoreError as err:
                    self._no_webhooks.met(err)
                    self._stopping.wait(_ERROR_PAUSE_S)
                if self._bell.wait(_POLL_S):
                    self._stopping.wait(_GATHER_S)
        except Exception as err:
            logger.exception("the webhooks stopped for good")
            self._on_fault(err)

    def _try(self, delivery: WebhookDelivery) -> None:
        self._failpoints.hit("before_webhook")
        payload = delivery.payload.encode()
        headers = headers_of(self._options.keys, delivery.event_id, int(self._wall_clock()), payload)
        try:
            status = post(delivery.url, payload, headers, allow_private=self._options.allow_private)
        except (WebhookRefused, WebhookUndelivered) as err:
            self._failed(delivery, str(err))
            return
        except Exception as err:  # the URL is the submitter's: one that nobody foresaw must not end the thread
            logger.exception("the webhook of batch %s could not be tried", delivery.batch_id)
            self._failed(delivery, f"{type(err).__name__}: {err}")
            return
        self._failpoints.hit("after_webhook")
        if 200 <= status < 300:
            self._store.webhook_delivered(delivery)
        else:
            # A redirect is not followed: its target was not what the operator's rules were asked about.
            self._failed(delivery, f"the receiver answered {status}", final=status == _GONE)

    def _failed(self, delivery: WebhookDelivery, error: str, *, final: bool = False) -> None:
        given_up = self._store.webhook_failed(delivery, error, final=final)
        logger.warning(
            "the webhook of batch %s was not delivered at try %d%s: %s",
            delivery.batch_id,
            delivery.tries,
            ", which was the last" if given_up else "",
            error,
        )
