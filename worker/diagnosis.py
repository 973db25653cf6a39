"""Diagnosis: what the figures of the workers mean, in words.

Owns the rules by which samples, queues and workers are read. Knows no SQL; every rule is a pure function of records.
Source: the signs people watch on vLLM: cache usage at the cap with flat throughput is bound by memory, a growing number
of waiting requests is more concurrency than the budget holds, swapping halves the speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from kvq.engine.stats import acceptance
from kvq.worker.store_figures import QueueRow, WorkerSample
from kvq.worker.store_records import WorkerRow

# Fewer samples (of ten seconds) are a moment, not a state.
_FEWEST_SAMPLES = 3
_FULL_USAGE = 0.95
_FLAT = 0.1
_GROWTH = 1.25
_LOW_HIT_RATE = 0.05
# Of 16 sequences that swapped, 12 ran at full speed.
_SWAP_CUT = 0.75


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    HINT = "hint"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know. ``subject`` is a worker, a queue, or the whole; ``advice`` says what to change."""

    severity: Severity
    code: str
    subject: str
    meaning: str
    advice: str | None = None


def diagnose(
    samples: Sequence[WorkerSample], queues: Sequence[QueueRow], workers: Sequence[WorkerRow], *, lease_s: float
) -> list[Finding]:
    """Everything there is to say, most serious first; never empty.

    Args:
        samples: of the last minutes, oldest first.
        workers: those that are registered as live.
        lease_s: seconds of silence after which a worker counts as dead.
    """
    findings = [*_queue_findings(queues), *_worker_findings(workers, lease_s)]
    by_worker: dict[str, list[WorkerSample]] = {}
    for sample in samples:
        by_worker.setdefault(sample.worker_id, []).append(sample)
    for worker_id, own in by_worker.items():
        findings += _sample_findings(worker_id, own)
    if all(finding.severity is Severity.OK for finding in findings):
        findings.append(_healthy(by_worker))
    order = list(Severity)
    return sorted(findings, key=lambda finding: -order.index(finding.severity))


def _queue_findings(queues: Sequence[QueueRow]) -> Iterator[Finding]:
    for queue in queues:
        subject = f"queue {queue.queue}"
        if queue.paused and queue.queued:
            yield Finding(
                severity=Severity.WARNING,
                code="queue_paused",
                subject=subject,
                meaning=f"{queue.queued:,} jobs wait in a queue that is paused",
                advice="resume it when they are to run",
            )
        elif queue.queued and not queue.num_workers and not queue.queue.startswith("run-"):
            yield Finding(
                severity=Severity.PROBLEM,
                code="no_worker",
                subject=subject,
                meaning=f"{queue.queued:,} jobs wait and no worker serves this queue",
                advice=f"start one: kvq worker --queue {queue.queue}",
            )
        if queue.dead:
            yield Finding(
                severity=Severity.WARNING,
                code="dead_jobs",
                subject=subject,
                meaning=f"{queue.dead:,} jobs were given up since they took a worker down three times",
                advice="look at their errors before running them again",
            )


def _worker_findings(workers: Sequence[WorkerRow], lease_s: float) -> Iterator[Finding]:
    for worker in workers:
        if worker.heartbeat_age_s > lease_s / 2:
            yield Finding(
                severity=Severity.PROBLEM,
                code="silent_worker",
                subject=worker.worker_id,
                meaning=f"no sign of life for {worker.heartbeat_age_s:.0f} s; at {lease_s:.0f} s its jobs go to others",
                advice=f"look at process {worker.pid} on {worker.hostname}; another worker takes its jobs over",
            )


