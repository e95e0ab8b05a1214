"""What fuzzing found, as small as it gets: each is right now, or refused with its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from terrazzo.errors import Limitation, UserError
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.parse_schedule import parse_schedule
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from tests.cli.conftest import Terrazzo
from tests.fuzz import checks, scores
from tests.fuzz.aliases import Case, under_torch_compile
from tests.fuzz.schedules import terms

RIGHT = {
    "an index that is the one element of a tensor": """@tensor
def f(x: f32[5], i: i64):
    v0: f32 = index_map(lambda: x[at(i[()], 5)])
    return (v0,)
""",
    "a product of doubles, whose slabs would be more than the shared memory of most machines": """@tensor
def f(x: f64[16, 32], w: f64[32, 16]):
    v0: f64[16, 16, 32] = index_map(lambda i0, i1, i2: x[i0, i2])
    v1: f64[16, 16, 32] = index_map(lambda i0, i1, i2: w[i2, i1])
    v2: f64[16, 16, 32] = mul(v0, v1)
    v3: f64[16, 16] = reduce.sum(v2, axes=[2])
    return (v3,)
""",
    "a product of which two parts are added: an operand that is loaded twice": """@tensor
def f(x: f16[24, 24], w: f16[16, 24]):
    v0: f32[24, 24] = f32(x)
    v1: f32[16, 24, 24] = index_map(lambda i0, i1, i2: v0[i1, i2])
    v2: f32[16, 24] = f32(w)
    v3: f32[16, 24, 24] = index_map(lambda i0, i1, i2: v2[i0, i2])
    v4: f32[16, 24, 24] = mul(v1, v3)
    v5: f32[16, 24] = reduce.sum(v4, axes=[2])
    v6: f32[16, 24] = index_map(lambda i0, i1: v5[-i0 + 15, i1])
    v7: f32[16, 24] = add(v5, v6)
    return (v7,)
""",
    "registers called as a tensor is": """@tensor
def f(x: f32[1, 128]):
    v0: (f32[128], i64[128]) = opaque('aten.max.dim', x, 0)
    t: f32[128] = get(v0, 0)
    v2: f32[128] = mul(t, t)
    v3: f32 = reduce.sum(v2, axes=[0])
    u: f32[128] = index_map(lambda i0: v3[()])
    v4: f32[128] = mul(t, u)
    t_1: i64[128] = get(v0, 1)
    v5: i64[128] = literal(128)
    v6: i64[128] = mod(t_1, v5)
    v7: f32[128] = index_map(lambda i0: v4[at(v6[i0], 128)])
    v8: f32[128] = add(v7, t)
    return (v8,)
""",
    "a log-sum-exp of some NaN, whose sum must not depend on when they come": """@tensor
def f(special: f32[3, 128]):
    v0: f32[3, 128] = literal(1.0)
    v1: (f32, f32) = reduce.logsumexp(special, v0, axes=[0, 1])
    v2: f32 = get(v1, 1)
    return (v2,)
""",
    "sums of rows of which there are none, two axes of them": """@tensor
def f(x: f32[0, 4, 0]):
    v0: f32[0, 4, 0] = opaque('aten.neg.default', x)
    v1: f32[0, 0] = reduce.sum(v0, axes=[1])
    return (v1,)
""",
    "a softmax of short columns in 64 bits": """@tensor
def f(x0: f64[2, 2]):
    v0: f32[2, 2] = f32(x0)
    v1: f32[2] = reduce.max(v0, axes=[0])
    v2: f32[2, 2] = index_map(lambda i0, i1: v1[i1])
    v3: f32[2, 2] = sub(v0, v2)
    v4: f32[2, 2] = exp(v3)
    v5: f32[2] = reduce.sum(v4, axes=[0])
    v6: f32[2, 2] = index_map(lambda i0, i1: v5[i1])
    v7: f32[2, 2] = div(v4, v6)
    return (v7,)
""",
    "a constant below 0 in a type without a sign": """@tensor
def f(whole0: u64[5]):
    v0: i64[5] = iota(lambda i0: -1)
    v1: u64[5] = u64(v0)
    v2: u64[5] = add(whole0, v1)
    return (v2,)
""",
    "a log-sum-exp that begins with NaN": """@tensor
