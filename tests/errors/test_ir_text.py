"""Broken IR text: the message has the line, the column and a caret. Hostile text is read and refused, never
executed.
"""

from __future__ import annotations

import builtins
import os
import time
from contextlib import suppress

import pytest

from terrazzo.errors import UserError
from terrazzo.ir.text import parse

LOOP = """@loop
def f(x: f32[4]):
    with kernel("y", y=f32[4]):
        for a0 in free(4):
            {}
    return (y,)
"""
TENSOR = "@tensor\ndef f(x: f32[4]):\n    {}\n    return (y,)\n"
CALL = '@loop\ndef f(x: f32[4]):\n    {}, = call("aten.relu.default", x, _types=(f32[4],))\n    return (y,)\n'
NOT_PLAIN = ("i0=3", "i0, /", "i0, *i1", "i0, *, i1", "i0, *, i1=3", "i0, **i1")
TORCH = "@torch\ndef f(x: f32[4]):\n    {}\n    return (y,)\n"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        # not a program
        ("", 1, 1, "expected one function: @torch, @tensor, @loop, @tile or @kernel, then def"),
        ("x = 1", 1, 1, "expected one function: @torch, @tensor, @loop, @tile or @kernel, then def"),
        (
            "def f(x: f32[4]):\n    return (x,)",
            1,
            1,
            "expected the name of the IR above: @torch, @tensor, @loop, @tile or @kernel",
        ),
        (
            "@tiles\ndef f(x: f32[4]):\n    return (x,)",
            1,
            2,
            "unknown IR 'tiles'; known: torch, tensor, loop, tile, kernel",
        ),
        ("@loop\ndef f(x: f32[4]:\n    return (x,)", 2, 16, "invalid syntax"),
        ("@loop\ndef f(x: f32[4]):\n    y = (x\n    return (x,)", 3, 9, "'(' was never closed"),
        ("@loop\ndef f(x: f32[4]):\n    pass", 2, 1, "the function must end with return"),
        # types
        ("@loop\ndef f(x):\n    return (x,)", 2, 7, "input x needs a type, such as f32[2, 3]"),
        ("@loop\ndef f(x: q8[4]):\n    return (x,)", 2, 10, "unknown dtype 'q8'; known: bool, u8, u16"),
        ("@loop\ndef f(x: f32[-4]):\n    return (x,)", 2, 14, "a dimension cannot be negative"),
        (TENSOR.format("y: f32[5] = exp(x)"), 3, 8, "y is declared f32[5] but is f32[4]"),
        (TENSOR.format("y: f32[4] = exp(x, x)"), 3, 17, "exp does not take (f32, f32)"),
        (LOOP.format("y[a0] = f64(1.0)"), 5, 13, "store: a f64 at 1 indices into y: f32[4]"),
        (LOOP.format("y[a0] = add(x[a0], f64(1.0))"), 5, 21, "add does not take (f32, f64)"),
        (LOOP.format("y[a0] = x[a0, a0]"), 5, 21, "load: 2 indices into x: f32[4]"),
        # names
        (LOOP.format("y[a0] = exp(z[a0])"), 5, 25, "z is not defined here"),
        (LOOP.format("y[a1] = x[a0]"), 5, 15, "a1 is not defined here"),
        (LOOP.replace("(y,)", "(z,)").format("y[a0] = x[a0]"), 6, 13, "z is not defined here"),
        (TENSOR.format("y: f32[4] = exp(x)\n    y: f32[4] = exp(x)"), 4, 5, "y is defined twice"),
        (TORCH.format("y: f32[4] = aten.relu.default(q)"), 3, 35, "q is not defined here"),
        ("@tensor\ndef f(x: f32[4], x: f32[4]):\n    return (x,)", 2, 18, "x is defined twice"),
        ("@torch\ndef f(x: f32[4], y: f32[4], x: i64):\n    return (x,)", 2, 29, "x is defined twice"),
        ("@loop\ndef f(x: f32[4], y: f32[4], x: f32[5]):\n    return (x,)", 2, 29, "x is defined twice"),
        ("@tensor\ndef f(x: f32[4], S: f32[S]):\n    S = size(1, 9)\n    return (x,)", 2, 18, "S is defined twice"),
        (
            "@tensor\ndef f(x: f32[S]):\n    S = size(1, 9)\n    S = size(1, 8)\n    return (x,)",
            4,
            5,
            "S is defined twice",
        ),
        (LOOP.replace("y=f32", "x=f32").format("x[a0] = x[a0]"), 3, 10, "x is defined twice"),
        (CALL.format("x"), 3, 5, "x is defined twice"),
        (CALL.format("y, y").replace("f32[4],))", "f32[4], f32[4]))"), 3, 8, "y is defined twice"),
        # operations
        (TENSOR.format("y: f32[4] = frob(x)"), 3, 17, "unknown Tensor IR op 'frob'"),
        (TENSOR.format("y: f32 = reduce.med(x, axes=[0])"), 3, 14, "unknown monoid 'med'; known: sum, prod"),
        (
            TENSOR.format("y: f32[4] = reduce.sum(x, axes=[3])"),
            3,
            17,
            "reduce: axes (3,) are no increasing axes of f32[4]",
        ),
        (TENSOR.format("y = exp(x)"), 3, 5, "expected `name: type = value`"),
        (
            TENSOR.format("y: f32[4] = index_map(lambda i1: x[i1])"),
            3,
            27,
            "expected `lambda i0: …`, one coordinate per dimension",
        ),
        *(
            (TENSOR.format(f"y: f32[4] = index_map(lambda {given}: x[i0])"), 3, 27, "expected `lambda i0: …`")
            for given in NOT_PLAIN
        ),
        ("@tensor\ndef f(x: f32[4] = 3):\n    return (x,)", 2, 1, "inputs are plain `name: type`"),
        (TORCH.format("y: f32[4] = relu(x)"), 3, 17, "expected an op, such as aten.add.Tensor(x, y)"),
        (LOOP.format("y[a0] = frob(x[a0])"), 5, 21, "expected a term"),
        (LOOP.format("y[a0] = x[a0 ** 2]"), 5, 23, "index expressions have + - * // %"),
        (LOOP.format("y[a0] = x[a0 // 0]"), 5, 23, "index expression divides a0 by 0; a divisor must be positive"),
        (LOOP.format("y[a0] = x[a0 % -2]"), 5, 23, "index expression takes a0 modulo -2; a divisor must be positive"),
        (LOOP.replace("free(4)", "free(4, 4)").format("y[a0] = x[a0]"), 4, 9, "expected `for a in free(extent):`"),
    ],
)
def test_where_and_what(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, "file.txt")
    place, shown, caret = str(caught.value).split("\n")
    assert place.startswith(f"file.txt, line {line}, column {column}: {message}")
    assert shown.strip() == (text.split("\n")[line - 1]).strip()
    assert caret == " " * (4 + column - 1) + "^"


