"""vLLM for CPUs: the LLM class, prefix caching on.

Two forms: eager in this process (the default: it starts in a third of the time and was the faster one on these
workloads), or ``--set enforce_eager=false`` for its compiled form. What vLLM reads from the environment is set
by ``bench.peers``, before the process starts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.engines.protocol import WARM_UP, Adapter, Job, JobResult, main

_BLOCK_SIZE = 32


class VllmAdapter(Adapter):
    """vLLM in this process."""

    def load(self) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        task = self.task
        settings: dict[str, Any] = {
            "dtype": task.dtype,
            "block_size": _BLOCK_SIZE,
            "max_model_len": task.max_model_len,
            "max_num_seqs": task.max_num_seqs,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "disable_log_stats": False,
        }
        if task.kv_cache_tokens is not None:
            settings["num_gpu_blocks_override"] = task.kv_cache_tokens // _BLOCK_SIZE
        self._settings = settings | task.settings
        self._llm = LLM(task.model, **self._settings)
        self.run([WARM_UP])
        self._before = self._counters()

    def run(self, jobs: list[Job]) -> list[JobResult]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=job.sampling.max_tokens,
                temperature=job.sampling.temperature,
                top_p=job.sampling.top_p,
                n=job.sampling.n,
                ignore_eos=job.sampling.ignore_eos,
            )
            for job in jobs
        ]
        outputs = self._llm.chat([job.messages for job in jobs], params, use_tqdm=False)
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

    def computed_prompt_tokens(self) -> int | None:
        after = self._counters()
        if not after:
            return None
        queries = after["queries"] - self._before.get("queries", 0)
        hits = after["hits"] - self._before.get("hits", 0)
        return int(queries - hits)

    def _counters(self) -> dict[str, float]:
        """Prompt tokens looked up in the prefix cache and found there."""
        names = {"vllm:prefix_cache_queries": "queries", "vllm:prefix_cache_hits": "hits"}
        return {names[m.name]: m.value for m in self._llm.get_metrics() if m.name in names}

    def describe(self) -> tuple[str, dict[str, Any]]:
        import vllm

        kept = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING")
        environment = {name: os.environ.get(name) for name in kept}
        environment["LD_PRELOAD"] = " ".join(Path(lib).name for lib in os.environ.get("LD_PRELOAD", "").split(":"))
        return vllm.__version__, {**self._settings, "environment": environment}


if __name__ == "__main__":
    main(VllmAdapter)
