"""Celery clients as any service has one: they know the broker's URL and nothing of kvq."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery


@contextmanager
def celery_client(redis_url: str) -> Iterator[Celery]:
    """A client of one broker, which is also its result backend."""
    app = Celery("service", broker=redis_url, backend=redis_url, set_as_current=False)
    yield app
    with warnings.catch_warnings():
        # Celery leaves the connections of its result backends to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        # A result that was raised lives on in its traceback; it must unsubscribe while its Redis is there.
        gc.collect()
    app.close()
