"""transformers: its own continuous batching (``generate_batch``'s manager), sdpa attention over a paged cache."""

from __future__ import annotations

from typing import Any

from bench.engines.protocol import WARM_UP, Adapter, Job, JobResult, main

_PAGE_SIZE = 256  # transformers' own
_DEFAULT_CACHE_TOKENS = 1 << 16  # left to itself it takes most of the machine's memory
_MAX_BATCH_TOKENS = 512


class TransformersAdapter(Adapter):
    """transformers in this process."""

    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(self.task.num_threads)
        self._attention = str(self.task.settings.get("attn_implementation", "sdpa"))
        self._tokenizer = AutoTokenizer.from_pretrained(self.task.model)
        self._network = AutoModelForCausalLM.from_pretrained(
            self.task.model, dtype=getattr(torch, self.task.dtype), attn_implementation=self._attention
        ).eval()
        self.run([WARM_UP])

    def run(self, jobs: list[Job]) -> list[JobResult]:
        """One manager per kind of sampling, since its generation settings hold for all of its requests."""
        results: dict[str, JobResult] = {}
        kinds: dict[tuple[Any, ...], list[Job]] = {}
        for job in jobs:
            s = job.sampling
            kinds.setdefault((s.temperature, s.top_p, s.ignore_eos), []).append(job)
        for kind in kinds.values():
            results |= self._run_kind(kind)
        return [results[job.custom_id] for job in jobs]

    def _run_kind(self, jobs: list[Job]) -> dict[str, JobResult]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        sampling = jobs[0].sampling
        config = GenerationConfig(
            do_sample=sampling.temperature > 0,
            max_new_tokens=max(job.sampling.max_tokens for job in jobs),
            eos_token_id=-1 if sampling.ignore_eos else self._network.generation_config.eos_token_id,
            pad_token_id=self._network.generation_config.pad_token_id or 0,
        )
        if sampling.temperature > 0:
            config.temperature, config.top_p = sampling.temperature, sampling.top_p
        batching = ContinuousBatchingConfig(
            page_size=_PAGE_SIZE,
            num_blocks=-(-(self.task.kv_cache_tokens or _DEFAULT_CACHE_TOKENS) // _PAGE_SIZE),
            max_batch_tokens=_MAX_BATCH_TOKENS,
        )
        manager = self._network.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
        manager.start()
        try:
            prompts: dict[str, list[int]] = {}
            num_expected = 0
            for job in jobs:
                encoded = self._tokenizer.apply_chat_template(job.messages, add_generation_prompt=True)
                prompts[job.custom_id] = list(encoded["input_ids"])
                for sample in range(job.sampling.n):
                    manager.add_request(
                        prompts[job.custom_id],
                        request_id=f"{job.custom_id}#{sample}",
                        max_new_tokens=job.sampling.max_tokens,
                    )
                    num_expected += 1
            samples: dict[str, list[list[int]]] = {}
            while num_expected:
                output = manager.get_result(timeout=5)
                if output is None:
                    if not manager.is_running():
                        raise RuntimeError("transformers' generation thread ended before all requests were answered")
                    continue
                if not output.is_finished():
                    continue
                if output.error:
                    raise RuntimeError(f"{output.request_id}: {output.error}")
                samples.setdefault(output.request_id.rpartition("#")[0], []).append(list(output.generated_tokens))
                num_expected -= 1
        finally:
            manager.stop(block=True)
        return {
            job.custom_id: JobResult(
                custom_id=job.custom_id,
                texts=self._tokenizer.batch_decode(samples[job.custom_id], skip_special_tokens=True),
                prompt_tokens=len(prompts[job.custom_id]),
                output_tokens=sum(len(ids) for ids in samples[job.custom_id]),
                token_ids=samples[job.custom_id],
            )
            for job in jobs
        }

    def describe(self) -> tuple[str, dict[str, Any]]:
        import transformers

        settings = {
            "dtype": self.task.dtype,
            "attn_implementation": self._attention,
            "page_size": _PAGE_SIZE,
            "max_batch_tokens": _MAX_BATCH_TOKENS,
        }
        return transformers.__version__, settings


if __name__ == "__main__":
    main(TransformersAdapter)
