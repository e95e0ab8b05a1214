"""Kernels that read elsewhere in the same buffers are one without places, as far as lines of memory begin there."""

from __future__ import annotations

import pytest

from terrazzo.hw.gpu import GPUS
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.placeless import placeless, placeless_together
from terrazzo.ir.text import parse
from terrazzo.rules.loop_to_tile.estimate import _expected, expected


def product(at: str, columns: str = "r0", shape: str = "[64, 256, 128]") -> l.Kernel:
    """A product of rows that begin somewhere in a sequence."""
    program = parse(f"""@loop
def f(x: bf16{shape}, w: bf16[128, 128]):
    with kernel('y', y=bf16[128, 128]):
        for a0 in free(128):
            for a1 in free(128):
                for r0 in reduce(64):
                    in0 = x[{at}, {columns}]
                    v0 = f32(in0)
                    in1 = w[a1, r0]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                v3 = bf16(acc0)
                y[a0, a1] = v3
    return (y,)""")
    (kernel,) = program.steps
    assert isinstance(kernel, l.Kernel)
    return kernel


def read(kernel: l.Kernel) -> str:
    """Where a kernel reads the first of its inputs."""
    (load,) = (x for x in kernel.terms if isinstance(x, l.Load) and x.buffer.type.rank == 3)
    return ", ".join(map(str, load.index))


@pytest.mark.parametrize("at", ["0, a0", "7, a0", "0, a0 + 32", "63, a0 + 128"])
def test_whole_lines_are_left_out(at: str) -> None:
    assert placeless(product(at)) is placeless(product("0, a0"))


def test_what_lies_within_a_line_stays() -> None:
    assert read(placeless(product("3, a0", "r0 + 7"))) == "0, a0, r0 + 7"
    assert read(placeless(product("3, a0", "r0 + 64"))) == "0, a0, r0"


def test_lines_of_odd_rows() -> None:
    odd = "[64, 256, 65]"  # rows of 130 bytes: each 64th begins with a line
    assert read(placeless(product("0, a0 + 63", shape=odd))) == "0, a0 + 63, r0"
    assert read(placeless(product("0, a0 + 100", shape=odd))) == "0, a0 + 36, r0"


@pytest.mark.parametrize("at", ["7, a0", "0, a0 + 32", "63, a0 + 128"])
def test_they_take_the_same(at: str) -> None:
    gpu = GPUS["sm_90a"]
    assert expected([product(at)], gpu) == _expected(product(at), gpu) == _expected(product("0, a0"), gpu)


def pair(maker: str, reader: str) -> tuple[l.Kernel, ...]:
    """Two kernels, the second of which reads what the first writes, and an input."""
    program = parse(f"""@loop
def f(x: f32[64, 128]):
    with kernel('y', y=f32[64, 128]):
        for a0 in free(64):
            for a1 in free(128):
                in0 = x[a0, a1]
                v0 = exp(in0)
                y[a0, a1] = v0
    with kernel('z', z=f32[16, 128]):
        for a0 in free(16):
            for a1 in free(128):
                in0 = y[{maker}, a1]
                in1 = x[{reader}, a1]
                v0 = add(in0, in1)
                z[a0, a1] = v0
    return (z,)""")
    return tuple(s for s in program.steps if isinstance(s, l.Kernel))


def places(kernels: tuple[l.Kernel, ...]) -> list[str]:
    """The rows that the last of some kernels reads, in what the first writes and in the input."""
    return [str(x.index[0]) for x in kernels[-1].terms if isinstance(x, l.Load)]


def test_what_one_writes_another_reads_where_it_is() -> None:
    assert places(placeless_together(pair("a0 + 16", "a0 + 32")[1:])) == ["a0", "a0"]
    assert places(placeless_together(pair("a0 + 16", "a0 + 32"))) == ["a0 + 16", "a0 + 32"]  # x is read whole, too


def test_what_is_guarded_stays_where_it_is() -> None:
    program = parse("""@loop
def f(x: f32[64, 128]):
    with kernel('z', z=f32[16, 128]):
        for a0 in free(16):
            for a1 in free(128):
                in0 = x[a0 + 52, a1] if a0 <= 11 else 0
                z[a0, a1] = in0
    return (z,)""")
    (kernel,) = program.steps
    assert isinstance(kernel, l.Kernel)
    assert places((placeless(kernel),)) == ["a0 + 52"]