def f(special: f32[1, 40]):
    v0: f32[1, 40] = literal(1.0)
    v1: (f32[1, 40], f32[1, 40]) = scan.logsumexp(special, v0, axis=0)
    v2: f32[1, 40] = get(v1, 1)
    return (v2,)
""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_programs(name: str) -> None:
    program = parse(RIGHT[name])
    for target in ("sm_75", "sm_90a", "sm_120"):
        assert checks.program(program, target, True) == "right"  # type: ignore[arg-type]


ROUNDED = """@tensor
def f(x: f16[32, 64], w: f16[32, 64]):
    v0: bf16[32, 64] = bf16(x)
    v1: f32[32, 64] = f32(v0)
    v2: f32[32, 64] = f32(w)
    v3: f32[32, 32, 64] = index_map(lambda i0, i1, i2: v1[i0, i2])
    v4: f32[32, 32, 64] = index_map(lambda i0, i1, i2: v2[i1, i2])
    v5: f32[32, 32, 64] = mul(v3, v4)
    v6: f32[32, 32] = reduce.sum(v5, axes=[2])
    return (v6,)
"""


def test_a_conversion_to_another_type_of_16_bits_is_not_dropped() -> None:
    """Results would be nearer to float64 without it, so only the kernel shows it: halves that were rounded to bfloat16
    are no halves.
    """
    (kernel,) = lowering(parse(ROUNDED), Options(target="sm_90a")).at("kernel").steps
    products = (k.Multiply, k.MultiplyAsync)
    assert not any(isinstance(s, products) for s in k.walk(kernel.body))
    (kernel,) = lowering(parse(ROUNDED.replace("f32(v0)", "f32(x)")), Options(target="sm_90a")).at("kernel").steps
    assert any(isinstance(s, products) for s in k.walk(kernel.body))


@pytest.mark.parametrize("name", ["a0", "r0", "i0", "in0", "v0", "acc0", "other0", "lane", "warp", "block"])
def test_a_tensor_may_be_called_as_an_axis_or_a_value(name: str) -> None:
    text = f"""@tensor
def f({name}: f32[40, 128]):
    q: f32[40] = reduce.sum({name}, axes=[1])
    w: f32[40, 128] = index_map(lambda i0, i1: q[i0])
    y: f32[40, 128] = mul({name}, w)
    z: f32[128, 40] = index_map(lambda i0, i1: {name}[i1, i0])
    return (y, z, q)
"""
    assert checks.program(parse(text), "sm_80", True) == "right"  # type: ignore[arg-type]


