# mypy: allow-untyped-calls
"""A Triton kernel with the arguments of one call: something to run, or to compile for a card that is not here.

Owns the translation of arguments into Triton's signature, so that what the tests compile ahead of time is
what a call would run. Knows no kernel. The only file besides the kernels that imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

_TYPE_BY_DTYPE = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """``kernel[grid](**arguments)`` with the launch options it was tuned for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
            "enable_fp_fusion": True,  # said explicitly: Triton is changing its default
        }

    @property
    def variant(self) -> str:
        """Equal for launches that run the same compiled code."""
        parts = [self.kernel.__name__, str(self.options)]
        for param in self.kernel.params:
            type_name, divisible = _specialize(param, self.arguments[param.name])
            parts.append(str(self.arguments[param.name]) if type_name == "constexpr" else f"{type_name} {divisible}")
        return ", ".join(parts)

    def run(self) -> None:
        """Enqueue the kernel on the current stream."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, **self.options)

    def compile_for(self, capability: int) -> Any:
        """Compile for ``sm_<capability>``, without a GPU, exactly the variant that ``run`` would compile there."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for param in self.kernel.params:
            value = self.arguments[param.name]
            type_name, divisible = _specialize(param, value)
            signature[param.name] = type_name
            if type_name == "constexpr":
                constants[param.name] = value
            elif divisible:
                attributes[(param.num,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


def _specialize(param: Any, value: Any) -> tuple[str, bool]:
    """Triton's type name of an argument, and whether the kernel may rely on its divisibility by 16."""
    if param.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        aligned = value.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment
        return "*" + _TYPE_BY_DTYPE[value.dtype], aligned
    if isinstance(value, float):
        return "fp32", False
    if value == 1 and not param.do_not_specialize:
        return "constexpr", False
    return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0 and not param.do_not_specialize
