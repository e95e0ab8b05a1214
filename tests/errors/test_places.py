"""Whatever a command refuses of a text, and whenever it finds that, has the place in that text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Terrazzo

LOOP = """# of somebody's

@loop
def f(x: f32[8, 4], ids: i64[8]):
    with kernel("z", z=f32[8, 4]):
        for a0 in free(8):
            for a1 in free(4):
                v0 = at0
                z[a0, a1] = v0
    return (z,)
"""
TILE = """@tile
def f(x: f32[3, 40]):
    # what is computed
    with kernel("z", z=f32[3]):
        for a0 in free(3):
            for r0 in reduce(40):
                acc0 <- max(x[a0, r0])
            z[a0] = acc0

    with schedule("z", target="sm_80"):  # and where
        a0 = grid(3)

        with site("acc0"):
            r0 = reg(2) * lane(32)
    return (z,)
"""
KERNEL = """@kernel
def f(x: f32[64]):
    with launch("z", _grid=1, _warps=2, _resident=1, _reads=[x], z=f32[64]):
        slab = shared(f32[64])
        sync()

        sync()
        slab[lane + warp * 32] = x[lane + warp * 32]
        if warp == 0:
            pass
        z[lane + warp * 32] = slab[63 - lane - warp * 32]
    return (z,)
"""


def refused(terrazzo: Terrazzo, file: Path, text: str, words: tuple[str, ...], code: int, marked: str) -> str:
    """What a command says of a text, whose caret must stand below the part that is `marked`."""
    file.write_text(text)
    done = terrazzo(*(str(file) if w == "FILE" else w for w in words), code=code)
    said = done.stdout + done.stderr
    line, caret = said.rstrip("\n").split("\n")[-2:]
    assert line[caret.index("^") :].startswith(marked), said
    number = 1 + text.splitlines().index(line[4:])
    assert f"{file}, line {number}, column {caret.index('^') - 3}: " in said
    return said


RUN = ("run", "--from", "loop", "FILE")


@pytest.mark.parametrize("words", [RUN, (*RUN, "--target", "interpreter"), ("check", "--from", "loop", "FILE")])
def test_what_the_data_says(terrazzo: Terrazzo, tmp_path: Path, words: tuple[str, ...]) -> None:
    text = LOOP.replace("at0", "x[at(sub(ids[a0], i64(2)), 8), a1]")
    assert "out of range" in refused(terrazzo, tmp_path / "f.txt", text, words, 2, "with kernel")


@pytest.mark.parametrize("what", ["run", "check"])
def test_an_op_that_pytorch_refuses_when_it_runs(terrazzo: Terrazzo, tmp_path: Path, what: str) -> None:
    text = """@loop
def f(x: f32[4, 4]):
    y, = call('aten.linalg_cholesky.default', x, _types=(f32[4, 4],))
    return (y,)
"""
    words = (what, "--allow-fallback", "--from", "loop", "FILE")
    said = refused(terrazzo, tmp_path / "f.txt", text, words, 2, "y, = call(")
    assert "linalg.cholesky: The factorization could not be completed" in said


@pytest.mark.parametrize("words", [("run", "--from", "tensor", "FILE"), ("check", "--from", "tensor", "FILE")])
def test_a_symbolic_size(terrazzo: Terrazzo, tmp_path: Path, words: tuple[str, ...]) -> None:
    text = "@tensor\ndef f(x: f32[S]):\n    S = size(1, 8)\n    y: f32[S] = exp(x)\n    return (y,)\n"
    assert "symbolic" in refused(terrazzo, tmp_path / "f.txt", text, words, 2, "x: f32[S]")


@pytest.mark.parametrize(
    ("before", "after", "marked", "message"),
    [
        ("a0 = grid(3)", "a0 = grid(2)", "a0 = grid(2)", "grid must be 3"),
        ("r0 = reg(2) * lane(32)", "r0 = reg(3) * lane(16)", "with site(", "acc0: 16 lanes"),
        ("r0 = reg(2) * lane(32)", "r1 = reg(2) * lane(32)", "r1 = reg(2)", "there is no axis r1"),
        ('site("acc0")', 'site("acc1")', 'with site("acc1")', "the kernel has no site acc1"),
        ("a0 = grid(3)", "a0 = grid(3, nonsense=7)", "nonsense=7", "nothing reads `a0 = ... nonsense=7 ...`"),
        ("a0 = grid(3)", "a0 = grid(3)\n        y = reg()", "reg()", "nothing reads `y = ... reg ...`"),
        ("lane(32)\n", 'lane(32)\n            x = smem(by="tma")\n', "smem(", "nothing reads `acc0: x = ... smem ...`"),
    ],
)
def test_a_word_of_a_schedule(
    terrazzo: Terrazzo, tmp_path: Path, before: str, after: str, marked: str, message: str
) -> None:
    """In Tile IR, and in a file of its own."""
    assert before in TILE
    text = TILE.replace(before, after)
    words = ("compile", "--from", "tile", "FILE", "--target", "sm_80", "--ir", "kernel")
    assert message in refused(terrazzo, tmp_path / "f.txt", text, words, 2, marked)
    start, end = text.index("    with schedule"), text.index("    return")
    loops = tmp_path / "loop.txt"
    loops.write_text(text[:start].replace("@tile", "@loop") + text[end:])
    alone = "\n".join(["# mine", "", *(line[4:] for line in text[start:end].splitlines())]) + "\n"
    words = ("compile", "--from", "loop", str(loops), "--schedule", "FILE", "--target", "sm_80", "--ir", "kernel")
    assert message in refused(terrazzo, tmp_path / "schedule.txt", alone, words, 2, marked)


PRODUCT = """@loop
def f(x: bf16[128, 320], w: bf16[96, 320]):
    with kernel("y", y=f32[128, 96]):
        for a0 in free(128):
            for a1 in free(96):
                for r0 in reduce(320):
                    acc0 <- sum(mul(f32(x[a0, r0]), f32(w[a1, r0])))
                y[a0, a1] = acc0
    return (y,)
