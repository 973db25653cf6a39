"""Strategies: what a KV cache, paging, continuous batching and prefix sharing are each worth, on one model.

``python -m bench.strategies`` takes some ten minutes on two quiet cores (``--toy`` tries it out in seconds), prints
three tables with the goals they have to reach, and keeps them as JSON: one of five strategies (time per token of a
single request, throughput with 8 at a time, use of the KV memory), one of eight requests with a long common system
prompt, and one of time per token against length. The first three strategies are in ``bench.static_batch``, the others
are the engine without and with prefix caching, at last with as many sequences as fit where ``reserve`` has eight. All
run on the same kernels.

How the goals are read. Throughput is that of eight at a time: there are enough requests (64) that the end of the queue,
where fewer run, weighs little. Answers of 30 to 600 tokens are log-uniform, many short and few long. ``reserve`` holds
the longest possible sequence for each, and nothing beyond it: the kindest reading. What continuous batching can gain at
equal concurrency follows from the lengths alone, the longest of eight / the mean: about 2.3 here. Spread evenly over
30 to 600 it would be 1.7, and 1.8 out of reach for any order of work.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peers
from bench.goals import Goal, goals_table
from bench.shapes import SHAPES, TINY, random_prompts
from kvq.engine.threads import prefer_short_spins

CONCURRENCY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the experiment; ``usual`` suits a laptop's processor, ``toy`` a test."""

    num_requests: int
    num_recomputed: int  # of them, by the strategy too slow for all
    shared_tokens: int  # of every prompt
    own_tokens: tuple[int, int]  # from, to
    output_tokens: tuple[int, int]  # from, to: log-uniform, as answers are: many short, few long
    single_context: int
    single_tokens: int
    run_every: int  # of the recompute strategy's steps
    system_prompt_tokens: int
    lengths: tuple[int, ...]

    @property
    def is_toy(self) -> bool:
        return self == TOY

    @property
    def max_len(self) -> int:
        return self.shared_tokens + self.own_tokens[1] + self.output_tokens[1]

    def requests(self, vocab: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and the lengths of their answers, always the same ones."""
        source = random.Random(7)
        lengths = [self.shared_tokens + source.randint(*self.own_tokens) for _ in range(self.num_requests)]
        low, high = (math.log(bound) for bound in self.output_tokens)
        outputs = [round(math.exp(source.uniform(low, high))) for _ in range(self.num_requests)]
        return random_prompts(lengths, vocab=vocab, shared=self.shared_tokens), outputs


USUAL = Plan(
    num_requests=64,
    num_recomputed=24,
    shared_tokens=64,
    own_tokens=(16, 80),
    output_tokens=(30, 600),
    single_context=1984,
    single_tokens=32,
    run_every=128,
    system_prompt_tokens=1500,
    lengths=(64, 128, 256, 512, 1024, 2000),
)
TOY = Plan(
    num_requests=10,
    num_recomputed=8,
    shared_tokens=32,
    own_tokens=(4, 12),
    output_tokens=(3, 30),
    single_context=100,
    single_tokens=4,
    run_every=4,
    system_prompt_tokens=96,
    lengths=(16, 64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """A line of the first table. ``kv_utilisation`` above 1: several requests use the same memory."""

    name: str
    single_tpot_ms: float
    output_tokens_per_s: float
    kv_utilisation: float | None  # KV tokens written / room held for them, mean over the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPromptRow:
    """A line of the second table."""

    name: str
    prompt_tokens: int
    computed_prompt_tokens: int
    wall_s: float
    kv_tokens_peak: int


def goals(result: dict[str, Any]) -> list[Goal]:
    """The shape that the tables must have."""
    rows = {row["name"]: row for row in result["strategies"]}
    rate = {name: row["output_tokens_per_s"] for name, row in rows.items()}
    alone, _, shared = (row["computed_prompt_tokens"] for row in result["shared_prompt"])
    shortest, longest = result["tpot_by_length"][0], result["tpot_by_length"][-1]
    length = f"{longest['length']:,} tokens / at {shortest['length']:,}"
    return [
        Goal(what="8 at a time: paged / recompute", value=rate["paged"] / rate["recompute"], unit="x", at_least=5),
        Goal(what="8 at a time: paged / reserve", value=rate["paged"] / rate["reserve"], unit="x", at_least=1.8),
        Goal(what="KV memory in use: paged", value=100 * rows["paged"]["kv_utilisation"], unit="%", at_least=90),
        Goal(
            what="KV memory in use: reserve",
            value=100 * rows["reserve"]["kv_utilisation"],
            unit="%",
            at_most=50,
        ),
        Goal(
            what="prompt tokens computed for 8 requests of one system prompt / for one",
            value=shared / alone,
            unit="x",
            at_most=1.25,
        ),
        Goal(
            what=f"time per token with a cache at {length}",
            value=longest["cached_ms"] / shortest["cached_ms"],
            unit="x",
            at_most=1.5,
        ),
        Goal(
            what=f"time per token without one at {length}",
            value=longest["recompute_ms"] / shortest["recompute_ms"],
            unit="x",
            at_least=5,
        ),
    ]


def markdown(result: dict[str, Any]) -> str:
    """The tables, for people."""
    plan, rows = result["plan"], result["strategies"]
    slowest = rows[0]["output_tokens_per_s"]
    reserve = next(row for row in rows if row["name"] == "reserve")["output_tokens_per_s"]
    first = [
        f"| {row['name']} | {row['single_tpot_ms']:.1f} | {row['output_tokens_per_s']:.1f} | "
        f"{row['output_tokens_per_s'] / slowest:.1f} | {row['output_tokens_per_s'] / reserve:.2f} | "
        + ("none" if row["kv_utilisation"] is None else f"{row['kv_utilisation']:.0%}")
        + " |"
        for row in rows
    ]
    second = [
        f"| {row['name']} | {row['prompt_tokens']:,} | {row['computed_prompt_tokens']:,} | {row['wall_s']:.2f} | "
        f"{row['kv_tokens_peak']:,} |"
        for row in result["shared_prompt"]
    ]
    third = [
        f"| {row['length']:,} | {row['recompute_ms']:.1f} | {row['cached_ms']:.1f} |"
        for row in result["tpot_by_length"]
    ]
    return "\n".join(
        [
            goals_table(goals(result)),
            f"{plan['num_requests']} requests, {CONCURRENCY} at a time, {plan['shared_tokens']} prompt tokens shared "
            f"and {plan['own_tokens'][0]}-{plan['own_tokens'][1]} of their own, {plan['output_tokens'][0]}-"
            f"{plan['output_tokens'][1]} tokens out (log-uniform); a single request at {plan['single_context']:,}. "
            f"Recompute answered {plan['num_recomputed']} of them; of its steps one in {plan['run_every']} was run and "
            "stands for the others.",
            "",
            "| strategy | single request, ms a token | 8 at a time, output tokens/s | x recompute | x reserve "
            "| KV memory in use |",
            "|---|---|---|---|---|---|",
            *first,
            "",
            *_limits(result),
            "| | prompt tokens | computed | wall seconds | KV tokens held at most |",
            "|---|---|---|---|---|",
            *second,
            "",
            "| tokens before | without a cache, ms a token | with, ms a token |",
            "|---|---|---|",
            *third,
            "",
        ]
    )


def _limits(result: dict[str, Any]) -> list[str]:
    """The floor of the machine, and what the best strategy reaches of it."""
    if (limits := result.get("limits")) is None:
        return []
    paged = next(row for row in result["strategies"] if row["name"] == "paged+prefix")
    best = max(row["output_tokens_per_s"] for row in result["strategies"])
    linear, attention = limits["linear_ops"] / 1e12, limits["attention_ops"] / 1e12
    return [
        f"Limits measured in the same sitting: {limits['in_words']}. A single request cannot take less than "
        f"{limits['single_ms']:.1f} ms a token (weights and KV read once), paged reaches "
        f"{limits['single_ms'] / paged['single_tpot_ms']:.0%} of that; all requests ({linear:.2f} T operations in "
        f"linear layers, {attention:.2f} T in attention, each distinct token once) not more than "
        f"{limits['output_tokens_per_s']:.0f} output tokens/s, the best reaches "
        f"{best / limits['output_tokens_per_s']:.0%}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.strategies", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=f"a folder, or a shape with random weights: {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--toy", action="store_true", help="small sizes on a tiny model, to try it out")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "strategies.json")
    arguments = parser.parse_args()
    prefer_short_spins()
    from bench.strategy_runs import measure

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype}
        shape = TINY if arguments.toy else SHAPES.get(arguments.model or "")
        if shape is not None:
            settings |= {"model": str(shape.write(Path(folder))), "load_format": "dummy"}
            vocab = shape.vocab
        else:
            model = Path(arguments.model) if arguments.model else peers.KVQ.model("float32")
            settings["model"] = str(model)
            vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        result = measure(settings, TOY if arguments.toy else USUAL, vocab)
    result["goals"] = [goal.record() for goal in goals(result)]
    result["settings"]["model"] = Path(settings["model"]).name
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
