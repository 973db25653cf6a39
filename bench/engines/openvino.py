"""OpenVINO GenAI: the continuous batching pipeline over an IR made by optimum-intel.

It shares a prefix only with jobs that are already done, so ``--group`` (one job of each prefix first, then the rest)
is the best a person can do for it.
"""

from __future__ import annotations

from typing import Any

from bench.engines.protocol import WARM_UP, Adapter, Job, JobResult, main

_BLOCK_SIZE = 32  # OpenVINO's, on a CPU
_GIB = 1 << 30


class OpenvinoAdapter(Adapter):
    """OpenVINO GenAI in this process."""

    def load(self) -> None:
        import openvino_genai  # type: ignore[import-not-found]

        task = self.task
        scheduler = openvino_genai.SchedulerConfig()
        self._scheduler_settings: dict[str, Any] = {
            "enable_prefix_caching": True,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "dynamic_split_fuse": True,
            "cache_size": 4,
        }
        if task.kv_cache_tokens is not None:
            del self._scheduler_settings["cache_size"]
            self._scheduler_settings["num_kv_blocks"] = task.kv_cache_tokens // _BLOCK_SIZE
        self._scheduler_settings |= task.settings
        for name, value in self._scheduler_settings.items():
            setattr(scheduler, name, value)
        self._properties = {
            "PERFORMANCE_HINT": "THROUGHPUT",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": task.num_threads,
        }
        if task.dtype == "float32":
            self._properties["INFERENCE_PRECISION_HINT"] = "f32"
            self._properties["KV_CACHE_PRECISION"] = "f32"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(task.model, scheduler, "CPU", self._properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self.run([WARM_UP])

    def run(self, jobs: list[Job]) -> list[JobResult]:
        import openvino_genai

        configs = []
        for job in jobs:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = job.sampling.max_tokens
            config.ignore_eos = job.sampling.ignore_eos
            config.num_return_sequences = job.sampling.n
            config.do_sample = job.sampling.temperature > 0
            if config.do_sample:
                config.temperature = job.sampling.temperature
                config.top_p = job.sampling.top_p
            if not config.ignore_eos:
                config.set_eos_token_id(self._tokenizer.get_eos_token_id())
            configs.append(config)
        inputs = [self._encode(job) for job in jobs]
        results = self._pipeline.generate(inputs, configs)
        return [
            JobResult(
                custom_id=job.custom_id,
                texts=[self._tokenizer.decode(ids) for ids in result.m_generation_ids],
                prompt_tokens=prompt.shape[-1],
                output_tokens=sum(len(ids) for ids in result.m_generation_ids),
                token_ids=[list(ids) for ids in result.m_generation_ids],
            )
            for job, prompt, result in zip(jobs, inputs, results, strict=True)
        ]

    def _encode(self, job: Job) -> Any:
        text = self._tokenizer.apply_chat_template(job.messages, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False).input_ids

    def describe(self) -> tuple[str, dict[str, Any]]:
        import openvino_genai

        properties = {name: str(value) for name, value in self._properties.items()}
        return openvino_genai.__version__, {**self._scheduler_settings, "properties": properties}


if __name__ == "__main__":
    main(OpenvinoAdapter)
