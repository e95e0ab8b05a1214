"""Names and comments that mean something in C++ or CUDA: what is emitted compiles, and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from terrazzo.errors import Limitation
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.run.cache import Cache
from terrazzo.run.compiled import compile_program
from terrazzo.targets.cpu.emit import emit as emit_cpu
from terrazzo.targets.cuda.emit import emit as emit_cuda
from terrazzo.targets.names import Names, comment, identifier

NAMES = (
    *("int", "float", "register", "asm", "signed", "template", "namespace", "main", "double", "auto", "this_", "bool"),
    *("z", "l", "h", "M", "N", "K", "bad", "buffers", "threads", "panel", "tile", "m0", "n0", "k0", "x_p", "x_p2"),
    *("__global__", "__restrict", "threadIdx", "blockIdx", "warp", "lane", "block", "shared", "_", "__", "__x__"),
    *("INT64_MIN", "NULL", "INFINITY", "M_PI_2", "TZ", "assert_", "linux", "exp", "exp2", "log2", "i8", "f32", "u64"),
    *("größe", "переменная", "名前", "ß1", "ª", "x" * 3000, "move", "sync", "k_y", "tz_add", "std", "EOF", "errno"),
)

LOOP = """@loop
def f({0}: f32[4, 64], {0}2: f32[64]):
    with kernel("{0}", {0}3=f32[4]):  # {1}
        for a0 in free(4):
            for r0 in reduce(64):
                acc0 <- sum(mul({0}[a0, r0], {0}2[r0]))
            {0}3[a0] = acc0
    with kernel("{0}", {0}4=f32[4, 64]):  # {1}
        for a0 in free(4):
            for a1 in free(64):
                {0}4[a0, a1] = add({0}[a0, a1], {0}3[a0])
    return ({0}4,)
"""
KERNEL = """@kernel
def f({0}: f32[64]):
    with launch("{0}", _grid=2, _warps=1, _resident=1, _reads=[{0}], {0}9=f32[64]):  # {1}
        {2} = shared(f32[32])
        {3} = registers(f32[1], f32(0.0))
        {2}[lane] = {0}[lane + block * 32]
        sync()
        for {4} in unrolled(2):
            {5} = mul({2}[lane], f32(0.5))
            {3}[0] = add({3}[0], {5})
        {0}9[lane + block * 32] = {3}[0]
    return ({0}9,)
"""
COMMENTS = ("plain.py:3", "ends in a backslash \\", "C:\\", "\\ ", "what??/", "*/ int x; /*", "é \u202e x", "a\\\\")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(target="cpu", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("start", range(4))
def test_any_name_is_a_name_in_c(start: int, options: Options) -> None:
    x, w = torch.randn(4, 64), torch.randn(64)
    for name in NAMES[start::4]:
        program = parse(LOOP.format(name, "here.py:1"))
        assert all(emit_cpu(s)[1].isascii() for s in program.steps)
        (found,) = compile_program(program, {}, options)([x, w])
        torch.testing.assert_close(found, x + (x @ w)[:, None])


@pytest.mark.parametrize("source", COMMENTS)
def test_a_comment_ends_with_its_line(source: str, options: Options) -> None:
    x, w = torch.randn(4, 64), torch.randn(64)
    program = parse(LOOP.format("x", source))
    assert program.steps[0].source == source.strip()
    (found,) = compile_program(program, {}, options)([x, w])
    torch.testing.assert_close(found, x + (x @ w)[:, None])
    text = emit_cuda(parse(KERNEL.format("x", source, "s0", "acc0", "i0", "v0")).steps[0])[1]
    assert text.splitlines()[0] == comment(source.strip()) and text.isascii()


def test_a_comment_of_several_lines_is_one() -> None:
    assert comment("a\nb\r\\") == "// a?b?/" and comment("x\u2028y") == "// x?y" and comment("??/") == "// ??"


def test_any_name_is_a_name_in_cuda(tmp_path: Path) -> None:
    """All parts of a kernel called one way, and each part called as another one is."""
    pytest.importorskip("cuda.bindings")
    from terrazzo.run.nvrtc import compile_each, nvrtc_version

    try:
        nvrtc_version()
    except Limitation as why:
        pytest.skip(str(why))
    names = [n for n in NAMES if n not in ("block", "warp", "lane") and len(n) < 100]
    sources = {}
    for k, name in enumerate(names):
        others = [names[(k + d) % len(names)] for d in range(1, 5)]
        (step,) = parse(KERNEL.format(name, "x.py:1 \\", *others)).steps
        sources[emit_cuda(step)[1]] = None
    assert len(sources) >= len(names) // 2
    made = compile_each(list(sources), "sm_80", Cache(tmp_path, 1 << 30))
    assert not {name: m.facts.problem() for name, m in made.items() if m.facts.problem()}


def test_names() -> None:
    assert identifier("größe_12") == "gr__e" and identifier("12") == identifier("é") == "t"
    names = Names(["i8", "x_map0"])
    assert [names.formal(n) for n in ("x", "x1", "x_2", "int")] == ["x_p", "x_p2", "x_p3", "int_p"]
    assert [names.local(n) for n in ("acc0", "i8", "z", "acc0", "int", "x_map0")] == [
        *("acc0", "i8_", "z_", "acc0_", "int_", "x_map0_"),
    ]
    assert [names.local(n) for n in ("M_PI_2", "é", "9", "_softmax_s0", "__x0")] == [
        *("M_PI_2_", "v__", "v9_", "_softmax_s0", "v__x0_"),
    ]
    with names.block():
        assert names.local("t1") == "t1"
    assert names.local("t1") == "t1"


def test_a_load_from_nothing_reads_nothing(options: Options) -> None:
    """An index into an empty tensor is out of range, whatever it is: no element is read to find that out."""
    text = """@loop
def f(x: f32[0, 4], i: i64[3]):
    with kernel("y", y=f32[3, 4]):
        for a0 in free(3):
            for a1 in free(4):
                y[a0, a1] = x[at(i[a0], 0), a1]
    return (y,)
"""
    program = parse(text)
    (kernel,) = program.steps
    assert isinstance(kernel, l.Kernel) and "x_p[" not in emit_cpu(kernel)[1]
    with pytest.raises(Exception, match="out of range"):
        compile_program(program, {}, options)([torch.empty(0, 4), torch.zeros(3, dtype=torch.int64)])