def _sample_findings(worker_id: str, samples: Sequence[WorkerSample]) -> Iterator[Finding]:
    busy = [sample for sample in samples if sample.running]
    if not busy:
        return
    running = round(fmean(sample.running for sample in busy))
    yield from _swapping(worker_id, busy, running)
    yield from _guessing(worker_id, busy)
    if len(busy) < _FEWEST_SAMPLES:
        return
    yield from _preempting(worker_id, busy, running)
    memory_bound = _is_full(busy) and _is_flat(busy)
    if memory_bound:
        yield Finding(
            severity=Severity.WARNING,
            code="memory_bound",
            subject=worker_id,
            meaning=f"the KV cache is full ({_usage(busy):.0%}) and throughput is flat at "
            f"{fmean(s.generation_tps for s in busy):,.0f} tokens/s: memory is the limit, not arithmetic",
            advice="give the cache more memory (gpu_memory_utilization, kv_cache_memory), or shorten max_model_len; "
            "more concurrency will not help",
        )
    if _waiting_grows(busy):
        first, last = (fmean(s.waiting for s in part) for part in _ends(busy))
        yield Finding(
            severity=Severity.WARNING,
            code="over_budget",
            subject=worker_id,
            meaning=f"ever more requests wait inside the engine ({first:.0f}, now {last:.0f}): "
            "concurrency is over what the memory budget holds",
            advice=f"lower max_num_seqs to about {running}, the number that really runs, or add a worker",
        )
    elif not memory_bound and all(sample.waiting and sample.kv_usage < 0.5 for sample in busy):
        yield Finding(
            severity=Severity.HINT,
            code="room_left",
            subject=worker_id,
            meaning=f"requests wait although the KV cache is only {_usage(busy):.0%} full; {running} run together",
            advice="raise max_num_seqs",
        )
    prompt_tps = fmean(sample.prompt_tps for sample in busy)
    hit_rate = sum(s.prefix_hit_rate * s.prompt_tps for s in busy) / (prompt_tps * len(busy)) if prompt_tps else 1.0
    if hit_rate < _LOW_HIT_RATE and prompt_tps > fmean(sample.generation_tps for sample in busy):
        yield Finding(
            severity=Severity.HINT,
            code="little_sharing",
            subject=worker_id,
            meaning=f"most work is prompts, and only {hit_rate:.0%} of their tokens are reused",
            advice="`kvq plan FILE` shows where the prompts of a file part, and what keeps them from sharing more",
        )


def _swapping(worker_id: str, busy: Sequence[WorkerSample], running: int) -> Iterator[Finding]:
    swapped = sum(sample.swapped_in + sample.swapped_out for sample in busy)
    if swapped:
        yield Finding(
            severity=Severity.PROBLEM,
            code="swapping",
            subject=worker_id,
            meaning=f"{swapped:,} KV blocks went to host memory and back while {running} sequences ran: that can cost "
            "half of the speed, even where the GPU looks idle",
            advice=f"cut concurrency: lower max_num_seqs to about {max(1, int(running * _SWAP_CUT))}",
        )


def _guessing(worker_id: str, busy: Sequence[WorkerSample]) -> Iterator[Finding]:
    num_drafts = sum(sample.num_draft_tokens for sample in busy)
    share = acceptance(sum(sample.num_accepted_tokens for sample in busy), num_drafts)
    if share is not None:
        yield Finding(
            severity=Severity.OK,
            code="guessing",
            subject=worker_id,
            meaning=f"{num_drafts:,} tokens were guessed ahead, {share:.0%} of them rightly",
        )


def _preempting(worker_id: str, busy: Sequence[WorkerSample], running: int) -> Iterator[Finding]:
    preempted = sum(sample.preemptions for sample in busy)
    if preempted > len(busy):
        yield Finding(
            severity=Severity.WARNING,
            code="preempting",
            subject=worker_id,
            meaning=f"{preempted:,} sequences were interrupted for lack of KV blocks and computed again",
            advice=f"lower max_num_seqs below {running}, set max_tokens in the jobs, or give the cache more memory",
        )


def _healthy(by_worker: dict[str, list[WorkerSample]]) -> Finding:
    if not by_worker:
        return Finding(
            severity=Severity.OK,
            code="idle",
            subject="all",
            meaning="nothing waits, and no worker has reported figures lately",
        )
    latest = [samples[-1] for samples in by_worker.values()]
    return Finding(
        severity=Severity.OK,
        code="healthy",
        subject="all",
        meaning=f"{sum(s.running for s in latest):,} sequences run at "
        f"{sum(s.generation_tps for s in latest):,.0f} tokens/s with the KV cache at "
        f"{max(s.kv_usage for s in latest):.0%}; nothing to complain about",
    )


def _usage(samples: Sequence[WorkerSample]) -> float:
    return fmean(sample.kv_usage for sample in samples)


def _is_full(samples: Sequence[WorkerSample]) -> bool:
    return _usage(samples) >= _FULL_USAGE


def _is_flat(samples: Sequence[WorkerSample]) -> bool:
    """Throughput in the newer half is no more than that in the older half, within a tenth."""
    before, after = (fmean(sample.generation_tps for sample in half) for half in _ends(samples))
    return after <= before * (1 + _FLAT)


def _waiting_grows(samples: Sequence[WorkerSample]) -> bool:
    before, after = (fmean(sample.waiting for sample in half) for half in _ends(samples))
    return after > max(before, 1) * _GROWTH and samples[-1].waiting > samples[0].waiting


def _ends(samples: Sequence[WorkerSample]) -> tuple[Sequence[WorkerSample], Sequence[WorkerSample]]:
    """The older half and the newer one."""
    middle = len(samples) // 2
    return samples[:middle], samples[middle:]
