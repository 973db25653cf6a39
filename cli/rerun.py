"""``kvq rerun``: compute the answer of a job again and compare."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvq.cli.batches import open_store
from kvq.cli.options import settings_options
from kvq.cli.output import count, print_json, say
from kvq.engine.model_presence import require_model
from kvq.worker.config import Settings
from kvq.worker.errors import RowError

if TYPE_CHECKING:
    from kvq.engine.engine import Engine

EXIT_DIFFERENT = 3


@click.command("rerun")
@click.argument("job", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@settings_options("db", "served_model_name", engine=True)
def command(job: str, settings: Settings, as_json: bool) -> int:
    """Compute the answer of a job again, with the seed and the options it had, and say whether it is the same.

    JOB is a job id, as `kvq results BATCH --json` shows it. Nothing is written: the stored answer stays.
    Answers stay the same as long as model, dtype and device do, whatever else is computed beside them.
    Log-probabilities that a row asked for are part of its answer; up to 1e-4 is rounding, and so it is in each
    dimension of an embedding.

    Exit codes: 0 the same, 3 another answer or other log-probabilities, 2 no such job, or one without an answer.
    """
    from kvq.worker.rerun import Verdict, rerun

    with open_store(settings) as store:
        row, body = store.job(job), store.job_body(job)
    if row is None:
        raise RowError("invalid_value", f"there is no job {job}; `kvq results BATCH --json` shows the ids")
    if body is None:
        raise RowError("invalid_value", f"the prompt of job {job} was forgotten (store_prompts=false)")
    config = replace(settings.engine_config(), generation_config="vllm")
    require_model(config)

    def load() -> Engine:
        from kvq.engine.engine import Engine  # torch takes seconds to import

        return Engine.load(config)

    result = rerun(row, body, load, served_model_names=settings.served_names())
    if result.model_before != result.model_now:
        say(f"the answer is of {result.model_before}, this is {result.model_now}")
    if as_json:
        print_json({"verdict": result.verdict, "same": result.verdict is Verdict.SAME, "result": result})
    elif result.verdict is Verdict.DIFFERENT:
        for one in result.differences:
            unit = "character" if result.vector_difference is None else "dimension"
            click.echo(f"choice {one.choice} differs from {unit} {one.position} on")
            click.echo(f"  was: {one.before!r}")
            click.echo(f"  now: {one.after!r}")
    else:
        same = "same" if result.verdict is Verdict.SAME else "same text, other log-probabilities"
        if result.vector_difference is None:
            tokens = count(result.completion_tokens, "token")
            click.echo(f"{same}: {count(result.num_choices, 'choice')}, {tokens}, seed {result.seed}")
        else:
            click.echo(f"{same}: {count(result.num_choices, 'vector')}")
        for what, by in (("log-probabilities", result.logprob_difference), ("vectors", result.vector_difference)):
            if by is not None:
                click.echo(f"{what}: " + (f"they differ by {by:.1g} at most" if by else "the same, to the bit"))
    return 0 if result.verdict is Verdict.SAME else EXIT_DIFFERENT
