"""The Hugging Face network of a model: weights read, unpacked from GGUF, or drawn.

Owns reading, and the shortening of its stack of layers. Knows nothing of attention or kernels.
"""

from __future__ import annotations

import io
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvq.engine import gguf_cache
from kvq.engine.config import EngineConfig
from kvq.engine.errors import ModelError
from kvq.engine.tokenizer import ModelSource

if TYPE_CHECKING:
    from collections.abc import Iterator


def load_network(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """The network that ``config.model`` names, in ``dtype``, on the CPU (dummy weights: on ``device``).

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = ModelSource.resolve(config.model)
    arguments = {"trust_remote_code": config.trust_remote_code, **source.load_arguments}
    try:
        if config.load_format == "dummy":
            hf_config = AutoConfig.from_pretrained(source.path, **arguments)
            torch.manual_seed(config.seed)
            with device:  # billions of random numbers are drawn where they are wanted
                return AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        cached = None
        if source.gguf_path is not None:
            cached = gguf_cache.weights_folder(source.gguf_path, str(dtype).removeprefix("torch."))
        if cached is not None and cached.is_dir():
            arguments, source, cached = {}, ModelSource(path=str(cached)), None
        if source.gguf_file is None:
            arguments["use_safetensors"] = None if config.load_format == "pt" else True  # None: pickles, too
        with _quiet_progress(converting=source.gguf_file is not None):
            network = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype, **arguments)
        if cached is not None:
            gguf_cache.save_weights(network, cached)
        return network
    except (OSError, ValueError, KeyError) as err:
        raise ModelError(f"cannot load the model {config.model}: {_pickles(source) or err}") from err


def _pickles(source: ModelSource) -> str | None:
    """What to do about weights that are there, and not in a format that is read."""
    folder = Path(source.path)
    if source.gguf_file is not None or any(folder.glob("*.safetensors")) or not any(folder.glob("*.bin")):
        return None
    return "its weights are pickles: save them as safetensors or, if you trust whoever made them, set load_format to pt"


@contextmanager
def shortened(network: Any) -> Iterator[None]:
    """Passes inside compute only the first and the last layer of ``network``."""
    num_layers = int(network.config.get_text_config().num_hidden_layers)
    lists = (m for m in network.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers)
    stack = next(lists, None)
    if stack is None:
        yield
        return
    layers = dict(stack.named_children())
    ends = {name: layers[name] for name in (str(0), str(num_layers - 1))}
    stack._modules = ends  # its indices are of no use to a pass
    try:
        yield
    finally:
        stack._modules = layers


@contextmanager
def _quiet_progress(*, converting: bool) -> Iterator[None]:
    """transformers' own progress bars would run into ours; the one of its GGUF conversion heeds no switch."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()) if converting else nullcontext():
            yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
