"""Deduplicator: equal deterministic requests in flight are computed once.

Owns which request leads and which wait for its answer. Knows nothing of steps or blocks. Invariant: a follower's
answer is the one it would have computed itself: same tokens, adapter and parameters, and greedy or the same explicit
seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from kvq.engine.request import Request, RequestOutput, SamplingParams

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A request that waits for an equal one; ``seed`` is the one it would have run with."""

    request: Request
    seed: int

    def output(self, leader: RequestOutput, *, finished_s: float) -> RequestOutput:
        """The leader's answer as this request's own. It computed nothing, so all of its prompt was reused."""
        request, metrics = self.request, leader.metrics
        return replace(
            leader,
            request_id=request.request_id,
            served_from=leader.request_id,
            metrics=replace(
                metrics,
                arrival_s=request.arrival_s,
                first_scheduled_s=max(metrics.first_scheduled_s, request.arrival_s),
                first_token_s=max(metrics.first_token_s, request.arrival_s),
                finished_s=finished_s,
                cached_tokens=metrics.prompt_tokens,
                computed_tokens=0,
                preemptions=0,
                seed=self.seed,
            ),
        )


@dataclass(slots=True)
class _Group:
    key: Key
    priority: int
    followers: dict[str, Follower] = field(default_factory=dict)


class Deduplicator:
    """Requests in flight by what determines their answer."""

    def __init__(self) -> None:
        self._leader_by_key: dict[Key, str] = {}
        self._groups: dict[str, _Group] = {}  # by the leader's id
        self._leader_by_follower: dict[str, str] = {}

    def __contains__(self, request_id: str) -> bool:
        """True for a request that waits for another's answer."""
        return request_id in self._leader_by_follower

    def join(self, request: Request, seed: int) -> bool:
        """True when an equal request is in flight and ``request`` now waits for it; else it is to be computed.

        A request that is more urgent than the one in flight is computed itself, and leads from then on.
        """
        key = _key(request)
        if key is None:
            return False
        leader_id = self._leader_by_key.get(key)
        if leader_id is not None and self._groups[leader_id].priority <= request.priority:
            self._groups[leader_id].followers[request.request_id] = Follower(request=request, seed=seed)
            self._leader_by_follower[request.request_id] = leader_id
            return True
        self._lead(request.request_id, _Group(key=key, priority=request.priority))
        return False

    def leave(self, request_id: str) -> Follower:
        """Take a waiting request out."""
        leader_id = self._leader_by_follower.pop(request_id)
        return self._groups[leader_id].followers.pop(request_id)

    def finish(self, request_id: str) -> list[Follower]:
        """A computed request ended: those that waited for it."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return []
        if self._leader_by_key.get(group.key) == request_id:
            del self._leader_by_key[group.key]
        for follower_id in group.followers:
            del self._leader_by_follower[follower_id]
        return list(group.followers.values())

    def succeed(self, request_id: str) -> Follower | None:
        """A computed request was aborted: the most urgent of those that waited, to be computed in its place."""
        followers = self.finish(request_id)
        if not followers:
            return None
        heir = min(followers, key=lambda f: f.request.priority)
        for follower in [heir, *(f for f in followers if f is not heir)]:
            self.join(follower.request, follower.seed)
        return None if heir.request.request_id in self else heir

    def check_integrity(self) -> None:
        """Raise AssertionError unless every follower has a leader and every leader a key."""
        members = {f: leader for leader, group in self._groups.items() for f in group.followers}
        assert members == self._leader_by_follower
        assert set(self._leader_by_key.values()) <= set(self._groups)
        assert not members.keys() & self._groups.keys()

    def _lead(self, request_id: str, group: _Group) -> None:
        self._groups[request_id] = group
        self._leader_by_key[group.key] = request_id


def _key(request: Request) -> Key | None:
    """Everything the answer depends on; None when it is drawn from a stream of its own."""
    parameters = answer_parameters(request.params)
    return (
        None
        if parameters is None
        else (
            request.prompt_token_ids,
            request.lora,
            request.pooling,
            *parameters,
        )
    )


def answer_parameters(params: SamplingParams) -> Key | None:
    """The parameters an answer depends on, in a fixed order; None for one drawn from a stream of its own."""
    if params.greedy:  # no draw is made
        params = replace(params, seed=None, top_p=1.0, top_k=None, min_p=0.0)
    elif params.seed is None:
        return None
    return tuple(_hashable(getattr(params, f.name)) for f in fields(SamplingParams))


def _hashable(value: object) -> object:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value
