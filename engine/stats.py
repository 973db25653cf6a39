"""EngineStats: the figures of an engine. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


def acceptance(num_accepted_tokens: float, num_draft_tokens: float) -> float | None:
    """Share of the tokens guessed ahead that were right, in [0, 1]; None where none were guessed."""
    return num_accepted_tokens / num_draft_tokens if num_draft_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since the engine was loaded, and what it holds now.

    ``kv_usage``: share of the KV blocks that sequences hold. ``kv_slots_allocated`` and ``kv_slots_used`` tell the
    waste inside those blocks: their token slots, and how many had KV, added up over the steps with the highest usage.
    ``preemption_s``: seconds spent on moving KV to the host and back, and on computing it again. ``forward_s``: seconds
    in the network's forward pass (on a GPU: until it was launched); what is left of the time went to the scheduler, the
    sampler and whoever calls.
    """

    prompt_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    kv_usage: float
    kv_usage_peak: float
    steps: int
    running: int
    waiting: int
    swapped_in: int = 0
    swapped_out: int = 0
    deduplicated_requests: int = 0
    plain_decode_steps: int = 0  # steps by how their decodes were attended: see runner.decode_path
    split_decode_steps: int = 0
    grouped_decode_steps: int = 0
    kv_slots_allocated: int = 0
    kv_slots_used: int = 0
    preemption_s: float = 0.0
    forward_s: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def kv_slot_utilisation(self) -> float:
        """Share of the allocated KV slots that held tokens when the cache was fullest; 1 before the first step."""
        return self.kv_slots_used / self.kv_slots_allocated if self.kv_slots_allocated else 1.0