SCHEDULES = {
    "more lanes than a warp has, in no site": (
        "sum of short rows",
        "a0 = warp(1) * lane(4) * lane(32)",
        "sum_1: 128 lanes; a warp has 32",
    ),
    "a block that nobody divides": (
        "matmul",
        """a0 = grid(5) * block(4)
           a1 = grid(35)
           with site("acc0"):
               r0 = reg(23)""",
        "a0: block(4) is divided among threads by no site that needs it",
    ),
    "steps that nobody takes": (
        "matmul",
        "r0 = time(8) * block(3)",
        "r0: block(3) is divided among threads by no site that needs it",
    ),
    "grid in a site": (
        "softmax",
        """with site("_softmax"):
               a1 = grid(100)""",
        "_softmax: a1 = grid(100): grid(100) is for the kernel to bind",
    ),
    "sites like each other": (
        "matmul",
        """a0 = grid(5) * block(4)
           with site("acc0"):
               a0 = like("mm")
           with site("mm"):
               a0 = like("acc0")""",
        "like('acc0'): that is like this one, and nobody says how a0 is bound",
    ),
    "a reduction among lanes inside one among the same lanes": (
        "product and row sums",
        """a0 = grid(3) * lane(8)
           with site("acc0"):
               r1 = reg(5) * lane(4)
           with site("acc1"):
               r0 = reg(1) * lane(4)""",
        "sum_1: threads not all inside r1 meet in a reduction of its steps",
    ),
    "a reduction among lanes of which only some are there": (
        "product and row sums",
        """with site("acc0"):
               r1 = reg(1) * lane(32)
           with site("acc1"):
               r0 = reg(1) * lane(32)""",
        "sum_1: threads not all inside r1 meet in a reduction of its steps",
    ),
    "tiles one after the other": (
        "matmul",
        """a0 = time(5) * block(4)
           a1 = grid(5) * block(8)
           r0 = time(23) * block(1)
           with site("acc0", on="fma.f32"):
               a0 = lane(4)
               a1 = lane(8)
               r0 = reg(1)""",
        "a0: only the grid walks the tiles of a contraction yet",
    ),
    "a tile inside an axis of threads": (
        "bmm",
        """a1 = grid(2) * block(8)
           r0 = time(8, ring=1) * block(2)
           with site("bmm"):
               a0 = like("acc0")
               a1 = like("acc0")
           with site("acc0", on="fma.f32"):
               a0 = reg(1) * lane(4)
               a1 = lane(8)
               r0 = reg(2)""",
        "a0 lies inside a tile of a1, so only the grid can walk it",
    ),
    "an instruction for another type": (
        "matmul of bfloat16",
        """a0 = grid(2) * block(16)
           a1 = grid(6) * block(8)
           r0 = time(4) * block(16)
           with site("acc0", on="mma.m16n8k16.f32.f16"):
               a0 = inst.m(16)
               a1 = inst.n(8)
               r0 = inst.k(16)
           with site("mm"):
               a0 = like("acc0")
               a1 = like("acc0")""",
        "mma.m16n8k16.f32.f16 takes f16, and x is bf16",
    ),
    "an instruction outside the tile of a contraction": (
        "matmul of bfloat16",
        """a0 = grid(1) * warp(32)
           a1 = grid(1) * block(64)
           r0 = time(4) * block(16)
           with site("acc0", on="mma.m16n8k16.f32.bf16"):
               a0 = inst.m(16)
               a1 = reg(8) * inst.n(8)
               r0 = inst.k(16)
           with site("mm"):
               a0 = like("acc0")
               a1 = like("acc0")""",
        "a0 lies inside a tile of a1, so only the grid can walk it",
    ),
    "rows that ldmatrix cannot read": (
        "matmul of bfloat16",
        """a0 = grid(2) * block(16)
           a1 = grid(6) * block(8)
           r0 = time(4) * block(16)
           with site("acc0", on="mma.m16n8k16.f32.bf16"):
               a0 = inst.m(16)
               a1 = inst.n(8)
               r0 = inst.k(16)
               x = smem(by="ld", pad=4)
           with site("mm"):
               a0 = like("acc0")
               a1 = like("acc0")""",
        "x_s: its rows lie 20 elements apart, and ldmatrix reads pieces of 16 bytes",
    ),
    "a store that divides a tile otherwise than the product": (
        "matmul",
        """a0 = grid(18)
           a1 = grid(1) * block(128)
           r0 = time(12, ring=1) * block(2)
           with site("acc0", on="fma.f32"):
               a1 = reg(2) * warp(2) * lane(32)
               r0 = reg(2)
           with site("mm"):
               a1 = warp(2) * reg(2) * lane(32)""",
        "a1 is divided otherwise than its accumulators are: like(...) divides both alike",
    ),
    "groups of no rows": (
        "cat",
        """a0 = grid(5, order=grouped(0))
           a1 = grid(16)""",
        "grid(5, order=grouped(0)): grouped takes the number of rows of a group",
    ),
    "more registers than a thread has": (
        "variance",
        """a0 = grid(1) * reg(4) * lane(32)
           with site("acc0"):
               r0 = reg(128)
           with site("acc1"):
               r1 = reg(128)""",
        "registers of a thread, and sm_80 has 255",
    ),
    "a slab of one element": (
        "bmm",
        """a1 = grid(1) * block(32)
           a2 = grid(17)
           r0 = time(16) * block(1)
           with site("acc0", on="fma.f32"):
               a1 = lane(32)
               r0 = reg(1)
           with site("bmm"):
               a1 = like("acc0")""",
        "w: a step of the tile needs one element of it, which is no slab",
    ),
}
"""Name: term, lines of its schedule, why it is refused. All were wrong results, races or crashes."""


def written(kernel: str, lines: str) -> str:
    """The text of a schedule with these lines."""
    return f'with schedule("{kernel}", target="sm_80"):\n    {lines.replace(chr(10) + " " * 11, chr(10) + " " * 4)}\n'


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_are_refused(name: str) -> None:
    subject, lines, reason = SCHEDULES[name]
    term = terms(subject, "sm_80")[0]
    with pytest.raises((UserError, Limitation), match=re.escape(reason)):
        lowering(term.program, Options(target="sm_80", schedules=(written(term.kernel.name, lines),)))


