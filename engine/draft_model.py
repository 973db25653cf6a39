"""DraftModel: guesses by a second, smaller model with the same vocabulary.

Owns that model and a paged cache of its own, as many blocks as the large one has, so that nothing the large model does
(preemption, swapping, forks) touches it. Its KV of a sequence is computed when guesses are first wanted, shared
between sequences that begin alike, and given up when others need the room. Draws with the very noise that the large
model will draw with, so that sampled guesses agree wherever the distributions do. Invariant: it holds blocks only for
sequences that are alive.
Source: speculative decoding, Leviathan et al. (ICML 2023); common noise, Daliri et al. (arXiv 2408.07978, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from kvq.engine.cache_manager import CacheManager
from kvq.engine.config import EngineConfig
from kvq.engine.errors import ConfigError
from kvq.engine.inputs import build_inputs
from kvq.engine.kv_store import KVStore
from kvq.engine.model import Model
from kvq.engine.sampler import Sampler
from kvq.engine.sequence import Sequence
from kvq.engine.speculation import Reach
from kvq.engine.step import SampleSpec, ScheduledSequence, StepPlan
from kvq.engine.tokenizer import Tokenizer


def load_draft_model(
    config: EngineConfig, tokenizer: Tokenizer, *, device: torch.device, dtype: torch.dtype
) -> Model | None:
    """The network that ``speculative_model`` names; None where none is asked for.

    Raises:
        ConfigError: its vocabulary is another one.
        ModelError: it cannot be loaded or served.
    """
    if config.speculative_model is None:
        return None
    theirs = replace(
        config,
        model=config.speculative_model,
        tokenizer=None,
        quantization=None,
        deterministic=None,  # a guess changes no answer
        speculative_method="none",
        speculative_model=None,
        speculative_config=None,
        enable_lora=False,
        lora_modules=(),
    )
    vocabulary, other = tokenizer.hf.get_vocab(), Tokenizer.load(theirs).hf.get_vocab()
    if vocabulary != other:
        differing = len(vocabulary.items() ^ other.items())
        raise ConfigError(
            "speculative_model",
            f"{config.speculative_model} has another vocabulary than {config.model} ({len(other)} tokens against "
            f"{len(vocabulary)}, {differing} entries differ); give a model with the same tokenizer",
        )
    return Model.load(theirs, device=device, dtype=dtype)


@dataclass(slots=True)
class _Draft:
    """A shadow that is to go on for ``num_guesses`` tokens after those given."""

    shadow: Sequence
    num_guesses: int
    num_given: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_given = len(self.shadow.token_ids)

    @property
    def done(self) -> bool:
        return len(self.shadow.token_ids) >= self.num_given + self.num_guesses


class DraftModel:
    """A Proposer. ``num_blocks`` of KV are its own.

    Args:
        vocab_size: columns of the large model's logits; the draft model's may be padded otherwise.
        max_num_tokens: most tokens computed in one pass.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        sampler: Sampler,
        vocab_size: int,
        max_num_tokens: int,
    ) -> None:
        device: torch.device = model.network.get_input_embeddings().weight.device
        self._model = model
        self._store = KVStore(
            model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.kv_dtype, device=device
        )
        self._cache = CacheManager(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=True)
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_num_tokens = max_num_tokens
        self._device = device
        self._shadows: dict[int, Sequence] = {}  # the sequences as this model has computed them, guesses included

    def reach(self, seq: Sequence, limit: int) -> Reach | None:
        """As many as are wanted, up to this model's own longest sequence."""
        most = self._model.max_position_embeddings
        left = limit if most is None else min(limit, most - len(seq.token_ids))
        return Reach(num_tokens=left, kind=0) if left > 0 else None

    @torch.inference_mode()
    def propose(self, lengths: Mapping[Sequence, int]) -> dict[int, list[int]]:
        """Let the model go on with each sequence for so many tokens; fewer where blocks are short."""
        drafts = {seq.seq_id: _Draft(shadow=self._follow(seq), num_guesses=n) for seq, n in lengths.items()}
        while any(not draft.done for draft in drafts.values()):
            self._compute(drafts)
        return {seq_id: draft.shadow.token_ids[draft.num_given :] for seq_id, draft in drafts.items()}

    def forget(self, seq_id: int) -> None:
        """The sequence ended: its blocks are free."""
        shadow = self._shadows.pop(seq_id, None)
        if shadow is not None:
            self._cache.release(shadow)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the blocks are those of the sequences."""
        self._cache.check_integrity(list(self._shadows.values()))

    def _follow(self, seq: Sequence) -> Sequence:
        """The sequence's shadow, brought to the tokens it has now; KV of guesses that were right is kept."""
        shadow = self._shadows.get(seq.seq_id)
        if shadow is None:
            shadow = self._shadows[seq.seq_id] = replace(
                seq, token_ids=[], num_computed=0, block_table=[], num_published=0, node=self._cache.tree.root(None)
            )
        same = 0
        for ours, theirs in zip(shadow.token_ids[: shadow.num_computed], seq.token_ids, strict=False):
            if ours != theirs:
                break
            same += 1
        shadow.num_computed = min(same, len(seq.token_ids) - 1)
        shadow.token_ids = list(seq.token_ids)
        self._cache.trim(shadow)
        return shadow

    def _compute(self, drafts: dict[int, _Draft]) -> None:
        """One pass: the next tokens of each shadow, and a guess for those that reach their end.

        Blocks are published as they are scheduled, so that a shadow shares those of the shadows before it.
        """
        entries, room = [], self._max_num_tokens
        for draft in drafts.values():
            if draft.done or room == 0:
                continue
            shadow = draft.shadow
            if not self._take_blocks(draft, drafts):
                draft.num_guesses = 0
                continue
            num_tokens = min(room, shadow.num_remaining)
            room -= num_tokens
            self._cache.publish(shadow, min(shadow.num_computed + num_tokens, draft.num_given))
            entries.append(_entry(shadow, num_tokens))
        if not entries:
            return
        entries.sort(key=lambda entry: len(entry.token_ids) != 1)
        plan = StepPlan(
            sequences=tuple(entries),
            num_decodes=sum(1 for entry in entries if len(entry.token_ids) == 1),
            copies=self._cache.take_copies(),
        )
        inputs = build_inputs(plan, block_size=self._store.block_size, device=self._device)
        drawn = self._sampler.sample(self._fit(self._model.forward(inputs, self._store).logits), inputs.samples, {})
        self._cache.end_step()
        for entry in entries:
            shadow = drafts[entry.seq_id].shadow
            shadow.num_computed += len(entry.token_ids)
            if entry.samples:
                shadow.token_ids.append(drawn[entry.seq_id][0].token_id)

    def _take_blocks(self, draft: _Draft, drafts: Mapping[int, _Draft]) -> bool:
        """Blocks for all that the draft will compute, idle shadows' if need be; False if there are none."""
        if self._has_blocks(draft):
            return True
        for other in self._shadows.values():
            if other.seq_id not in drafts:
                self._cache.release(other)
        return self._has_blocks(draft)

    def _has_blocks(self, draft: _Draft) -> bool:
        shadow = draft.shadow
        if not shadow.block_table:
            match = self._cache.match(shadow.token_ids)
            if self._cache.num_new_blocks(shadow, match) > self._cache.pool.num_free:
                return False
            self._cache.admit(shadow, match)
        return self._cache.extend(shadow, draft.num_given + draft.num_guesses - 1 - shadow.num_computed)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft model's logits [R, V'] as the large model's [R, V]: padding cut off or filled up."""
        missing = self._vocab_size - logits.shape[1]
        if missing == 0:
            return logits
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")).contiguous()


def _entry(shadow: Sequence, num_tokens: int) -> ScheduledSequence:
    end = shadow.num_computed + num_tokens
    state = shadow.state
    spec = SampleSpec(
        params=state.request.params,
        seed=state.seed,
        index=shadow.index,
        position=end,
        token_ids=shadow.token_ids,
        num_prompt=shadow.num_prompt,
        bad_word_ids=state.request.bad_word_ids,
    )
    return ScheduledSequence(
        seq_id=shadow.seq_id,
        token_ids=shadow.token_ids[shadow.num_computed : end],
        start=shadow.num_computed,
        block_table=shadow.block_table,
        samples=(spec,) if end == len(shadow.token_ids) else (),
    )
