"""llama.cpp: its server, and a client with as many requests in flight as it has slots."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.engines.protocol import WARM_UP, Adapter, Job, JobResult, main
from bench.peers import LLAMA_CPP_SDIST

_DEFAULT_SLOTS = 8
_START_LIMIT_S = 120.0


class LlamacppAdapter(Adapter):
    """llama-server as a child of this process."""

    def load(self) -> None:
        task = self.task
        self._slots = int(task.settings.get("slots", _DEFAULT_SLOTS))
        program = Path(sys.executable).with_name("llama-server")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._options = [
            *("--parallel", self._slots),
            *("--ctx-size", task.kv_cache_tokens or self._slots * task.max_model_len),
            *("--threads", task.num_threads, "--threads-batch", task.num_threads),
            *("--cont-batching", "--kv-unified", "--jinja", "--no-webui"),
        ]
        command = [program, "--model", task.model, "--host", "127.0.0.1", "--port", self._port, *self._options]
        self._process = subprocess.Popen([str(part) for part in command])
        self._wait_until_healthy()
        self._num_computed = 0
        self.run([WARM_UP])
        self._num_computed = 0

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return
            except OSError as err:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"llama-server did not start: {err}") from err
                time.sleep(0.1)

    def run(self, jobs: list[Job]) -> list[JobResult]:
        with ThreadPoolExecutor(self._slots) as pool:
            return list(pool.map(self._answer, jobs))

    def _answer(self, job: Job) -> JobResult:
        sampling = job.sampling
        body: dict[str, Any] = {
            "messages": job.messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,  # off, as everywhere else; llama.cpp's own default is 40
            "min_p": 0.0,
            "n": sampling.n,
            "ignore_eos": sampling.ignore_eos,
            "cache_prompt": True,
            "timings_per_token": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=3600) as response:
            answer = json.load(response)
        # Its usage counts the first sample only; of the workloads those with more have a fixed length.
        assert sampling.n == 1 or sampling.ignore_eos
        self._num_computed += int(answer.get("timings", {}).get("prompt_n", 0))
        return JobResult(
            custom_id=job.custom_id,
            texts=[choice["message"]["content"] for choice in answer["choices"]],
            prompt_tokens=answer["usage"]["prompt_tokens"],
            output_tokens=sampling.n * answer["usage"]["completion_tokens"],
        )

    def computed_prompt_tokens(self) -> int:
        return self._num_computed

    def describe(self) -> tuple[str, dict[str, Any]]:
        program = Path(sys.executable).with_name("llama-server")
        said = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
        version = (said.stdout + said.stderr).partition("version: ")[2].partition("\n")[0]
        return f"{version} in {LLAMA_CPP_SDIST}", {
            "slots": self._slots,
            "options": [str(option) for option in self._options],
        }

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.terminate()
            self._process.wait(timeout=30)


if __name__ == "__main__":
    main(LlamacppAdapter)