"""
PINNED = """with schedule("y", target="sm_90a"):
    a0 = grid(2) * block(64)
    a1 = grid(3) * block(32)
    r0 = time(10, ring=4) * block(32)
    with site("acc0", on="mma.m16n8k16.f32.bf16"):
        a0 = warp(2) * reg(2) * inst.m(16)
        a1 = warp(2) * reg(2) * inst.n(8)
        r0 = reg(2) * inst.k(16)
        x = smem(by="cp.async", swizzle=64)
        w = smem(by="cp.async", swizzle=64)
"""


@pytest.mark.parametrize(
    ("before", "after", "message", "marked"),
    [
        ("f32.bf16", "f32.f16", "mma.m16n8k16.f32.f16 takes f16, and x is bf16", 'on="mma'),
        ("k16.f32", "k64.f32", "unknown instruction mma.m16n8k64.f32.bf16; known: fma.f32", 'on="mma'),
        ("inst.n(8)", "inst.n(4) * reg(2)", "acc0: mma.m16n8k16.f32.bf16 has n = 8, and inst.n is bound to 4", "with"),
        ("reg(2) * inst.n(8)", "inst.n(8) * reg(2)", "has its part of a1 side by side", "a1 ="),
        ('x = smem(by="cp.async"', 'x = smem(by="bus"', "x is brought in by 'bus'; known: ld, cp.async", 'by="bus"'),
        ("swizzle=64)\n        w", "swizzle=48)\n        w", "64 or 128 bytes, or not (0): not by 48", "swizzle=48"),
        ("swizzle=64)\n        w", "pad=-8)\n        w", "x: a pad is a number of elements, not -8", "pad=-8"),
        ("    with site", "    persistent(0)\n    with site", "persistent takes a number of blocks", "persistent(0)"),
        ("    with site", "    roles(load=warp(0), math=warp(4))\n    with site", "load is given warp(n)", "roles("),
        ("    with site", "    resident(0.5)\n    with site", "resident takes a number of blocks", "resident("),
    ],
)  # fmt: skip
def test_a_word_that_does_not_fit_a_product(
    terrazzo: Terrazzo, tmp_path: Path, before: str, after: str, message: str, marked: str
) -> None:
    assert before in PINNED
    loops = tmp_path / "loop.txt"
    loops.write_text(PRODUCT)
    words = ("compile", "--from", "loop", str(loops), "--schedule", "FILE", "--target", "sm_90a", "--ir", "kernel")
    text = PINNED.replace(before, after, 1)
    assert message in refused(terrazzo, tmp_path / "schedule.txt", text, words, 2, marked)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('schedule("z"', 'schedule("zz"', "there is no kernel zz to pin a schedule to"),
        ("sm_80", "sm_90a", "one for sm_90a, and the target is sm_80"),
    ],
)
def test_a_schedule_of_something_else(
    terrazzo: Terrazzo, tmp_path: Path, before: str, after: str, message: str
) -> None:
    start, end = TILE.index("    with schedule"), TILE.index("    return")
    loops = tmp_path / "loop.txt"
    loops.write_text(TILE[:start].replace("@tile", "@loop") + TILE[end:])
    text = "# mine\n" + "\n".join(line[4:] for line in TILE[start:end].splitlines()) + "\n"
    words = ("compile", "--from", "loop", str(loops), "--schedule", "FILE", "--target", "sm_80", "--ir", "kernel")
    text = text.replace(before, after)
    assert message in refused(terrazzo, tmp_path / "s.txt", text, words, 2, "with schedule")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sim", "FILE"), 1),
        (("check", "--from", "kernel", "FILE", "--target", "sm_80"), 1),
        (("run", "--interpret", "--from", "kernel", "FILE", "--target", "sm_80"), 2),
    ],
)
def test_what_the_simulator_sees(terrazzo: Terrazzo, tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """The statement's own line, though it is printed elsewhere."""
    said = refused(terrazzo, tmp_path / "f.txt", KERNEL, words, code, "z[lane + warp * 32] =")
    assert "with no barrier between" in said


