"""kvq: the LLM class, given the file as it is."""

from __future__ import annotations

from typing import Any

from bench.engines.protocol import WARM_UP, Adapter, Job, JobResult, Sampling, main


class KvqAdapter(Adapter):
    """kvq in this process."""

    def load(self) -> None:
        from kvq import LLM

        task = self.task
        settings: dict[str, Any] = {
            "dtype": task.dtype,
            "device": "cpu",
            "max_model_len": task.max_model_len,
        }
        if task.kv_cache_tokens is not None:
            block_size = task.settings.get("block_size", 16)
            settings["num_gpu_blocks_override"] = task.kv_cache_tokens // block_size
            settings["max_model_len"] = min(task.max_model_len, task.kv_cache_tokens // block_size * block_size)
        if task.dtype == "int8":
            settings |= {"dtype": "float32", "quantization": "int8"}
        self._settings = settings | task.settings
        self._llm = LLM(task.model, **self._settings)
        self.run([WARM_UP])
        self._before = self._llm.stats()

    def run(self, jobs: list[Job]) -> list[JobResult]:
        outputs = self._llm.chat([job.messages for job in jobs], [_params(job.sampling) for job in jobs])
        return [
            JobResult(
                custom_id=job.custom_id,
                texts=[sample.text for sample in output.outputs],
                prompt_tokens=len(output.prompt_token_ids),
                output_tokens=sum(len(sample.token_ids) for sample in output.outputs),
                token_ids=[list(sample.token_ids) for sample in output.outputs],
            )
            for job, output in zip(jobs, outputs, strict=True)
        ]

    def computed_prompt_tokens(self) -> int:
        return self._llm.stats().computed_prompt_tokens - self._before.computed_prompt_tokens

    def details(self) -> dict[str, Any]:
        stats = self._llm.stats()
        return {
            "steps": stats.steps - self._before.steps,
            "preemptions": stats.preemptions,
            "kv_usage_peak": stats.kv_usage_peak,
            "forward_s": stats.forward_s - self._before.forward_s,
        }

    def describe(self) -> tuple[str, dict[str, Any]]:
        import kvq

        return kvq.__version__, self._settings


def _params(sampling: Sampling) -> Any:
    from kvq import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        n=sampling.n,
        ignore_eos=sampling.ignore_eos,
    )


if __name__ == "__main__":
    main(KvqAdapter)
