"""Texts that would reach outside of their program: outside a buffer, or through an operator of PyTorch at a file."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Terrazzo

from terrazzo.errors import UserError
from terrazzo.ir.expr import Var
from terrazzo.ir.operators import impure
from terrazzo.ir.proof import holds, ill, leaves
from terrazzo.ir.text import parse
from terrazzo.rules.torch_to_tensor import RULES

LOOP = """@loop
def f(x: f32[8], ids: i64[8]):
    with kernel("y", y=f32[8]):
        for a0 in free(8):
            {}
    return (y,)
"""


@pytest.mark.parametrize(
    ("statement", "column", "message"),
    [
        ("y[a0 + 1000000] = x[a0]", 13, "the store to y does not cover dimension 0"),
        ("y[a0 - 1] = x[a0]", 13, "the store to y does not cover dimension 0"),
        ("y[-1 * a0] = x[a0]", 13, "the store to y does not cover dimension 0"),
        ("y[a0 + at(ids[a0], 8)] = x[a0]", 13, "the store to y does not cover dimension 0"),
        ("y[a0 + at(ids[0], 8)] = x[a0]", 13, "the store to y does not cover dimension 0"),
        ("y[at(ids[a0], 8)] = x[a0]", 13, "the store to y does not cover dimension 0"),
        ("y[a0 % 4 + a0 // 4 * 4 + 8] = x[a0]", 13, "the store to y does not cover dimension 0"),
        ("y[a0] = x[a0 + 1]", 21, "the load x[a0 + 1] may leave dimension 0"),
        ("y[a0] = x[a0 + 100] if 7 - a0 >= 0 else 0", 21, "may leave dimension 0"),
        ("y[a0] = x[a0 + 1] if a0 - 1 >= 0 else 0", 21, "may leave dimension 0"),
        ("y[a0] = x[2 * a0] if 8 - 2 * a0 >= 0 else 0", 21, "may leave dimension 0"),
        ("y[a0] = x[at(ids[a0], 9)]", 21, "may leave dimension 0"),
        ("y[a0] = x[at(ids[a0 + 1], 8)]", 26, "the load ids[a0 + 1] may leave dimension 0"),
        ("y[a0] = x[at(ids[a0], -3)]", 21, "may be negative"),
        ("y[a0] = x[a0 * a0 // (a0 + 1)]", 21, "may leave dimension 0"),
        ("y[a0] = f32(index(8 // a0))", 25, "// a0 may be 0"),
        ("y[a0] = x[a0] if 8 % a0 >= 0 else 0", 21, "% a0 may be 0"),
        ("y[a0] = x[a0] if a0 * 99999999999999999999 >= 0 else 0", 21, "may be beyond 64 bits"),
        ("y[a0] = x[(a0 - 99999999999999999999) % 8]", 21, "may be beyond 64 bits"),
    ],
)
def test_an_access_that_may_leave_its_buffer_is_refused_where_it_stands(
    statement: str, column: int, message: str
) -> None:
    text = LOOP.format(statement)
    with pytest.raises(UserError) as caught:
        parse(text, "f.txt")
    assert str(caught.value).startswith(f"f.txt, line 5, column {column}: ") and message in str(caught.value)


@pytest.mark.parametrize(
    "statement",
    [
        "y[a0] = x[7 - a0]",
        "y[a0] = x[a0 - 3] if a0 - 3 >= 0 else 0",
        "y[a0] = x[2 * a0 + 1] if 3 - a0 >= 0 else 0",
        "y[a0] = x[2 * a0] if 7 - 2 * a0 >= 0 else 0",
        "y[a0] = x[a0 + a0 // 2] if 7 - a0 - a0 // 2 >= 0 else 0",
        "y[a0] = x[a0 * a0] if 8 - a0 * a0 >= 0 and 5 - a0 >= 0 and 6 - 3 * a0 >= 0 else 0",
        "y[a0] = x[(a0 + 5) % 8]",
        "y[a0] = x[at(ids[a0], 8)]",
        "y[a0] = x[at(ids[a0], 3) + 5]",
    ],
)
def test_an_access_that_is_proved_is_read(statement: str) -> None:
    parse(LOOP.format(statement))


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        ("y=f32[8]", "y=f32[8] @ (-1,)", 3, "a dimension cannot be negative"),
        ("y=f32[8]", "y=f32[8] @ (0,)", 5, "strides put several elements at one place"),
        ("y=f32[8]", "y=f32[8] @ (at(x[0], 4),)", 3, ""),
        ("x: f32[8]", "x: f32[8] @ (-4,)", 2, "a dimension cannot be negative"),
        ("x: f32[8]", "x: f32[8] @ (4611686018427387904,)", 2, "does not fit into any memory"),
        ("x: f32[8]", "x: f32[8, 9999999999, 9999999999]", 2, "does not fit into any memory"),
        ("free(8)", "free(-8)", 4, "a dimension cannot be negative"),
        ("free(8)", "free(at(ids[0], 8))", 4, "expected a number, or sizes"),
        ("y[a0] =", "for b0 in free(a0):\n                y[a0] =", 5, "expected a number, or sizes"),
        ("return (y,)", "return (z,)", 6, "z is not defined here"),
        ('"y", y=', '"y", z=f32[8], y=', 7, "result z is never written"),
        ("x[a0]", "y[a0]", 3, "y reads y before it is written"),
    ],
)
def test_what_a_program_cannot_be(before: str, after: str, line: int, message: str) -> None:
    text = LOOP.format("y[a0] = x[a0]")
    assert before in text
    text = text.replace(before, after, 1).replace("return (y,)", "return (z,)" if "z=" in after else "return (y,)")
    line -= line == 7
    with pytest.raises(UserError, match=rf"line {line}, column \d+: .*{re.escape(message)}"):
        parse(text)


@pytest.mark.parametrize(
    "statement",
    [
        "y: f32[8] = index_map(lambda i0: x[i0 + 9] if 7 - i0 >= 0 else 0)",
        "y: f32[8] = index_map(lambda i0: x[at(ids[i0 + 1], 8)])",
        "y: f32[0] = index_map(lambda i0: x[99])",
        "y: f32[8] = index_map(lambda i0: x[8 // i0 - 1] if i0 - 1 >= 0 else 0)",
    ],
)
def test_an_index_map_that_may_leave_its_tensor_is_refused(statement: str) -> None:
    with pytest.raises(UserError, match=r"line 3, column 17: "):
        parse(f"@tensor\ndef f(x: f32[8], ids: i64[8]):\n    {statement}\n    return (y,)\n")


def test_proofs() -> None:
    """What ranges show, what guards show in multiples and through divisions, what trying shows; and what is not so."""
    i, j, n = Var("i", 10), Var("j", 4), Var("n", 1 << 40)
    assert holds(9 - i) and not holds(8 - i) and holds(8 - i, (7 - i,)) and holds(8 - i, (-1,))
    assert holds(39 - i * 4 - j, (9 - i,)) and not holds(38 - i * 4 - j, (9 - i,))
    assert holds(7 - (n + 3) // 4, (25 - n,)) and not holds(6 - (n + 3) // 4, (25 - n,))
    assert holds(25 - n, (7 - (n + 3) // 4,)) is False and holds(28 - n, (7 - (n + 3) // 4,))
    assert holds(n // 4 - 2, (n - 8,)) and not holds(n // 4 - 3, (n - 8,))
    assert holds(5 - i, (5 - i - j,)) and holds(12 - i - 2 * j, (4 - i, 4 - j)) and not holds(5 - i - j, (5 - i,))
    assert holds(20 - i * i, (4 - i,)) and not holds(15 - i * i, (4 - i,))
    assert leaves((i, j), (10, 4)) is None and leaves((i, j + 1), (10, 4)) == 1
    assert leaves((i, j + 1), (10, 4), (2 - j,)) is None
    assert "may be 0" in ill((i // j,)) and not ill((i // (j + 1),))
    assert "beyond 64 bits" in ill((n * n * 4,)) and not ill((n * 4,)) and ill((1 << 70,))


TORCH = "@torch\ndef f(x: f32[8], i: i64[8]):\n    y: {} = {}\n    return (y,)\n"
IMPURE = {
    "aten.from_file.default('{file}', True, 2)": "it takes a name, and no tensor",
    "aten.add_.Tensor(x, x)": "it changes its arguments",
    "aten.add.out(x, x, out=x)": "it changes its arguments",
    "aten.set_.source_Tensor(x, x)": "it changes its arguments",
    "aten.resize_.default(x, [1000000])": "it changes its arguments",
    "aten._reshape_alias.default(x, [1000000], [1])": "it is private to PyTorch",
    "aten._sparse_coo_tensor_unsafe.default(i, x, [8])": "it is private to PyTorch",
    "aten.item.default(x)": "it gives something else than tensors",
    "aten.record_stream.default(x, 0)": "",
    "aten._print.default('x')": "",
    "prims.iota.default(8)": "",
    "torch_nn.nothing.default(x)": "PyTorch has no operator",
    "aten.__class__.default(x)": "PyTorch has no operator",
    "aten.__iand__.Tensor(i, i)": "it changes its arguments",
    "aten.relu.default(x, device=torch('device:meta'))": "is no device a program runs on",
}


@pytest.mark.parametrize("call", IMPURE)
def test_an_operator_that_does_more_than_compute_is_refused(call: str, tmp_path: Path) -> None:
    file = tmp_path / "owned"
    file.write_bytes(b"12345678")
    for text in (
        TORCH.format("f32[8]", call.format(file=file)),
        *(
            frame.format(re.sub(r"^([\w.]+)\(", rf"{word}('\1', ", call.format(file=file)))
            for word, frame in (
                ("opaque", "@tensor\ndef f(x: f32[8], i: i64[8]):\n    y: f32[8] = {}\n    return (y,)\n"),
                ("call", "@loop\ndef f(x: f32[8], i: i64[8]):\n    y, = {}\n    return (y,)\n"),
                ("call", "@kernel\ndef f(x: f32[8], i: i64[8]):\n    y, = {}\n    return (y,)\n"),
            )
        ),
    ):
        text = re.sub(r"\)\n    return", r", _types=(f32[8],))\n    return", text) if " call(" in text else text
        with pytest.raises(UserError, match=rf"line 3, column \d+: .*{re.escape(IMPURE[call])}"):
            parse(text)
    assert file.read_bytes() == b"12345678"


@pytest.mark.parametrize("command", ["run", "check", "compile"])
def test_a_file_is_not_touched(terrazzo: Terrazzo, command: str, tmp_path: Path) -> None:
    file, text = tmp_path / "owned", tmp_path / "torch.txt"
    file.write_bytes(b"12345678")
    call = f"aten.mul.Tensor(aten.from_file.default('{file}', True, 2), 0)"
    text.write_text(TORCH.format("f32[2]", f"aten.from_file.default('{file}', True, 2)"))
    words = (command, "--from", "torch", str(text))
    assert "line 3, column 17: aten.from_file.default may not be called by a text" in terrazzo(*words, code=2).stderr
    text.write_text(TORCH.format("f32[2]", call))
    assert "line 3" in terrazzo(*words, code=2).stderr
    assert file.read_bytes() == b"12345678"


@pytest.mark.parametrize(
    ("result", "call", "message"),
    [
        ("f32[80]", "aten.relu.default(x)", "aten.relu.default gives f32[8], and the text declares f32[80]"),
        ("f64[8]", "aten.relu.default(x)", "aten.relu.default gives f32[8], and the text declares f64[8]"),
        ("(f32[8],)", "aten.relu.default(x)", "gives one tensor, and the text declares a tuple of 1"),
        ("f32[8]", "aten.split.Tensor(x, 8)", "gives a tuple of 1, and the text declares one tensor"),
        ("f32[8]", "aten.relu.default(x, x)", "aten.relu.default: "),
        ("f32[9]", "aten.cat.default([x, 1])", "aten.cat.default: "),
        ("f32[8, 8]", "aten.mm.default(x, x)", "aten.mm.default: "),
    ],
)
def test_what_a_call_does_not_give_is_refused(result: str, call: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"line 3, column \d+: .*{re.escape(message)}"):
        parse(TORCH.format(result, call))


def test_every_operator_that_a_rule_lowers_may_be_named() -> None:
    from terrazzo.ir.torch_types import operator

    refused = {}
    for name in sorted({key for rule in RULES for key in rule.keys if isinstance(key, str)}):
        try:
            operator(name)
        except UserError:
            continue  # of another version of PyTorch
        if why := impure(name):
            refused[name] = why
    assert set(refused) <= {"aten._reshape_alias.default"}, refused


def test_a_byte_order_mark_means_nothing(terrazzo: Terrazzo, tmp_path: Path) -> None:
    text = LOOP.format("y[a0] = x[a0]")
    assert parse("\ufeff" + text) == parse(text)
    file = tmp_path / "loop.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    terrazzo("opt", str(file))
    file.write_bytes(b"\xef\xbb\xbf" + LOOP.format("y[a0] = q[a0]").encode())
    assert "line 5, column 21: q is not defined here" in terrazzo("opt", str(file), code=2).stderr


def test_columns_are_of_characters() -> None:
    with pytest.raises(UserError, match="line 5, column 45: q is not defined") as caught:
        parse(LOOP.format("ééééééé = f32(0.0); y[a0] = exp(q[a0])").replace("x: f32[8],", "x: f32[8],\f"))
    assert str(caught.value).split("\n")[2].index("^") - 4 == 44


@pytest.mark.parametrize("text", ["\0", "x = 1\n  \0", "@loop\n# \0\n", "x = '\ud800'"])
def test_characters_that_python_does_not_read_have_a_place(text: str) -> None:
    with pytest.raises(UserError, match=r"line \d, column \d+: "):
        parse(text)


GIANT = """@loop
def f(x: f32[8]):
    with kernel("t", t=f32[8, 1000000000000]):
        for a0 in free(8):
            for a1 in free(1000000000000):
                t[a0, a1] = neg(x[a0])
    with kernel("y", y=f32[8]):
        for a0 in free(8):
            y[a0] = t[a0, 5]
    return ({},)
