"""Which speculator the settings and the model ask for.

Owns the choice of method, and the proof that verifying guesses gives the logits of decoding, to the bit.
"""

from __future__ import annotations

import logging
import time

import torch

from kvq.engine.budget import MemoryBudget
from kvq.engine.config import EngineConfig
from kvq.engine.draft_model import DraftModel
from kvq.engine.inputs import build_inputs
from kvq.engine.kv_store import KVStore
from kvq.engine.model import Model
from kvq.engine.ngram import NgramProposer
from kvq.engine.request import SamplingParams
from kvq.engine.sampler import Sampler
from kvq.engine.speculation import Payoff, Proposer, Speculator
from kvq.engine.step import SampleSpec, ScheduledSequence, StepPlan
from kvq.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NUM_GIVEN = 8
_NUM_VERIFIED = 4


def make_speculator(
    config: EngineConfig,
    model: Model,
    draft_network: Model | None,
    *,
    tokenizer: Tokenizer,
    budget: MemoryBudget,
    max_num_tokens: int,
    runs_ahead: bool,
) -> Speculator | None:
    """The speculator of an engine; None where nothing is to be guessed.

    Args:
        max_num_tokens: most tokens computed in a step.
        runs_ahead: steps are planned before the tokens of the last one are known, which guesses would need.
    """
    proposer: Proposer
    unasked = config.speculative_method == "auto" and draft_network is None
    if unasked and (runs_ahead or not verifies_exactly(model)):
        return None
    if draft_network is not None:
        proposer = DraftModel(
            draft_network,
            num_blocks=budget.num_blocks,
            block_size=config.block_size,
            sampler=Sampler(tokenizer.eos_token_ids, draft_network.compiled_kernels),
            vocab_size=model.vocab_size,
            max_num_tokens=max_num_tokens,
        )
    elif unasked or config.speculative_method == "ngram":
        proposer = NgramProposer(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)
    else:
        return None
    if not unasked and not verifies_exactly(model):
        logger.warning(
            "speculation: this model's logits differ in their last bits with the number of tokens computed together; "
            "answers are the same but for near ties"
        )
    return Speculator(
        proposer,
        num_tokens=config.num_speculative_tokens,
        max_model_len=budget.max_model_len,
        clock=time.perf_counter,
        payoff=None if config.speculative_always else Payoff(),
    )


@torch.inference_mode()
def verifies_exactly(model: Model) -> bool:
    """True where tokens computed together have the logits, to the bit, that they have one after the other.

    The compiled kernels sum every row in one order; what a model computes besides may not, which a trial shows.
    """
    if model.by_row or model.is_exact:
        return True
    if model.compiled_kernels is None:
        return False
    block_size = model.compiled_kernels.block_size
    num_tokens = _NUM_GIVEN + _NUM_VERIFIED
    num_blocks = -(-num_tokens // block_size)
    device = torch.device("cpu")
    store = KVStore(model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.kv_dtype, device=device)
    token_ids = [(31 * i + 7) % model.vocab_size for i in range(num_tokens)]

    def logits(start: int, end: int) -> torch.Tensor:
        entry = ScheduledSequence(
            seq_id=0,
            token_ids=token_ids[start:end],
            start=start,
            block_table=list(range(num_blocks)),
            samples=tuple(_row(position, token_ids) for position in range(start + 1, end + 1)),
            num_drafts=end - start - 1,
        )
        plan = StepPlan(sequences=(entry,), num_decodes=int(end - start == 1), copies=())
        return model.forward(build_inputs(plan, block_size=block_size, device=device), store).logits

    logits(0, _NUM_GIVEN)
    together = logits(_NUM_GIVEN, num_tokens)
    single = [logits(at, at + 1) for at in range(_NUM_GIVEN, num_tokens)]
    return torch.equal(together, torch.cat(single))


def _row(position: int, token_ids: list[int]) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(temperature=0),
        seed=0,
        index=0,
        position=position,
        token_ids=token_ids,
        num_prompt=1,
    )
