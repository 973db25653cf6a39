"""StepLoop: steps are planned, run and booked, one after the other; with ``run_ahead`` the next one is started before
the tokens of the one that runs are known.

Owns the steps that run: one while the host waits for it, and the one after it. Knows neither requests nor tensors.
Invariant: steps are booked in the order in which they were planned, and each is booked or rolled back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvq.engine.errors import StepFailed
from kvq.engine.runner import Runner, RunningStep
from kvq.engine.scheduler import Scheduler
from kvq.engine.sequence import RequestState
from kvq.engine.step import StepPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    plan: StepPlan
    step: RunningStep
    started_s: float


class StepLoop:
    """Drives a scheduler and a runner.

    Args:
        run_ahead: asynchronous scheduling: while a step runs the next is planned and its inputs are staged; the tokens
            it needs stay on the device. They reach the host, and are booked, one step late. May be changed at any time.
        on_duration: told how many seconds each step took.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        run_ahead: bool,
        on_duration: Callable[[StepPlan, float], None],
    ) -> None:
        self.run_ahead = run_ahead
        self.num_ahead = 0  # steps started before those before them were booked
        self._scheduler = scheduler
        self._runner = runner
        self._on_duration = on_duration
        self._next: _Started | None = None
        self._ended_s = 0.0

    @property
    def is_running(self) -> bool:
        """True while a step was started that is not booked."""
        return self._next is not None

    def step(self) -> list[RequestState]:
        """Book one step, started now or in the call before; returns the requests that finished in it.

        Raises:
            StepFailed: nothing was booked; the requests are still in flight and will be computed again.
        """
        current = self._next or self._start_next()
        self._next = None
        if current is None:
            return []
        ahead = self._scheduler.plan_ahead(current.plan) if self.run_ahead else None
        following = None if ahead is None else self._start_ahead(ahead)
        try:
            result = current.step.wait()
        except Exception as err:
            self._scheduler.rollback(*(plan for plan in (current.plan, ahead) if plan is not None))
            raise _failure(current.plan, err) from err
        now = time.perf_counter()
        self._on_duration(current.plan, now - max(current.started_s, self._ended_s))
        self._ended_s = now
        finished = self._scheduler.commit(current.plan, result)
        if ahead is not None and following is None:
            self._scheduler.rollback(ahead)
        self._next = following
        return finished

    def _start_next(self) -> _Started | None:
        plan = self._scheduler.plan()
        if plan is None:
            return None
        try:
            return self._start(plan)
        except Exception as err:
            self._scheduler.rollback(plan)
            raise _failure(plan, err) from err

    def _start_ahead(self, plan: StepPlan) -> _Started | None:
        """None where it fails: it is computed again once the step that runs is booked, and tells if it fails then."""
        try:
            started = self._start(plan)
        except Exception as err:  # noqa: BLE001 (whatever it is, the step that runs must be booked)
            logger.warning("a step of %d tokens that ran ahead failed: %s", plan.num_tokens, err)
            return None
        self.num_ahead += 1
        return started

    def _start(self, plan: StepPlan) -> _Started:
        started_s = time.perf_counter()
        return _Started(plan=plan, step=self._runner.start(plan), started_s=started_s)


def _failure(plan: StepPlan, err: Exception) -> StepFailed:
    return StepFailed(f"a step of {plan.num_tokens} tokens failed: {err}")
