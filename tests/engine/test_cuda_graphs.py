"""Steps padded to the shapes of captured graphs compute what they would as they are; without a GPU they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvq import LLM, SamplingParams
from kvq.engine import prefix_groups
from kvq.engine.cuda_graphs import Bucket, StepGraphs, buckets
from kvq.engine.inputs import StepInputs, build_inputs
from kvq.engine.request import RequestOutput
from kvq.engine.step import SampleSpec, ScheduledSequence, StepPlan

PROMPTS = [[*range(3, 35), 40 + i] for i in range(5)] + [[9, 8, 7], [5] * 20, [6] * 90]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True, n=2 if i == 1 else 1) for i in range(len(PROMPTS))
]

_DRAW = SampleSpec(params=SamplingParams(temperature=0), seed=0, index=0, position=1, token_ids=[7], num_prompt=1)


def _tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_padded_steps_give_the_same_tokens(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_KERNELS", "0")
    monkeypatch.setattr(prefix_groups, "grouping_pays", lambda **group: group["prefix_len"] > 0)
    settings = {"kv_cache_memory": 64 << 20, "max_model_len": 256, "max_num_seqs": 40, "max_num_batched_tokens": 64}
    expected = _tokens(LLM(str(tiny), **settings).generate(PROMPTS, PARAMS))
    llm = LLM(str(tiny), **settings)
    runner = llm.engine._runner
    model, store = runner._model, runner._store
    seen: list[Bucket | tuple[int, ...]] = []

    def forward(inputs: StepInputs) -> torch.Tensor:
        seen.append(tuple(inputs.input_ids.shape))
        return model.forward(inputs, store).logits

    runner._group_prefixes = True
    runner._graphs = StepGraphs(
        forward,
        shapes=buckets(max_num_seqs=40, max_model_len=256, grouped=True),
        block_size=store.block_size,
        padding_block=store.padding_block,
        capture=lambda call: call,
        device=torch.device("cpu"),
    )
    for keys in (*store.keys, *store.values):
        keys.fill_(torch.nan)  # what padding reads must not matter
    assert _tokens(llm.generate(PROMPTS, PARAMS)) == expected
    assert runner._graphs.num_replays == len(seen) > 5
    assert llm.stats().grouped_decode_steps > 0
    assert {shape[1] for shape in seen} <= {1, 2, 4, 8, 16, 8 + 64, 8 + 256, 32 + 64}


def test_all_passes_leave_their_logits_in_one_buffer() -> None:
    graphs = StepGraphs(
        lambda inputs: inputs.position_ids[0, inputs.logits_rows, None].expand(-1, 5).float(),
        shapes=buckets(max_num_seqs=4, max_model_len=64, grouped=False),
        block_size=16,
        padding_block=9,
        capture=lambda call: call,
        device=torch.device("cpu"),
    )
    steps = []
    for number in (1, 3):
        entries = [
            ScheduledSequence(seq_id=i, token_ids=[7], start=10 + i, block_table=[i], samples=(_DRAW,))
            for i in range(number)
        ]
        plan = StepPlan(sequences=tuple(entries), num_decodes=number, copies=())
        steps.append(graphs.forward(build_inputs(plan, block_size=16, device=torch.device("cpu"))))
    assert steps[1].tolist() == [[10.0] * 5, [11.0] * 5, [12.0] * 5]
    assert steps[0].data_ptr() == steps[1].data_ptr()


def test_the_smallest_bucket_that_fits_is_taken_and_all_fit_the_limits() -> None:
    found = buckets(max_num_seqs=100, max_model_len=10_000, grouped=False)
    assert all(b.num_decodes <= 100 and b.context <= 10_000 and b.num_groups == 0 for b in found)
    assert {b.context for b in found} == {2048, 8192, 10_000}
    decodes = [b.num_decodes for b in found if not b.num_prefills and b.context == 2048]
    assert decodes == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert [b.num_decodes for b in buckets(max_num_seqs=1, max_model_len=64, grouped=False)] == [1]


def test_large_passes_have_room_for_as_many_groups_as_a_step_may_have() -> None:
    found = buckets(max_num_seqs=128, max_model_len=2048, grouped=True)
    rooms = {b.num_decodes: set() for b in found}
    for bucket in found:
        rooms[bucket.num_decodes].add(bucket.num_groups)
    most = prefix_groups.MOST_GROUPS + 2
    assert (rooms[2], rooms[4], rooms[24], rooms[128]) == ({0}, {0, 8}, {0, 8}, {0, 8, most})


def test_no_pass_has_room_for_more_partial_results_than_a_card_can_spare() -> None:
    found = buckets(max_num_seqs=512, max_model_len=131_072, grouped=False)
    assert max(b.num_decodes * -(-b.context // 512) for b in found) == 1 << 14
    assert {b.num_decodes for b in found if b.context == 131_072} == {1, 2, 4, 8, 16, 24, 32, 48, 64}
    assert {b.num_decodes for b in found if b.context == 8192 and not b.num_prefills} >= {256, 384, 512}
