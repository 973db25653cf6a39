"""What a WorkerService is told and what it tells: options, hooks, snapshots of its work, the report of a drain.

Records only: nothing here starts, waits or changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvq.worker.jobs import JobOutcome, JobState
from kvq.worker.webhooks import WebhookOptions, signing_keys

if TYPE_CHECKING:
    from kvq.engine.stats import EngineStats
    from kvq.worker.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProgress:
    """A snapshot of what this worker is doing, for progress displays.

    ``ended_by_state`` counts the jobs whose end this worker committed. ``engine`` is None while it loads.
    """

    ready: bool
    claimed: int
    window: int
    uncommitted: int
    ended_by_state: dict[JobState, int]
    engine: EngineStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What a drain did. ``flushed`` is False when results could not be written in time."""

    finished: int
    released: int
    flushed: bool


def nothing(*_: object) -> None:
    """For hooks nobody listens to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a host of the service may listen to.

    Args:
        on_committed: outcomes that are durable now; on the finisher's thread.
        on_dropped: jobs that ended here without an outcome of ours: fenced, discarded or released.
        on_tick: about once a second.
        on_fault: the engine or a thread of ours stopped for good; called once, on that thread.
    """

    on_committed: Callable[[Sequence[JobOutcome]], None] = nothing
    on_dropped: Callable[[Sequence[str]], None] = nothing
    on_tick: Callable[[], None] = nothing
    on_fault: Callable[[Exception], None] = nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Settings of the service itself; the engine's are in what ``load_engine`` closes over.

    ``webhooks``: how the ends of batches are announced; None leaves that to other workers.
    """

    queue: str = "kvq"
    model: str = ""
    served_model_names: tuple[str, ...] = ()
    window: int = 4096
    window_tokens: int = 4_000_000
    claim_ahead: int = 16
    max_claimed: int = 512
    fair_share: bool = True
    serve_answers: bool = True
    heartbeat_s: float = 5.0
    lease_s: float = 60.0
    drain_timeout_s: float = 30.0
    step_timeout_s: float = 600.0
    webhooks: WebhookOptions | None = None
    hooks: Hooks = field(default_factory=Hooks)

    @classmethod
    def from_settings(cls, settings: Settings, *, hooks: Hooks, with_webhooks: bool) -> ServiceOptions:
        """As the settings say; ``with_webhooks``: the service delivers them, too.

        Raises:
            SettingsError: the engine settings are invalid.
        """
        config = settings.engine_config()
        claim_ahead = max(8, config.max_num_seqs // 8)
        webhooks = None
        if with_webhooks:
            webhooks = WebhookOptions(
                keys=signing_keys(settings.webhook_secret), allow_private=settings.webhook_allow_private
            )
        return cls(
            queue=settings.queue,
            model=config.model,
            served_model_names=settings.served_names(),
            window=settings.window,
            window_tokens=settings.window_tokens,
            claim_ahead=claim_ahead,
            max_claimed=2 * config.max_num_seqs + claim_ahead,
            fair_share=settings.fair_share,
            serve_answers=config.enable_dedup,
            heartbeat_s=settings.heartbeat_s,
            lease_s=settings.lease_s,
            drain_timeout_s=settings.drain_timeout,
            step_timeout_s=settings.step_timeout_s,
            webhooks=webhooks,
            hooks=hooks,
        )