RING_IN_A_LOOP = """a1 = grid(1) * block(32)
           a2 = grid(1) * block(64)
           r0 = time(1, ring=4) * block(32)
           with site("acc0", on="mma.m16n8k16.f32.f16"):
               a1 = reg(2) * inst.m(16)
               a2 = warp(2) * reg(4) * inst.n(8)
               r0 = reg(2) * inst.k(16)
               x = smem(by="tma", swizzle=64)
               w = smem(by="tma", swizzle=128)
           with site("bmm"):
               a1 = like("acc0")
               a2 = like("acc0")"""


def test_a_ring_of_boxes_inside_a_loop_is_refused() -> None:
    """Its phases began anew with every tile: the second would wait for what was over."""
    term = terms("bmm of half", "sm_90a")[0]
    with pytest.raises(Limitation, match="a0 lies inside a tile of a1, a2, so only the grid can walk it"):
        lowering(
            term.program,
            Options(target="sm_90a", schedules=(written(term.kernel.name, RING_IN_A_LOOP).replace("sm_80", "sm_90a"),)),
        )


MEETING = """a0 = reg(9)
           with site("acc0"):
               r0 = warp(2) * lane(32)"""
OUTSIDE = """with site("acc0"):
               a0 = reg(1) * lane(32)
               r0 = reg(100)
           with site("acc1"):
               a0 = reg(1) * lane(16)
               r1 = reg(25) * reg(2) * lane(2)
           with site("_softmax"):
               a0 = reg(1) * lane(16)
               a1 = reg(25) * lane(2) * reg(2)"""
NOTHING = """a0 = grid(90)
           with site("sum_1"):
               pass"""


@pytest.mark.parametrize(
    ("subject", "lines"),
    [
        pytest.param("any", MEETING, id="warps meet in every step of an unrolled loop"),
        pytest.param("softmax", OUTSIDE, id="lanes beyond the last row meet others, and load nothing in vectors"),
        pytest.param("sum of short rows", "r0 = grid(5)", id="a reduction over blocks, in two kernels"),
        pytest.param("sum of short rows", NOTHING, id="a site of nothing reads back"),
    ],
)
def test_schedules_that_are_right(subject: str, lines: str) -> None:
    term = terms(subject, "sm_80")[0]
    assert checks.schedule(term, parse_schedule(written(term.kernel.name, lines))) == "right"


def test_a_kernel_stores_something() -> None:
    text = """@loop
def f(x: f32[4]):
    with kernel('k', y=f32[4]):
        for a0 in free(4):
            in0 = x[a0]
    return (x,)
"""
    with pytest.raises(UserError, match="the kernel k stores nothing"):
        parse(text)


def test_a_program_that_leaves_its_tensor_is_the_users_error() -> None:
    text = "@tensor\ndef f(x: f32[4]):\n    y: f32[4] = index_map(lambda i0: x[i0 + 1])\n    return (y,)\n"
    with pytest.raises(UserError, match=r"line 3, column 17: the index map y may leave dimension 0 of f32\[4\] with"):
        parse(text)


