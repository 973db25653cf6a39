"""The parts of a plan that need no model: texts that part, and time from history."""

from __future__ import annotations

import pytest

from kvq.worker.bodies import parse_body
from kvq.worker.jobs import Endpoint
from kvq.worker.plan_texts import Passage, find_repeat, find_split, passages
from kvq.worker.plan_time import estimate_time
from kvq.worker.store_figures import BatchCost


def prompt(text: str) -> tuple[Passage, ...]:
    return (Passage(field="prompt", text=text),)


def cost(*, computed: int, output: int, busy_s: float) -> BatchCost:
    return BatchCost(batch_id="b", num_jobs=10, computed_tokens=computed, output_tokens=output, busy_s=busy_s)


def test_texts_part_at_the_first_character_that_differs() -> None:
    split = find_split(prompt("abcdef"), prompt("abcxyz"))
    assert split is not None
    assert (split.character, split.before, split.one, split.other) == (4, "abc", "def", "xyz")


def test_a_text_that_ends_parts_from_one_that_goes_on() -> None:
    split = find_split(prompt("abc"), prompt("abcd"))
    assert split is not None
    assert (split.one, split.other) == ("", "d")


def test_equal_texts_do_not_part() -> None:
    assert find_split(prompt("abc"), prompt("abc")) is None


def test_a_message_more_is_a_split_at_its_beginning() -> None:
    def chat(*texts: str) -> tuple[Passage, ...]:
        messages = [{"role": "user", "content": text} for text in texts]
        return passages(parse_body(Endpoint.CHAT, {"messages": messages}))

    split = find_split(chat("a", "b"), chat("a"))
    assert split is not None
    assert (split.field, split.character, split.one, split.other) == ("messages[1] (user)", 1, "b", "")


def test_what_is_equal_again_is_found_behind_a_difference_of_another_length() -> None:
    common = " ".join(f"word{i}" for i in range(50))
    repeat = find_repeat(prompt(f"at 7 o'clock {common} one"), prompt(f"at 11:30:15 sharp {common} other"))
    assert repeat is not None
    assert repeat.begins.startswith("word0")
    assert repeat.num_characters == len(common) + 1


def test_texts_that_have_little_in_common_repeat_nothing() -> None:
    assert find_repeat(prompt("one and the same"), prompt("quite another thing")) is None


def test_two_rates_are_found_where_batches_tell_them_apart() -> None:
    history = [
        cost(computed=10_000, output=100, busy_s=10_000 / 1000 + 100 / 50),
        cost(computed=1_000, output=2_000, busy_s=1_000 / 1000 + 2_000 / 50),
    ]
    estimate = estimate_time(history, computed_tokens=5_000, output_tokens=500, num_open_ended=0)
    assert estimate is not None
    assert estimate.prompt_tokens_per_s == pytest.approx(1000)
    assert estimate.output_tokens_per_s == pytest.approx(50)
    assert estimate.seconds == pytest.approx(15)


def test_one_batch_gives_one_rate_for_all_tokens() -> None:
    estimate = estimate_time(
        [cost(computed=900, output=100, busy_s=10)], computed_tokens=50, output_tokens=50, num_open_ended=0
    )
    assert estimate is not None
    assert estimate.seconds == pytest.approx(1)


def test_open_ended_answers_are_taken_to_be_as_long_as_earlier_ones() -> None:
    history = [cost(computed=900, output=100, busy_s=10)]  # 10 tokens a job
    estimate = estimate_time(history, computed_tokens=0, output_tokens=0, num_open_ended=10)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(1)


def test_no_history_gives_no_time() -> None:
    assert estimate_time([], computed_tokens=1, output_tokens=1, num_open_ended=0) is None
