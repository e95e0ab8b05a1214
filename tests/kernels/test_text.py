"""Tile IR and Kernel IR print and read back as the same objects; broken text is refused where it is broken, and never
runs.
"""

from __future__ import annotations

import builtins
import os
import re
from contextlib import suppress

import numpy as np
import pytest
import torch
from tests.kernels.programs import case, lowered, programs

from terrazzo.errors import UserError
from terrazzo.hw.functions import FUNCTIONS
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.node import OPS
from terrazzo.ir.show_kernel import statement
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import verify
from terrazzo.targets.cuda.emit import emit


@pytest.mark.parametrize(("name", "target"), programs())
def test_it_reads_back(name: str, target: str) -> None:
    found = case(name, target).lowering
    for ir in ("tile", "kernel"):
        program = found.at(ir)
        text = show(program)
        again = parse(text)
        assert show(again) == text
        assert again == program
        verify(again)
    kernels = [s for s in found.at("kernel").steps if isinstance(s, k.Kernel)]
    read = [s for s in parse(show(found.at("kernel"))).steps if isinstance(s, k.Kernel)]
    assert kernels and all(a is b for a, b in zip(kernels, read, strict=True))


SMALL = """@kernel
def forward(x: f32[64]):
    with launch('exp', _grid=1, _warps=2, _resident=1, _reads=[x], exp=f32[64]):
        s = shared(f32[64])
        s[lane + warp * 32] = x[lane + warp * 32]
        sync()
        v0 = exp(s[lane + warp * 32])
        acc0 = registers(f32[2], f32(0.0))
        for i in unrolled(2):
            acc0[i] = v0
        exp[lane + warp * 32] = acc0[1]
    return (exp,)
"""


