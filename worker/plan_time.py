"""How long a file will take, if earlier batches of the same model are a guide.

Owns the fit of two rates, prompt and output tokens, to what batches took. Knows no SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.worker.store_figures import BatchCost


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """``seconds`` at most, as answers often end before their max_tokens.

    Rates are tokens per second; where the batches cannot tell prompt from output tokens both are the same.
    """

    seconds: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    num_batches: int


def estimate_time(
    history: Sequence[BatchCost], *, computed_tokens: int, output_tokens: int, num_open_ended: int
) -> TimeEstimate | None:
    """The time for so many computed prompt tokens and output tokens; None without history.

    ``num_open_ended`` samples are bounded by nothing: they are taken to be as long as earlier answers.
    """
    costs = [cost for cost in history if cost.busy_s > 0 and cost.computed_tokens + cost.output_tokens > 0]
    if not costs:
        return None
    per_prompt, per_output = _seconds_per_token(costs)
    num_jobs = sum(cost.num_jobs for cost in costs)
    output = output_tokens + num_open_ended * sum(cost.output_tokens for cost in costs) / num_jobs
    return TimeEstimate(
        seconds=computed_tokens * per_prompt + output * per_output,
        prompt_tokens_per_s=1 / per_prompt,
        output_tokens_per_s=1 / per_output,
        num_batches=len(costs),
    )


def _seconds_per_token(costs: Sequence[BatchCost]) -> tuple[float, float]:
    """Least squares of the relative error; one rate for all where two do not come out positive.

    An output token costs at least what a prompt token does, since a prompt's tokens are computed together.
    """
    xx = xy = yy = x = y = 0.0
    for cost in costs:
        a, b = cost.computed_tokens / cost.busy_s, cost.output_tokens / cost.busy_s
        xx, xy, yy, x, y = xx + a * a, xy + a * b, yy + b * b, x + a, y + b
    determinant = xx * yy - xy * xy
    if determinant > 1e-3 * xx * yy:
        per_prompt, per_output = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if 0 < per_prompt <= per_output:
            return per_prompt, per_output
    same = sum(cost.busy_s for cost in costs) / sum(cost.computed_tokens + cost.output_tokens for cost in costs)
    return same, same
