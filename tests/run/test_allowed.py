"""Equal kernels are one function of the driver, of which blocks may ask for as much memory as any of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from terrazzo.run.cuda import Cuda


def test_a_function_keeps_what_it_was_allowed() -> None:
    held: dict[str, int] = {}

    def allow(function: str, attribute: str, size: int) -> tuple[int]:
        held[function] = size
        return (0,)

    machine = Cuda.__new__(Cuda)
    machine.allowed = {}
    machine.driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most"),
        cuFuncSetAttribute=allow,
    )
    step: Any = SimpleNamespace(key="key", name="kernel")
    for size in (115840, 60000, 1000, 120000, 65536):  # of steps that touch less, and of a plan that is loaded anew
        machine._allow(step, "kernel", size)
    assert held == {"kernel": 120000}
    machine._allow(SimpleNamespace(key="other", name="kernel"), "another", 60000)  # type: ignore[arg-type]
    assert held == {"kernel": 120000, "another": 60000}