"""
DEEP = 100_000


@pytest.mark.parametrize(
    ("result", "option", "message"),
    [
        ("t", "--no-fuse", "not enough memory: t is f32[8, 1000000000000]"),
        ("y", "--no-fuse", "not enough memory: temporaries take 32000000000000"),
        ("t", "--interpret", "not enough memory"),
    ],
)
def test_what_no_memory_holds_is_told(
    terrazzo: Terrazzo, tmp_path: Path, result: str, option: str, message: str
) -> None:
    file = tmp_path / "loop.txt"
    file.write_text(GIANT.format(result))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 44, limits[1]))  # where a machine would promise anything
    try:
        assert f"error: {message}" in terrazzo("run", option, "--from", "loop", str(file), code=2).stderr
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    "statement",
    [
        "y[a0] = x[" + "(" * DEEP + "a0" + ")" * DEEP + "]",
        "y[a0] = x[" + "-" * DEEP + "a0]",
        "y[a0] = x[a0" + " // 2" * DEEP + "]",
        "y[a0] = x[a0" + " * 2" * DEEP + "]",
        "y[a0] = x[a0 % 8" + " + 1" * DEEP + "]",
        "y[a0] = " + "neg(" * DEEP + "x[a0]" + ")" * DEEP,
        "y[a0] = x[a0] if " + " and ".join(["a0 >= 0"] * DEEP) + " and a0 - 1 != 0 else 0",
        "y[a0] = x[" + "9" * DEEP + "]",
    ],
    ids=["brackets", "signs", "quotients", "products", "sums", "functions", "guards", "digits"],
)
def test_many_levels_are_refused_soon(statement: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError, match=r"line \d+, column \d+: "):
        parse(LOOP.format(statement))
    assert time.process_time() - start < 20
