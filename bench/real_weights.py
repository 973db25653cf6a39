"""Real weights: kvq's greedy answers against transformers' own ``generate``, token for token.

    python -m bench.real_weights MODEL [--tokens 16]

Prompts of 5 to 1,000 tokens, six of which share beginnings, all in one batch, whole and in chunks, and each alone;
transformers answers each alone, in fp32. Exit code 1 where any token differs. For weights that are too large for the
tests; the results are in docs/models.md.
"""

from __future__ import annotations

import argparse
import sys

import torch

from kvq import LLM, SamplingParams
from kvq.engine.config import EngineConfig
from kvq.engine.network import load_network
from kvq.engine.tokenizer import Tokenizer

_LENGTHS = (5, 6, 17, 33, 64, 129, 257, 511, 513, 700, 1000)
_NUM_SHARED = 6
_TEXT = (
    "The river rose in the night and by morning the lower fields were under water. "
    "A compiler turns a program into instructions that a processor can follow. "
    "In 1858 the first telegraph cable was laid across the Atlantic, and failed within weeks. "
    "Bread is made of flour, water, salt and time; the rest is patience. "
    "Light takes about eight minutes and twenty seconds to reach us from the Sun. "
)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Beginnings of one text, each turned round by some words, and questions after a common beginning."""
    text = tokenizer.encode(_TEXT * 20)
    start, body = text[:1], text[1:]
    found = [(start + body[7 * i :] + body)[:n] for i, n in enumerate(_LENGTHS)]
    common = text[:150]
    return found + [[*common, *tokenizer.encode(f"Question {i}: why?")[1:]] for i in range(_NUM_SHARED)]


@torch.inference_mode()
def expected(config: EngineConfig, wanted: list[list[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """transformers' answers, each prompt alone."""
    network = load_network(config, torch.device("cpu"), torch.float32).eval()
    answers = []
    for prompt in wanted:
        ids = torch.tensor([prompt])
        out = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        answers.append(tuple(out[0, len(prompt) :].tolist()))
    return answers


def main() -> int:
    """Compare; print a line per way of running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    arguments = parser.parse_args()
    config = EngineConfig(model=arguments.model, device="cpu")
    wanted = prompts(Tokenizer.load(config))
    want = expected(config, wanted, arguments.tokens)
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, min_tokens=arguments.tokens)
    num_wrong = 0
    for name, settings in (("whole", {"max_num_batched_tokens": 2048}), ("chunked", {"max_num_batched_tokens": 192})):
        llm = LLM(arguments.model, device="cpu", max_model_len=1100, generation_config="vllm", **settings)
        batched = llm.generate(wanted, params)
        runs = {f"{name}, batched": batched}
        if name == "whole":
            runs["each alone"] = [llm.generate([prompt], params)[0] for prompt in wanted]
        for run, outputs in runs.items():
            got = [output.outputs[0].token_ids for output in outputs]
            wrong = [len(p) for p, ours, theirs in zip(wanted, got, want, strict=True) if ours != theirs]
            num_wrong += len(wrong)
            print(
                f"{run}: {len(wanted) - len(wrong)} of {len(wanted)} prompts equal"
                + (f"; not {wrong}" if wrong else "")
            )
        print(f"{name}: {llm.stats().cached_prompt_tokens} prompt tokens shared")
    (sample,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    print(f"The capital of France is{sample.outputs[0].text}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
