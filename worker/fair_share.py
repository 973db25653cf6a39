"""FairShare: which flow is served next, and which of its jobs.

A flow is what shares a queue: the jobs of one batch, or of one tenant without a batch. Owns the waiting jobs of every
flow (a prefix planner each) and what each flow may still be given. Knows token ids, weights and costs; no SQL.
Invariants: of the most urgent priority, flows are served by weight in tokens computed and generated; a group of jobs
that share a prefix is not broken off before it has overdrawn a whole quantum; whoever waits alone is never held up.

Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) with token costs that are corrected once they are known
(as in VTC, Sheng et al., OSDI 2024), and with locality first among those that have credit (as in DLPM, Cao et al.,
arXiv 2501.14312). The bound: with n flows of equal weight waiting, one whose jobs cost S tokens in all has been
admitted whole once n * (S + 2 * quantum + the largest job) tokens were, whatever the others hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvq.engine.planner import PrefixPlanner

# What a flow is given at a time: long enough that groups stay together, seconds of work on a CPU.
QUANTUM_TOKENS = 4096
# The output of a job is taken for this long, or its max_tokens, until its flow has ended some.
_FIRST_GUESS_TOKENS = 128
# Learned means look back over about so many jobs.
_MEMORY_JOBS = 32

# (job id, tenant, most tokens it takes) -> may it start? True books it.
Start = Callable[[str, str, int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCost:
    """A waiting job to be shared out. ``most_tokens``: the bound of prompt and output, where there is one."""

    flow: int
    tenant: str
    num_prompt_tokens: int
    max_tokens: int | None

    @property
    def most_tokens(self) -> int:
        """What the job takes at most; the first guess stands for an output without bound."""
        return self.num_prompt_tokens + (_FIRST_GUESS_TOKENS if self.max_tokens is None else self.max_tokens)


@dataclass(slots=True)
class _Mean:
    """A mean that forgets."""

    value: float
    num_seen: int = 0

    def see(self, value: float) -> None:
        self.num_seen += 1
        self.value += (value - self.value) / min(self.num_seen, _MEMORY_JOBS)


@dataclass(slots=True)
class _Flow:
    number: int
    tenant: str
    planner: PrefixPlanner = field(default_factory=PrefixPlanner)
    credit: float = 0.0  # tokens it may be given; below 0 it was given too much
    computed_share: _Mean = field(default_factory=lambda: _Mean(1.0))  # of the prompt; the rest was reused
    output: _Mean | None = None

    def cost(self, job: WaitingCost) -> float:
        """Expected tokens to compute and to generate."""
        output: float = _FIRST_GUESS_TOKENS if self.output is None else self.output.value
        if job.max_tokens is not None:
            output = min(output, job.max_tokens)
        return job.num_prompt_tokens * self.computed_share.value + output


@dataclass(frozen=True, slots=True)
class _Charge:
    flow: int
    tokens: float
    num_prompt_tokens: int


class FairShare:
    """Hands out waiting jobs so that every flow gets its share.

    Args:
        quantum: tokens that the flow of greatest weight is given before the next one is served.
    """

    def __init__(self, *, quantum: int = QUANTUM_TOKENS) -> None:
        self._quantum = quantum
        self._flows: dict[int, _Flow] = {}
        self._jobs: dict[str, WaitingCost] = {}
        self._charges: dict[str, _Charge] = {}  # handed out, not settled
        self._current: _Flow | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def add(self, job_id: str, token_ids: Sequence[int], job: WaitingCost, *, priority: int = 0) -> None:
        """Add a waiting job; ``token_ids`` are what the planner sorts by."""
        flow = self._flows.get(job.flow)
        if flow is None:
            flow = self._flows[job.flow] = _Flow(job.flow, job.tenant)
        flow.planner.add(job_id, token_ids, priority=priority, max_tokens=job.max_tokens or 0)
        self._jobs[job_id] = job

    def drop_tenants(self, tenants: Collection[str]) -> list[str]:
        """Forget the waiting jobs of these tenants; returns their ids."""
        dropped = [job_id for job_id, job in self._jobs.items() if job.tenant in tenants] if tenants else []
        for job_id in dropped:
            self._flows[self._jobs.pop(job_id).flow].planner.remove(job_id)
        return dropped

    def take(self, k: int, *, weights: Mapping[str, float] | None = None, start: Start = lambda *_: True) -> list[str]:
        """Hand out the next ``k`` jobs, fewer when fewer may start. Each is to be settled once.

        Args:
            weights: by tenant; 1 where none is given.
            start: asked for each job; after a False nothing more of that tenant is handed out by this call.
        """
        taken: list[str] = []
        stopped: set[str | int] = set()  # tenants, and flows
        while len(taken) < k and (flow := self._next(weights or {}, stopped)) is not None:
            job_id = flow.planner.peek()
            assert job_id is not None
            job = self._jobs[job_id]
            if not start(job_id, job.tenant, job.most_tokens):
                stopped |= {job.tenant, flow.number}
                continue
            self._hand_out(flow, job_id, job)
            taken.append(job_id)
        return taken

    def reconsider(self) -> None:
        """Choose flow and group anew, as if none had been begun: what was handed out was chosen among few."""
        self._current = None
        for flow in self._flows.values():
            flow.planner.reconsider()

    def settle(self, job_id: str, *, computed_tokens: int, output_tokens: int) -> None:
        """A job that was handed out has ended: its flow is charged what it took instead of what was expected.

        One that did not run (nobody could claim it, it was given back) took nothing, and teaches nothing; it counts
        as a token, so that no number of such jobs keeps others waiting.
        """
        charge = self._charges.pop(job_id, None)
        flow = None if charge is None else self._flows.get(charge.flow)
        if charge is None or flow is None:
            return
        flow.credit += charge.tokens - max(1, computed_tokens + output_tokens)
        if computed_tokens or output_tokens:
            flow.computed_share.see(computed_tokens / max(1, charge.num_prompt_tokens))
            flow.output = flow.output or _Mean(output_tokens)
            flow.output.see(output_tokens)

    def _hand_out(self, flow: _Flow, job_id: str, job: WaitingCost) -> None:
        flow.planner.admit(job_id)
        self._current = flow
        del self._jobs[job_id]
        tokens = flow.cost(job)
        flow.credit -= tokens
        self._charges[job_id] = _Charge(job.flow, tokens, job.num_prompt_tokens)

    def _next(self, weights: Mapping[str, float], stopped: Collection[str | int]) -> _Flow | None:
        waiting = [
            flow
            for flow in self._flows.values()
            if len(flow.planner) and flow.tenant not in stopped and flow.number not in stopped
        ]
        if not waiting:
            return None
        urgency = min(flow.planner.urgency or 0 for flow in waiting)
        waiting = [flow for flow in waiting if flow.planner.urgency == urgency]
        current = self._current
        if current is not None:
            for flow in waiting:
                flow.planner.follow(current.planner)
            if current in waiting and self._may_go_on(current):
                return current
        with_credit = [flow for flow in waiting if flow.credit > 0]
        if not with_credit:
            self._refill(waiting, weights)
            with_credit = [flow for flow in waiting if flow.credit > 0]
        return min(with_credit, key=lambda flow: (not flow.planner.goes_on, -flow.credit, flow.number))

    def _may_go_on(self, flow: _Flow) -> bool:
        return flow.credit > 0 or (flow.planner.goes_on and flow.credit > -self._quantum)

    def _refill(self, waiting: Sequence[_Flow], weights: Mapping[str, float]) -> None:
        """As many rounds as it takes until somebody has credit again."""
        flows_by_tenant = Counter(flow.tenant for flow in waiting)
        heaviest = max(weights.get(tenant, 1.0) for tenant in flows_by_tenant)

        def share(flow: _Flow) -> float:
            weight = weights.get(flow.tenant, 1.0) / heaviest
            return self._quantum * weight / max(1, flows_by_tenant[flow.tenant])

        num_rounds = min(math.floor(-flow.credit / share(flow)) + 1 for flow in waiting)
        for flow in list(self._flows.values()):
            if flow in waiting:
                flow.credit += num_rounds * share(flow)
            elif not len(flow.planner):
                # Credit is lost with the last job; debts are paid off meanwhile, and then the flow is forgotten.
                flow.credit = min(0.0, min(0.0, flow.credit) + num_rounds * share(flow))
                if flow.credit >= 0 and flow is not self._current:
                    del self._flows[flow.number]
