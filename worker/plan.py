"""FilePlan: what a file of jobs will take, told without running it.

Owns the walk from a file to its figures: which rows fail, what the prompts share and where that ends, what fits into a
memory, how long it takes if earlier batches are a guide. Reads the tokenizer and the model's configuration, no weights.
Invariant: a row that the plan lets pass is one that a worker with these settings lets pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvq.engine.advice import Advice, RequestMix, advise
from kvq.engine.memory_plan import MemoryPlan
from kvq.engine.model_shape import ModelShape
from kvq.engine.pooling import pooling_type
from kvq.engine.request import PoolingType
from kvq.engine.request_limits import RequestLimits
from kvq.engine.tokenizer import Tokenizer
from kvq.worker.config import Settings
from kvq.worker.files import BadRow, InputFile
from kvq.worker.plan_rows import PlannedRows, read_rows
from kvq.worker.plan_sharing import Sharing, describe_sharing
from kvq.worker.plan_time import TimeEstimate, estimate_time
from kvq.worker.store_figures import BatchCost


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """What is known of a file before it runs. Without a row that can run there is no advice and no time.

    ``most_output_tokens`` are those of all samples that are bounded by max_tokens; ``num_open_ended`` rows are not.
    """

    path: str
    model: str
    num_rows: int
    bad: tuple[BadRow, ...]
    longest_prompt: int
    most_output_tokens: int
    num_open_ended: int
    sharing: Sharing
    memory: MemoryPlan
    advice: Advice | None
    time: TimeEstimate | None


def plan_file(
    source: InputFile,
    settings: Settings,
    *,
    memory_bytes: int | None = None,
    weight_bytes: int | None = None,
    history: Sequence[BatchCost] = (),
    on_rows: Callable[[int], None] = lambda _: None,
) -> FilePlan:
    """Plan a file.

    Args:
        memory_bytes, weight_bytes: as MemoryPlan.of takes them.
        history: what earlier batches of this model took.
        on_rows: told the number of rows read so far, now and then.

    Raises:
        FileUnreadable, ConfigError, ModelError: as those who are asked say.
    """
    config = settings.engine_config()
    names = settings.served_names()
    adapters = tuple(config.lora_paths)
    report = source.check(names, adapters)
    shape = ModelShape.load(config)
    memory = MemoryPlan.of(config, shape, memory_bytes=memory_bytes, weight_bytes=weight_bytes)
    limits = RequestLimits(max_model_len=memory.max_model_len, vocab_size=shape.vocab_size)
    rows = read_rows(
        source,
        tokenizer=Tokenizer.load(config),
        limits=limits,
        adapters=adapters,
        takes_mean=pooling_type(config) is PoolingType.MEAN,
        on_rows=on_rows,
    )
    sharing = describe_sharing(rows, source)
    asked = _Asked.of(rows, max_model_len=memory.max_model_len)
    mix = asked.mix(rows, sharing)
    return FilePlan(
        path=report.path,
        model=names[0],
        num_rows=report.num_rows,
        bad=tuple(sorted((*report.bad, *rows.bad), key=lambda row: row.line_no)),
        longest_prompt=max(rows.num_tokens, default=0),
        most_output_tokens=asked.output_tokens,
        num_open_ended=asked.num_open_rows,
        sharing=sharing,
        memory=memory,
        advice=None if mix is None else advise(mix, memory, model_limit=shape.max_position_embeddings),
        time=None
        if mix is None
        else estimate_time(
            history,
            computed_tokens=sharing.distinct_tokens,
            output_tokens=asked.output_tokens,
            num_open_ended=asked.num_open_samples,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the rows ask for beyond their prompts."""

    output_tokens: int
    longest_bounded: int
    num_open_rows: int
    num_open_samples: int
    open_tokens: int  # what open-ended answers could take at most

    @classmethod
    def of(cls, rows: PlannedRows, *, max_model_len: int) -> _Asked:
        output_tokens = longest = num_open_rows = num_open_samples = open_tokens = 0
        for prompt, max_tokens, num_samples in zip(rows.num_tokens, rows.max_tokens, rows.num_samples, strict=True):
            room = max_model_len - prompt
            if max_tokens == 0:
                num_open_rows += 1
                num_open_samples += num_samples
                open_tokens += room * num_samples
            else:
                longest = max(longest, prompt + max_tokens)
                output_tokens += min(room, max_tokens) * num_samples
        return cls(
            output_tokens=output_tokens,
            longest_bounded=longest,
            num_open_rows=num_open_rows,
            num_open_samples=num_open_samples,
            open_tokens=open_tokens,
        )

    def mix(self, rows: PlannedRows, sharing: Sharing) -> RequestMix | None:
        """The same for advice; None without rows."""
        if not len(rows):
            return None
        return RequestMix(
            num_requests=len(rows),
            distinct_prompt_tokens=sharing.distinct_tokens,
            longest_prompt=max(rows.num_tokens),
            longest_request=max(self.longest_bounded, max(rows.num_tokens) + 1),
            num_open_ended=self.num_open_rows,
            mean_output_tokens=(self.output_tokens + self.open_tokens) / len(rows),
        )