def test_a_kernel_written_by_hand_runs() -> None:
    program = parse(SMALL)
    assert show(program) == SMALL
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    np.testing.assert_allclose(simulator.run(program, {"x": x})[0], np.exp(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        (
            "sync()",
            "synk()",
            6,
            "expected a loop, a condition, a role, an assignment or one of load_matrix",
        ),
        ("sync()", "sync(1)", 6, "sync(number, warps) has numbers 1 to 15"),
        ("sync()", "wait_groups()", 6, "expected wait_groups(number, word?)"),
        ("sync()", "wait_groups(-1)", 6, "expected"),
        ("sync()", "wait_groups(1.5)", 6, "expected a number that is not negative"),
        ("sync()", "move(s[0], x[0])", 6, "expected move(place, place, number)"),
        ("sync()", "move(s[0], nothing[0], 4)", 6, "nothing is not defined here"),
        ("sync()", "async_copy(s[0], x[0], 3)", 6, "cp.async moves 4, 8 or 16 bytes, not 12"),
        ("sync()", "move(s, x[0], 4)", 6, "expected a place, such as x[0, lane]"),
        ("sync()", "v1 = shuffle(v9, 1)", 6, "v9 is not defined here"),
        ("sync()", "v1 = frob(x[lane])", 6, "expected a term"),
        ("sync()", "v1 = x[lane]\n        v1 = x[lane]\n        v1 = y[0]", 8, "y is not defined here"),
        ("sync()", "s[lane] = f64(1.0)", 6, "store: a f64 at 1 indices into s: f32[64]"),
        ("sync()", "s[lane, 0] = f32(1.0)", 6, "store: a f32 at 2 indices into s: f32[64]"),
        ("sync()", "while True:\n            pass", 6, "expected a loop, a condition"),
        ("sync()", "for j in range(2):\n            sync()", 6, "expected a loop, a condition"),
        ("sync()", "for j in unrolled(lane):\n            sync()", 6, "an unrolled loop has a constant number"),
        ("sync()", "if lane:\n            sync()", 6, "a condition compares index expressions"),
        (
            "sync()",
            "if lane < 6:\n            sync()\n        else:\n            sync()",
            6,
            "expected a loop, a condition",
        ),
        ("shared(f32[64])", "shared(f32[64], swizzle=48)", 4, "a swizzle spans 0, 32, 64 or 128 bytes"),
        ("shared(f32[64])", "shared(f32[64], at=-16)", 4, "expected a number that is not negative"),
        (
            "shared(f32[64])",
            "shared(f32[64], pad=4)",
            4,
            "shared memory has a type, a swizzle, and where it begins (at)",
        ),
        ("shared(f32[64])", "shared(f99[64])", 4, "unknown dtype 'f99'"),
        ("f32(0.0)", "v0", 8, "registers start at a constant, such as f32(0.0)"),
        ("f32(0.0)", "f32(0.0), 1", 8, "registers(type) or registers(type, constant)"),
        ("acc0[i] = v0", "acc0[j] = v0", 10, "j is not defined here"),
        ("_grid=1", "_grid=-1", 3, "expected"),
        ("_grid=1", "_grid=True", 3, "expected a number that is not negative"),
        ("_warps=2, ", "", 3, "missing _warps="),
        ("_reads=[x]", "_reads=[y]", 3, "y is not defined here"),
        ("_reads=[x]", "_reads=[]", 3, "uses x, which does not exist there"),
        ("exp=f32[64]", "x=f32[64]", 3, "x is defined twice"),
        ("launch(", "lunch(", 3, "expected `with launch("),
    ],
)
def test_where_and_what(before: str, after: str, line: int, message: str) -> None:
    assert before in SMALL
    text = SMALL.replace(before, after)
    with pytest.raises(UserError) as caught:
        parse(text, "file.txt")
    place, shown, caret = str(caught.value).split("\n")
    assert place.startswith(f"file.txt, line {line}, column ") and message in place
    assert shown.strip() == text.split("\n")[line - 1].strip()
    column = int(place.split("column ")[1].split(":")[0])
    assert caret == " " * (4 + column - 1) + "^"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sync()", "move(s[0, 0], x[0], 4)"),
        ("sync()", "move(s[0], x[0], 3)"),
        ("sync()", "move(s[0], x[0], 0)"),
        ("sync()", "x[lane] = f32(1.0)"),
        ("sync()", "v1 = shuffle(x[lane], 33)"),
        ("_warps=2", "_warps=0"),
        ("_warps=2", "_warps=64"),
        ("acc0[1]", "acc0[lane % 2]"),
        ("shared(f32[64])", "shared(f32[64], at=8)"),
        ("shared(f32[64])", "shared(f32[64], swizzle=128, at=512)"),
        ("s = shared(f32[64])", "full = barriers(1, 1)\n        s = shared(f32[64], at=0)"),
    ],
)
def test_what_no_kernel_can_be_is_refused(before: str, after: str) -> None:
    assert before in SMALL
    with pytest.raises(UserError):
        verify(parse(SMALL.replace(before, after)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sync()", "open('owned', 'w')"),
        ("sync()", "__import__('os').system('touch owned')"),
        ("sync()", "move(s[open('owned', 'w')], x[0], 4)"),
        ("sync()", "v1 = exp(open('owned', 'w'))"),
        ("sync()", "load_matrix(open('owned', 'w'), s[0], x[0])"),
        ("sync()", "if (lambda: open('owned', 'w'))() >= 0:\n            sync()"),
        ("unrolled(2)", "unrolled(open('owned', 'w').fileno())"),
        ("_grid=1", "_grid=open('owned', 'w').fileno()"),
        ("shared(f32[64])", "shared(f32[open('owned', 'w').fileno()])"),
    ],
)
def test_nothing_is_executed(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(builtins, "open", lambda *a, **k: done.append("open"))
    monkeypatch.setattr(os, "system", lambda *a: done.append("system"))
    assert before in SMALL
    with suppress(UserError):
        parse(SMALL.replace(before, after))
    assert done == []


@pytest.mark.parametrize("name", ["mma.m16n8k99.f32.f16", "ldmatrix.x9", "../../etc/passwd"])
@pytest.mark.parametrize(
    ("target", "instructions"),
    [("sm_80", ("mma.m16n8k16.f32.bf16", "ldmatrix.x4")), ("sm_90a", ("wgmma.m64n", "stmatrix.x4"))],
)
def test_an_instruction_that_does_not_exist_is_refused(name: str, target: str, instructions: tuple[str, ...]) -> None:
    rows = 64 if target == "sm_80" else 2048
    found = lowered(lambda x, w: x @ w, (torch.ones(rows, 64).bfloat16(), torch.ones(64, 64).bfloat16()), target)
    text = show(found.program)
    for known in instructions:
        assert f"'{known}" in text
        start = text.index(f"'{known}") + 1
        whole = text[start : text.index("'", start)]
        with pytest.raises(UserError, match="unknown instruction"):
            found.simulated(parse(text.replace(whole, name)))


PRODUCT = """@kernel
def f(x: bf16[64, 64]):
    with launch('f', _grid=1, _warps=4, _resident=1, _reads=[x], y=f32[64, 64]):
        s = shared(bf16[64, 64], swizzle=128)
        a = registers(bf16[8])
        d = registers(f32[32])
        multiply_async('wgmma.m64n64k16.f32.bf16', d[0], s[0, 0], s[0, 0])
    return (y,)
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("s[0, 0])", "s[0, 0], fresh=lane)", "a condition compares index expressions"),
        ("s[0, 0])", "s[0, 0], fresh=lane == warp)", "expected one comparison"),
        ("s[0, 0])", "s[0, 0], fresh=0 <= lane < 3)", "a condition compares index expressions"),
        ("s[0, 0])", "s[0, 0], fresh=lane != 3)", "a condition is one of == < <= > >="),
        (
            "s[0, 0])",
            "s[0, 0], stale=lane == 3)",
            "expected multiply_async(word, registers, place, shared, transposed=word",
        ),
        ("s[0, 0])", "s[0, 0], transposed='ba')", "transposed: 'ba' is none of '', 'a', 'b', 'ab'"),
        ("s[0, 0], s[0, 0])", "a[0], s[0, 0], transposed='a')", "an operand in registers is not transposed"),
        ("bf16[64, 64], swizzle", "bf16[64, 32], swizzle", "rows of s are 64 bytes wide, its swizzle spans 128"),
    ],
)
def test_products_that_cannot_be(before: str, after: str, message: str) -> None:
    assert show(parse(PRODUCT)) == PRODUCT
    with pytest.raises(UserError, match=re.escape(message)):
        parse(PRODUCT.replace(before, after))


@pytest.mark.parametrize(
    "condition",
    ["lane == 0", "lane < 7", "lane >= 7", "lane <= warp + 3", "lane + warp * 2 == 0", "lane + warp < 9", "lane == 31"],
)
def test_conditions_read_as_they_print(condition: str) -> None:
    text = PRODUCT.replace("s[0, 0])", f"s[0, 0], fresh={condition})")
    assert show(parse(text)) == text


class Nap(k.Statement, op="nap"):
    """A statement that no kernel has."""

    uses = ("proxy",)

    nanoseconds: int

    def cuda(self, w: k.Cuda) -> list[str]:
        return [f"__nanosleep({self.nanoseconds});"]


def test_a_statement_is_printed_and_emitted_by_its_class() -> None:
    kernel = k.Kernel("nap", (), (), 1, 1, (), (Nap(40),))
    assert statement(Nap(40)) == ["nap(40)"]
    source = emit(kernel)[1]
    assert "\n  __nanosleep(40);\n" in source and "void proxy_fence()" in source


def test_every_statement_says_its_cuda() -> None:
    statements = [x for x in OPS["kernel"].values() if issubclass(x, k.Statement)]
    assert len(statements) >= 18
    assert [x.op for x in statements if x.cuda is k.Statement.cuda] == []
    assert {name for x in statements for name in x.uses} <= FUNCTIONS.keys()
