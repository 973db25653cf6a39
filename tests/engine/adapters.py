"""LoRA adapters for tests: random ones, saved by PEFT itself for a model that lies in a folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# PEFT asks transformers for a property by its old name.
_PEFT_WARNS = "`is_gradient_checkpointing` is deprecated"
ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(network: Any, folder: Path, *, seed: int, std: float = 0.2, **settings: Any) -> Path:
    """Save a random adapter of ``network``, which is left as it was."""
    import peft

    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **settings}
    with _old_names():
        adapted = peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    adapted.unload()
    return folder


def answers(network: Any, prompts: list[list[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """Greedy answers of transformers' own network, each prompt alone."""
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = network.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
            )
            found.append(tuple(output[0, len(prompt) :].tolist()))
    return found


def adapted_answers(
    network: Any, folders: list[Path | None], prompts: list[list[int]], num_tokens: int
) -> list[tuple[int, ...]]:
    """The same with PEFT's adapter of each folder, a prompt for each; None: the base model."""
    import peft

    found = []
    for folder, prompt in zip(folders, prompts, strict=True):
        if folder is None:
            found += answers(network, [prompt], num_tokens)
            continue
        with _old_names():
            adapted = peft.PeftModel.from_pretrained(network, folder)
        found += answers(adapted, [prompt], num_tokens)
        adapted.unload()
    return found


@contextmanager
def _old_names() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _PEFT_WARNS, FutureWarning)
        yield
