"""``kvq plan``: what a file of jobs will take, without running it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from kvq.cli.batches import open_store
from kvq.cli.main import EXIT_ROWS_FAILED
from kvq.cli.options import FILE_NAME, json_option, settings_options
from kvq.cli.output import count, jsonable, print_json, say, seconds, stdout_console
from kvq.cli.sizes import bytes_option, size
from kvq.engine.model_presence import require_model
from kvq.worker.config import Settings
from kvq.worker.files import FileReport, open_input
from kvq.worker.submission import describe_bad_rows

if TYPE_CHECKING:
    from kvq.engine.memory_plan import MemoryPlan
    from kvq.worker.plan import FilePlan
    from kvq.worker.plan_sharing import RowGroup, Sharing, SharingBreak
    from kvq.worker.plan_texts import TextSplit
    from kvq.worker.store_figures import BatchCost

_TELL_EVERY_S = 5.0


@click.command("plan")
@click.argument("file", type=FILE_NAME)
@bytes_option("--memory", "Memory of the GPU to plan for, such as 80GiB.  [default: this machine's CPU]")
@bytes_option("--weights", "Bytes of the loaded weights.  [default: the model's parameters, counted]")
@settings_options("db", "served_model_name", engine=True)
@json_option
def command(file: str, memory: int | None, weights: int | None, settings: Settings, as_json: bool) -> int:
    """Tell what a file of jobs will take, without running it.

    Reads the model's tokenizer and configuration, no weights, and needs no GPU: which rows will fail, what
    the prompts share and where the sharing ends, how many sequences fit into a memory, and which max_model_len
    and max_num_seqs to choose. If the database holds results of the same model, also how long it will take.

    Exit codes: 0 all rows can run, 3 some will fail, 2 bad usage or input.
    """
    from kvq.worker.plan import plan_file

    require_model(settings.engine_config())
    with open_input(file) as source:
        plan = plan_file(
            source,
            settings,
            memory_bytes=memory,
            weight_bytes=weights,
            history=_history(settings),
            on_rows=_telling(file),
        )
    if as_json:
        print_json(_as_json(plan))
    else:
        _print(plan)
    return EXIT_ROWS_FAILED if plan.bad else 0


def _history(settings: Settings) -> list[BatchCost]:
    """What is known of earlier batches; the database need not exist."""
    path = settings.db.removeprefix("sqlite:///")
    if "://" not in path and not Path(path).exists() and "db" not in settings.sources:
        return []
    with open_store(settings) as store:
        return store.batch_costs(settings.served_names())


def _telling(file: str) -> Callable[[int], None]:
    """Say now and then how far the reading is."""
    last_s = time.monotonic()

    def tell(num_rows: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _TELL_EVERY_S:
            last_s = time.monotonic()
            say(f"{file}: {count(num_rows, 'row')} read")

    return tell


def _as_json(plan: FilePlan) -> dict[str, Any]:
    sharing = plan.sharing
    document: dict[str, Any] = jsonable(plan)
    document["sharing"]["shared_tokens"] = sharing.shared_tokens
    document["memory"]["num_tokens"] = plan.memory.num_tokens
    return document


def _print(plan: FilePlan) -> None:
    console = stdout_console()
    for line in _lines(plan):
        console.print(line, soft_wrap=True)


def _lines(plan: FilePlan) -> Iterator[Text]:
    yield Text.assemble((plan.path, "bold"), f"  for {plan.model}")
    if plan.bad:
        report = FileReport(
            path=plan.path, num_lines=0, num_good=plan.num_rows - len(plan.bad), bad=plan.bad, sha256=""
        )
        yield Text(describe_bad_rows(report), style="red")
    num_good = plan.num_rows - len(plan.bad)
    yield _row("rows", f"{plan.num_rows:,}", f"{num_good:,} can run, {len(plan.bad):,} will fail")
    if not num_good:
        return
    yield from _sharing_lines(plan.sharing)
    output = f"at most; longest prompt {plan.longest_prompt:,}"
    if plan.num_open_ended:
        output += f"; {count(plan.num_open_ended, 'row')} without max_tokens not counted"
    yield _row("output tokens", f"{plan.most_output_tokens:,}", output)
    yield from _group_lines(plan.sharing.groups)
    yield from _break_lines(plan.sharing.breaks)
    yield from memory_lines(plan.memory)
    yield from _advice_lines(plan)
    yield from _time_lines(plan)


def _sharing_lines(sharing: Sharing) -> Iterator[Text]:
    share = sharing.shared_tokens / sharing.total_tokens
    yield _row("prompt tokens", f"{sharing.total_tokens:,}", "if every prompt were computed whole")
    yield _row("distinct", f"{sharing.distinct_tokens:,}", "if nothing is computed twice")
    yield _row("shared", f"{sharing.shared_tokens:,}", f"{share:.1%} of all, in prefixes that rows have in common")
    if sharing.num_repeats:
        yield _row("repeats", f"{sharing.num_repeats:,}", "rows whose prompt is equal to an earlier one's")


def _group_lines(groups: tuple[RowGroup, ...]) -> Iterator[Text]:
    if groups:
        yield from _title("largest groups")
    for group in groups:
        yield Text(
            f"  {count(group.num_rows, 'row')} share their first {group.shared_tokens:,} tokens, "
            f"which saves {group.saved_tokens:,}"
        )
        yield from _split_lines(group.split, group.lines, f"then go on in {group.num_branches:,} ways")


def _break_lines(breaks: tuple[SharingBreak, ...]) -> Iterator[Text]:
    if breaks:
        yield from _title("what keeps rows from sharing more", "bold yellow")
    for broken in breaks:
        yield Text(
            f"  {count(broken.num_rows, 'row')} part after {broken.shared_tokens:,} tokens into "
            f"{broken.num_variants:,} variants; then about {broken.repeated_tokens:,} tokens are the same again"
        )
        yield from _split_lines(broken.split, broken.lines, "they part")
        yield Text(
            f"    the same again from “{_flat(broken.repeated_begins)}”: put what differs after it, and about "
            f"{broken.lost_tokens:,} prompt tokens less are computed",
            style="yellow",
        )


def _split_lines(split: TextSplit | None, lines: tuple[int, int], what: str) -> Iterator[Text]:
    if split is None:
        yield Text(f"    their prompts are equal (lines {lines[0]} and {lines[1]}, for example)")
        return
    yield Text(f"    {what}: {split.field}, character {split.character:,}, after “{_flat(split.before)}”")
    for line_no, text in zip(lines, (split.one, split.other), strict=True):
        yield Text(f"      line {line_no}: " + (f"“{_flat(text)}”" if text else "ends there"))


def memory_lines(memory: MemoryPlan) -> Iterator[Text]:
    """The memory of an engine, for people."""
    yield from _title("memory")
    yield _row("KV per token", size(memory.bytes_per_token), memory.formula)
    what = "of the GPU" if memory.on_gpu else "free for a CPU"
    yield _row("memory", size(memory.memory_bytes), what)
    types = memory.dtype
    if memory.quantization is not None:
        types = f"{memory.quantization} in the layers, {memory.dtype} besides"
    yield _row("weights", size(memory.weight_bytes), types)
    if memory.activation_bytes:
        yield _row("activations", size(memory.activation_bytes), "set aside for a step's intermediate results")
    yield _row("KV cache", size(memory.kv_bytes), f"{memory.num_tokens:,} tokens in blocks of {memory.block_size}")
    if memory.problem is not None:
        yield Text(f"  the engine would not start: {memory.problem}", style="red")


def _advice_lines(plan: FilePlan) -> Iterator[Text]:
    if plan.advice is None or plan.memory.num_tokens == 0:
        return
    yield from _title("suggested settings")
    yield Text(f"  --max-model-len {plan.advice.max_model_len} --max-num-seqs {plan.advice.max_num_seqs}", style="bold")
    for reason in plan.advice.reasons:
        yield Text(f"    {reason}")


def _time_lines(plan: FilePlan) -> Iterator[Text]:
    if plan.time is None:
        return
    yield from _title("time")
    if plan.time.prompt_tokens_per_s == plan.time.output_tokens_per_s:
        rates = f"{plan.time.prompt_tokens_per_s:,.0f} computed prompt and output tokens/s"
    else:
        rates = (
            f"{plan.time.prompt_tokens_per_s:,.0f} prompt tokens/s and {plan.time.output_tokens_per_s:,.0f} "
            "output tokens/s"
        )
    batches = "1 earlier batch" if plan.time.num_batches == 1 else f"{plan.time.num_batches} earlier batches"
    yield Text(f"  at most about {seconds(plan.time.seconds)}: {batches} of this model ran at {rates}")


def _title(text: str, style: str = "bold") -> Iterator[Text]:
    yield Text()
    yield Text(text, style=style)


def _row(label: str, value: str, more: str) -> Text:
    return Text(f"  {label:<15}") + Text(f"{value:>12}  ", style="bold") + Text(more)


def _flat(text: str) -> str:
    """On one line, and without what would move the cursor."""
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in text)