def test_a_statement_among_equal_ones(terrazzo: Terrazzo, tmp_path: Path) -> None:
    """The first `sync()` is right, and the second is the one that is refused."""
    text = KERNEL.replace("            pass\n", "            sync()\n")
    words = ("run", "--interpret", "--from", "kernel", "FILE", "--target", "sm_80")
    file = tmp_path / "f.txt"
    said = refused(terrazzo, file, text.replace("        sync()\n\n        sync()\n", ""), words, 2, "sync()")
    assert "line 7," in said
    file.write_text(text)
    assert (
        f"{file}, line 10, column 13: z: `sync()` is reached by only some threads of a block"
        in terrazzo(*(str(file) if w == "FILE" else w for w in words), code=2).stderr
    )


def test_a_box_that_no_tensor_map_describes(terrazzo: Terrazzo, tmp_path: Path) -> None:
    text = """@kernel
def f(x: f32[8, 64] @ (128, 2)):
    with launch("z", _grid=1, _warps=1, _resident=1, _reads=[x], z=f32[8]):
        slab = shared(f32[8, 32])
        full = barriers(1, 1)
        if lane == 0:
            init_barriers(full)
        sync()
        if lane == 0:
            expect(full[0], 1024)
            tensor_load(slab[0, 0], x[0, 0], [8, 32], full[0])
        wait_barrier(full[0], 0)
        if lane < 8:
            z[lane] = slab[lane, 0]
    return (z,)
"""
    assert "TMA: " in refused(terrazzo, tmp_path / "f.txt", text, ("sim", "FILE"), 3, "tensor_load(")


@pytest.mark.parametrize(
    ("index", "view", "told"),
    [
        ("x[0, 0]", "f32[9, 64]", "tensor_load: f32[9, 64] does not lie in the memory of x: f32[8, 64]"),
        ("x[0, 0]", "i32[8, 64]", "tensor_load: i32[8, 64] does not lie in the memory of x: f32[8, 64]"),
        ("x[0]", "f32[8, 64]", "tensor_load: 1 indices into x, seen as f32[8, 64]"),
        ("x[0, 0, 0]", "f32[8, 64]", "tensor_load: 3 indices into x, seen as f32[8, 64]"),
    ],
)
def test_a_view_of_other_memory(terrazzo: Terrazzo, tmp_path: Path, index: str, view: str, told: str) -> None:
    text = f"""@kernel
def f(x: f32[8, 64]):
    with launch("z", _grid=1, _warps=1, _resident=1, _reads=[x], z=f32[8]):
        slab = shared(f32[8, 32])
        full = barriers(1, 1)
        if lane == 0:
            tensor_load(slab[0, 0], {index}, [8, 32], full[0], view={view})
        if lane < 8:
            z[lane] = slab[lane, 0]
    return (z,)
"""
    assert told in refused(terrazzo, tmp_path / "f.txt", text, ("sim", "FILE"), 2, "tensor_load(")


def test_nobody_resident(terrazzo: Terrazzo, tmp_path: Path) -> None:
    text = KERNEL.replace("_resident=1", "_resident=0")
    said = refused(terrazzo, tmp_path / "f.txt", text, ("sim", "FILE"), 2, "with launch")
    assert "at least 1 block is resident" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--from", "loop", "FILE"), "this is kernel IR, not loop IR"),
        (("check", "--from", "torch", "FILE"), "this is kernel IR, not torch IR"),
    ],
)
def test_another_ir(terrazzo: Terrazzo, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused(terrazzo, tmp_path / "f.txt", f"# mine\n{KERNEL}", words, 2, "kernel")


def test_the_simulator_runs_kernel_ir(terrazzo: Terrazzo, tmp_path: Path) -> None:
    assert "the simulator runs kernel IR" in refused(terrazzo, tmp_path / "f.txt", TILE, ("sim", "FILE"), 2, "tile")


def test_a_long_line_is_cut(terrazzo: Terrazzo, tmp_path: Path) -> None:
    file = tmp_path / "f.txt"
    file.write_text(
        "@loop\ndef f(" + ", ".join(f"x{n}: f32[8]" for n in range(5000)) + ", y: f33[8]):\n    return (y,)\n"
    )
    said = terrazzo("opt", str(file), code=2).stderr
    assert "unknown dtype 'f33'" in said and len(said) < 800
    line, caret = said.rstrip("\n").split("\n")[-2:]
    assert line[caret.index("^") :].startswith("f33[8]")


def test_what_is_wrong_elsewhere_has_no_place_here(terrazzo: Terrazzo, tmp_path: Path) -> None:
    file = tmp_path / "f.txt"
    file.write_text(LOOP.replace("at0", "x[a0, a1]"))
    said = terrazzo("compile", "--from", "loop", str(file), "--materialize", "nobody", code=2).stderr
    assert "nobody" in said and str(file) not in said