HOSTILE = [
    TENSOR.format("y: f32[4] = __import__('os').system('touch owned')"),
    TENSOR.format("y: f32[4] = (lambda: open('owned', 'w'))()"),
    TENSOR.format("y: f32[4] = exp((lambda: open('owned', 'w'))())"),
    TENSOR.format("y: f32[4] = index_map(lambda i0=open('owned', 'w'): x[i0])"),
    TENSOR.format("y: f32[4] = index_map(lambda i0: x[open('owned', 'w')])"),
    TENSOR.format("y: f32[4] = literal([open('owned', 'w') for i in range(9)])"),
    TENSOR.format('y: f32[4] = literal(f\'{open("owned", "w")}\')'),
    TENSOR.format("y: f32[4] = literal((z := open('owned', 'w')))"),
    TENSOR.format("y: f32[4] = x.__class__.__bases__[0].__subclasses__()"),
    TORCH.format("y: f32[4] = os.system.default('touch owned')"),
    TORCH.format("y: f32[4] = aten.add.Tensor(x, open('owned', 'w'))"),
    TORCH.format("y: f32[4] = aten.__init__.__globals__(x)"),
    "@loop\ndef f(x: f32[open('owned', 'w').fileno()]):\n    return (x,)",
    "@loop\ndef f(x: f32[4] = open('owned', 'w')):\n    return (x,)",
    "@(open('owned', 'w'))\ndef f(x: f32[4]):\n    return (x,)",
    "import os; os.system('touch owned')\n@loop\ndef f(x: f32[4]):\n    return (x,)",
    "@loop\nclass f:\n    open('owned', 'w')",
    LOOP.format("y[open('owned', 'w')] = x[a0]"),
    LOOP.format("open('owned', 'w')"),
    LOOP.replace("free(4)", "free(open('owned', 'w').fileno())").format("y[a0] = x[a0]"),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_is_executed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(builtins, "open", lambda *a, **k: done.append("open"))
    monkeypatch.setattr(os, "system", lambda *a: done.append("system"))
    with suppress(UserError):  # some of it is refused, and some means nothing
        parse(text)
    assert done == []


DEEP = "\n".join(" " * (8 + k) + f"for b{k} in free(2):" for k in range(200)) + "\n" + " " * 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TENSOR.format("y: f32[4] = " + "exp(" * 10_000 + "x" + ")" * 10_000), "too many nested parentheses"),
        (
            TENSOR.format("y: f32[4] = index_map(lambda i0: x[" + "-" * 50_000 + "i0])"),
            "expressions are nested too deeply",
        ),
        (
            TENSOR.format("y: f32[4] = index_map(lambda i0: x[" + "-" * 5_000 + "i0])"),
            "expressions are nested too deeply",
        ),
        (TENSOR.format("y: f32[4] = literal(" + "-" * 2_000 + "1)"), "expressions are nested too deeply"),
        (
            TENSOR.format("y: f32[4] = index_map(lambda i0: x[" + "+".join(["i0"] * 20_000) + "])"),
            "expressions are nested too deeply",
        ),
        (TENSOR.format("y: f32[4] = literal(9**9**9**9)"), "expected a constant"),
        (TENSOR.format("y: f32[4] = literal(1" + "0" * 10_000 + ")"), "Exceeds the limit"),
        (LOOP.replace("        for a0", DEEP + "        for a0"), "too many levels of indentation"),
        ("@loop\ndef f(x: f32[4]):\n    return (x,)\0", "null bytes"),
        ("#" * ((1 << 26) + 1), "the text is longer than 67108864 characters"),
    ],
    ids=["calls", "signs", "fewer signs", "signs of a constant", "sum", "power", "digits", "loops", "null", "long"],
)
def test_what_is_too_much_is_refused_quickly(text: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=message):
        parse(text)
    assert time.monotonic() - start < 5


@pytest.mark.filterwarnings("error")
def test_what_python_would_warn_of_is_refused_quietly() -> None:
    with pytest.raises(UserError):
        parse(LOOP.format("v0 = 5or x[a0]"))
