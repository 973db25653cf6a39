"""Pytest plugin: runs Triton kernels on the CPU, in a process of their own.

Owns what makes the interpreter tell the truth. ``TRITON_INTERPRET`` is set before Triton is imported (the library's own
functions are bound at import). Products are summed in float64: the interpreter multiplies the uint16 it stores bfloat16
in, and BLAS sums the rows of one matrix in different orders, which no GPU does. Loop bounds become integers in a way
that new NumPy releases allow (Triton 3.6's does not). Every buffer a kernel's wrapper allocates is poisoned with NaN.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def _numbers(operand: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return operand.data.astype(np.float64)


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dot(_builder: Any, a: Any, b: Any, acc: Any, *_precision: Any) -> Any:
        total = (np.matmul(_numbers(a), _numbers(b)) + acc.data).astype(acc.data.dtype)
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _integer_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_lang_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor_and_index)


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    """``torch.empty`` returns NaN in PyTorch's deterministic mode."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
