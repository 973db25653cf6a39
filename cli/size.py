"""``kvq size``: the arithmetic of a KV cache, for a model or for any numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from kvq.cli.options import FILE_NAME, json_option
from kvq.cli.output import print_json, stdout_console
from kvq.cli.sizes import bytes_option, size
from kvq.engine.config import EngineConfig
from kvq.engine.model_presence import require_model
from kvq.engine.sizing import (
    ACTIVATION_SHARE,
    DTYPE_BYTES,
    KVShape,
    kv_budget_bytes,
    paged_utilisation,
    reserved_utilisation,
    safe_concurrency,
)

if TYPE_CHECKING:
    from kvq.engine.model_shape import ModelShape

_SHAPE_FLAGS = "--num-layers with --hidden-size, or --num-layers with --num-kv-heads and --head-dim"
count_type = click.IntRange(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The command line, the model apart."""

    length: int
    batch: int
    mean_length: int | None
    block_size: int
    memory: int | None
    weights: int | None
    utilization: float
    activations: int | None


@click.command("size")
@click.option(
    "--model",
    type=FILE_NAME,
    metavar="MODEL",
    help="Take the shape from this model's configuration: a folder, a hub id or a .gguf file.",
)
@click.option("--num-layers", type=count_type, help="Layers of the model.")
@click.option("--hidden-size", type=count_type, help="Hidden size: KV heads x head dimension without grouped queries.")
@click.option("--num-kv-heads", type=count_type, help="KV heads, fewer than query heads with grouped queries.")
@click.option("--head-dim", type=count_type, help="Dimension of a head.")
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bfloat16", show_default=True)
@click.option(
    "--length", type=count_type, help="Tokens of a sequence, prompt and answer.  [default: the model's limit]"
)
@click.option("--batch", type=count_type, default=1, show_default=True, help="Sequences at the same time.")
@click.option("--mean-length", type=count_type, help="Tokens that a sequence really has, on average.")
@click.option("--block-size", type=count_type, default=16, show_default=True, help="Tokens per KV block.")
@bytes_option("--memory", "Memory of the GPU, such as 80GiB: tells how many sequences are safe.")
@bytes_option("--weights", "Bytes of the loaded weights.  [default: the model's parameters, counted]")
@click.option(
    "--gpu-memory-utilization",
    "utilization",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.9,
    show_default=True,
    help="Share of the memory that may be used.",
)
@bytes_option("--activations", "Set aside for a step's intermediate results.  [default: 5% of the memory]")
@json_option
def command(
    model: str | None,
    num_layers: int | None,
    hidden_size: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    dtype: str,
    length: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Size a KV cache by arithmetic: bytes per token, per sequence, and how many sequences are safe.

    \b
    kvq size --model ./llama --length 4096 --memory 80GiB
    kvq size --num-layers 40 --hidden-size 4096 --length 2048 --batch 8
    """
    found = None if model is None else _shape_of(model)
    if found is None:
        shape = _shape(num_layers, hidden_size, num_kv_heads, head_dim)
    elif any((num_layers, hidden_size, num_kv_heads, head_dim)):
        raise click.UsageError(f"--model has a shape of its own; give it, or {_SHAPE_FLAGS}")
    else:
        shape = found.kv
    length = length or (found.max_position_embeddings if found else None)
    if length is None:
        raise click.UsageError("--length is needed: the tokens of a sequence, prompt and answer")
    if flags["weights"] is None and found is not None:
        flags["weights"] = found.num_parameters * DTYPE_BYTES[dtype]
    asked = _Asked(length=length, **flags)
    if asked.mean_length is not None and asked.mean_length > length:
        raise click.UsageError(f"--mean-length is {asked.mean_length}, more than --length ({length})")
    figures = _figures(shape, dtype, asked)
    if as_json:
        print_json(figures)
        return
    console = stdout_console()
    for line in _lines(shape.formula(dtype), asked, figures):
        console.print(line, soft_wrap=True)


def _shape_of(model: str) -> ModelShape:
    from kvq.engine.model_shape import ModelShape

    config = EngineConfig(model=model)
    require_model(config)
    return ModelShape.load(config)


def _shape(num_layers: int | None, hidden_size: int | None, num_kv_heads: int | None, head_dim: int | None) -> KVShape:
    """A shape from numbers; the hidden size stands for all heads together."""
    if num_layers is None or (hidden_size is None) == (num_kv_heads is None or head_dim is None):
        raise click.UsageError(f"say what is to be sized: --model, or {_SHAPE_FLAGS}")
    if hidden_size is not None:
        return KVShape(num_layers=num_layers, num_kv_heads=1, key_dim=hidden_size, value_dim=hidden_size)
    assert num_kv_heads is not None
    assert head_dim is not None
    return KVShape(num_layers=num_layers, num_kv_heads=num_kv_heads, key_dim=head_dim, value_dim=head_dim)


def _figures(shape: KVShape, dtype: str, asked: _Asked) -> dict[str, Any]:
    per_token = shape.bytes_per_token(dtype)
    figures: dict[str, Any] = {
        "formula": shape.formula(dtype),
        "bytes_per_token": per_token,
        "length": asked.length,
        "bytes_per_sequence": per_token * asked.length,
        "batch": asked.batch,
        "bytes_per_batch": per_token * asked.length * asked.batch,
    }
    if asked.mean_length is not None:
        lengths = [asked.mean_length] * asked.batch
        figures |= {
            "used_bytes": per_token * sum(lengths),
            "reserved_utilisation": reserved_utilisation(lengths, reserved_length=asked.length),
            "paged_utilisation": paged_utilisation(lengths, block_size=asked.block_size),
        }
    if asked.memory is not None:
        activations = int(asked.memory * ACTIVATION_SHARE) if asked.activations is None else asked.activations
        kv_bytes = kv_budget_bytes(
            memory_bytes=asked.memory,
            utilization=asked.utilization,
            weight_bytes=asked.weights or 0,
            activation_bytes=activations,
        )
        figures |= {
            "memory_bytes": asked.memory,
            "utilization": asked.utilization,
            "weight_bytes": asked.weights or 0,
            "activation_bytes": activations,
            "kv_bytes": kv_bytes,
            "kv_tokens": kv_bytes // (per_token * asked.block_size) * asked.block_size,
            "safe_concurrency": safe_concurrency(kv_bytes=kv_bytes, bytes_per_token=per_token, length=asked.length),
        }
    return figures


def _lines(formula: str, asked: _Asked, figures: dict[str, Any]) -> list[Text]:
    lines = [
        _row("KV per token", size(figures["bytes_per_token"]), formula),
        _row("per sequence", size(figures["bytes_per_sequence"]), f"x {asked.length:,} tokens"),
    ]
    if asked.batch > 1:
        lines.append(_row("per batch", size(figures["bytes_per_batch"]), f"x {asked.batch:,} sequences"))
    if asked.mean_length is not None:
        lines += [
            _row("really used", size(figures["used_bytes"]), f"at {asked.mean_length:,} tokens on average"),
            _row("", f"{figures['reserved_utilisation']:.0%}", f"of the memory, with {asked.length:,} tokens reserved"),
            _row(
                "", f"{figures['paged_utilisation']:.0%}", f"of the memory, with blocks of {asked.block_size} on demand"
            ),
        ]
    if asked.memory is not None:
        lines += [
            _row("KV cache", size(figures["kv_bytes"]), _subtraction(figures)),
            _row("", f"{figures['kv_tokens']:,}", "tokens"),
            _row("safe", f"{figures['safe_concurrency']:,}", f"sequences of {asked.length:,} tokens at the same time"),
        ]
        if not figures["safe_concurrency"]:
            fits = f"{figures['kv_tokens']:,} tokens" if figures["kv_tokens"] else "nothing"
            lines.append(Text(f"  not one such sequence fits, {fits} would: shorten --length first", style="red"))
    return lines


def _subtraction(figures: dict[str, Any]) -> str:
    return (
        f"{size(figures['memory_bytes'])} x {figures['utilization']:g} - {size(figures['weight_bytes'])} of weights "
        f"- {size(figures['activation_bytes'])} of activations"
    )


def _row(label: str, value: str, more: str) -> Text:
    return Text(f"  {label:<15}") + Text(f"{value:>12}  ", style="bold") + Text(more)
