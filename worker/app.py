"""The Celery application of a kvq worker.

Owns Celery's configuration. Knows settings, nothing of engines. Invariants: JSON only, results always expire,
and Celery's own consumer reads a control queue, never the list our intake pops from.
"""

from __future__ import annotations

from celery import Celery

from kvq.worker.bootstep import EngineStep
from kvq.worker.config import Settings
from kvq.worker.errors import SettingsError
from kvq.worker.keys import QueueKeys
from kvq.worker.messages import TASK_NAME
from kvq.worker.tasks import Answers, register_generate
from kvq.worker.urls import amqp_tls, celery_url

POOL = "kvq.worker.pool:EnginePool"


class KvqApp(Celery):  # type: ignore[misc]
    """A Celery application with the settings and the answers of its worker."""

    settings: Settings
    answers: Answers


def create_app(settings: Settings) -> KvqApp:
    """The application for a worker with these settings.

    Raises:
        SettingsError: no broker is configured.
    """
    if settings.broker is None:
        raise SettingsError("broker", "is not set; give a redis:// URL, or start the worker with --no-broker")
    broker, tls = amqp_tls(settings.broker)
    backend = settings.result_backend
    app = KvqApp("kvq", broker=celery_url(broker), backend=backend and celery_url(backend), set_as_current=False)
    app.settings = settings
    app.answers = Answers()
    app.conf.update(
        broker_use_ssl=tls or False,
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        result_accept_content=["json"],
        result_expires=settings.result_expires,
        # Links that name kvq.generate go to our queue; others wherever their own signature says.
        task_routes={TASK_NAME: {"queue": settings.queue}},
        worker_pool=POOL,
        worker_concurrency=settings.engine_config().max_num_seqs,
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,
        worker_send_task_events=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
    )
    app.steps["worker"].add(EngineStep)
    register_generate(app, app.answers)
    return app


def control_queue(settings: Settings) -> str:
    """The queue for Celery's own consumer."""
    return QueueKeys(queue=settings.queue).control