HOSTILE = {
    "a store at a constant beyond its buffer": (
        "@loop\ndef f(x: f32[8]):\n    with kernel('k', y=f32[8]):\n        for a0 in free(8):\n"
        "            y[a0 + 1000000] = x[a0]\n    return (y,)\n",
        "line 5, column 13: the store to y does not cover dimension 0",
    ),
    "an index from a tensor that is read beyond its end, in Loop IR": (
        "@loop\ndef f(x: f32[8], i: i64[8]):\n    with kernel('k', y=f32[8]):\n        for a0 in free(8):\n"
        "            y[a0] = x[at(i[a0 + 1], 8)]\n    return (y,)\n",
        r"line 5, column 26: the load i\[a0 \+ 1\] may leave dimension 0",
    ),
    "a loop called as another around it": (
        "@kernel\ndef f(x: f32[8]):\n    with launch('k', _grid=1, _warps=1, _resident=1, _reads=[x], y=f32[8]):\n"
        "        for t0 in serial(8):\n            for t0 in serial(8):\n                y[t0] = x[t0]\n"
        "    return (y,)\n",
        "line 5, column 13: t0 is already a variable",
    ),
    "registers with gaps between them": (
        "@kernel\ndef f(x: f32[8]):\n    with launch('k', _grid=1, _warps=1, _resident=1, _reads=[x], y=f32[8]):\n"
        "        a = registers(f32[4] @ (8,))\n        a[3] = x[0]\n    return (y,)\n",
        "line 4, column 23: registers lie one behind the other, without strides",
    ),
    "a loop called as the number of a thread": (
        "@kernel\ndef f(x: f32[8]):\n    with launch('k', _grid=1, _warps=1, _resident=1, _reads=[x], y=f32[8]):\n"
        "        for block in serial(8):\n            y[block] = x[block]\n    return (y,)\n",
        "line 4, column 9: block is already a variable",
    ),
}
"""Texts that were read, and then did harm: each is refused now, where it stands."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_refused(name: str) -> None:
    text, message = HOSTILE[name]
    with pytest.raises(UserError, match=message):
        parse(text)


EMPTY = """@kernel
def f(x: f32[8]):
    with launch('k', _grid=1, _warps=1, _resident=1, _reads=[x], y=f32[8, 0]):
        if 7 - lane >= 0:
            for t0 in serial(4):
                y[lane, t0] = x[lane]
    return (y,)
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EMPTY, r"line 6, column 17: k: `y\[lane, t0\] = x\[lane\]` at \[t0\] is outside \[0, 0\)"),
        (
            EMPTY.replace("8, 0", "8, 4").replace("x[lane]", "x[lane + 1]"),
            r"line 6, column 17: k: .* is outside \[0, 8\)",
        ),
        (
            EMPTY.replace("8, 0", "8, 4").replace("serial(4)", "serial(1048576)").replace("t0]", "t0 * t0 * t0 % 5]"),
            r"line 6, column 17: k: .*(is outside|cannot be proved)",
        ),
    ],
)
def test_a_kernel_that_leaves_a_buffer_is_refused_where_it_does(
    terrazzo: Terrazzo, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "kernel.txt"
    file.write_text(text)
    told = terrazzo("run", "--interpret", "--target", "sm_90a", "--from", "kernel", str(file), code=2).stderr
    assert re.search(message, told), told


@pytest.mark.parametrize("strides", ["(1, 8)", "(16, 2)", "(0, 1)", "(100, 1)"])
def test_a_text_with_strides_runs(terrazzo: Terrazzo, tmp_path: Path, strides: str) -> None:
    """Its random inputs are laid out as it says."""
    file = tmp_path / "loop.txt"
    file.write_text(
        f"@loop\ndef f(x: f32[8, 8] @ {strides}):\n    with kernel('k', y=f32[8, 8]):\n        for a0 in free(8):\n"
        "            for a1 in free(8):\n                y[a0, a1] = neg(x[a0, a1])\n    return (y,)\n"
    )
    assert "check: ok" in terrazzo("run", "--check", "--from", "loop", str(file)).stdout
    assert "ok: no rule" in terrazzo("check", "--from", "loop", str(file)).stdout


ALIASED = {
    "other memory for a tensor that was written to": Case(
        ("torch.arange(16.).reshape(4, 4)", "x0.detach()"), ("x0 += x1", "x0.set_(x1)"), ("x0", "x1")
    ),
    "a write to memory of which one input is detached": Case(
        ("torch.arange(16.).reshape(4, 4)", "x0.detach()"), ("x0 += x1",), ("x1",)
    ),
}


@pytest.mark.parametrize("name", ALIASED)
def test_writes_that_aotautograd_does_not_follow(name: str) -> None:
    """PyTorch runs these as they are; AOTAutograd refuses them, or loses the write."""
    assert under_torch_compile(ALIASED[name]) == "right, partly by PyTorch"


def test_a_table_that_is_looked_up_beyond_the_last_row_and_key() -> None:
    """Where there is no such row, the place in the table may be none."""
    change = "s + table[(i - j).clamp(-4, 4) + 4]"
    case = scores.Case(1, 1, 1, 3, 3, 16, 16, "bfloat16", (change,), "", "added", "sm_90a", True, False)
    assert scores.check(case).startswith("right")
