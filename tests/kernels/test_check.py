"""Static checks: nothing is said of what is right, and one mistake at a time is named with its line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels import by_hand
from tests.kernels.programs import CASES, TARGETS, case, lowered, swiglu

from terrazzo.errors import CompilerBug, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp.kernel.sample import blocks, check_blocks
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.check import check, report

DEPENDS_ON_DATA_OR_TOO_MANY = {"sum of very many": 1, "max_pool2d": 1}
"""Accesses of a program that neither ranges nor trying prove."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_accesses_of_every_kernel_are_proved(name: str, target: str) -> None:
    found = [report(kernel, gpu(target)) for kernel in case(name, target).kernels]
    assert not [r.problems for r in found if r.problems]
    assert sum(r.accesses - r.proved for r in found) <= DEPENDS_ON_DATA_OR_TOO_MANY.get(name, 0)


@pytest.mark.parametrize("name", by_hand.MEANING)
def test_accesses_of_kernels_by_hand_are_proved(name: str) -> None:
    for kernel in by_hand.program(name).steps:
        found = report(kernel, gpu("sm_90a"))
        assert found.problems == () and found.proved == found.accesses > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", TARGETS)
def test_large_kernels_are_proved(target: str, dtype: torch.dtype) -> None:
    for fn, shapes in (
        (F.linear, ((4096, 4096), (4096, 4096))),
        (F.linear, ((1000, 1000), (999, 1000))),
        (F.linear, ((1, 4096), (4000, 4096))),
        (swiglu, ((2048, 2048), (5632, 2048), (5632, 2048))),
        (lambda x: torch.softmax(x, -1), ((512, 32001),)),
        (lambda x, w: F.rms_norm(x, (8192,), w), ((64, 8192), (8192,))),
        (lambda x, w: F.conv2d(x, w, padding=1), ((8, 64, 56, 56), (64, 64, 3, 3))),
    ):
        args = tuple(torch.empty(s, dtype=dtype) for s in shapes)
        for kernel in lowered(fn, args, target).kernels:
            found = report(kernel, gpu(target))
            assert found.problems == () and found.proved == found.accesses, kernel.name


def planted(text: str, pattern: str, replacement: str, target: str) -> str:
    """What is said of a program's text with its first place that matches changed."""
    new, count = re.subn(pattern, replacement, text, count=1)
    assert count and new != text
    with pytest.raises(CompilerBug) as bug:
        check(parse(new), gpu(target))
    return str(bug.value)


RING, BOXES = "matmul of half", "transposed matmul of bfloat16 in many steps"


@pytest.mark.parametrize(
    ("name", "target", "pattern", "replacement", "told"),
    [
        ("softmax", "sm_90a", r"x\[block,", "x[block + 1,",
         r"at \[block \+ 1\] is outside \[0, 37\) in dimension 0 of x, at block 36"),
        ("gelu", "sm_90a", r"\bx\[", "x[1 + ", "is outside"),
        ("layer norm", "sm_90a", r"meet0\[warp", "meet0[warp + 1", "is outside"),
        ("cumsum", "sm_90a", r"move\(in0\[0\], x\[", "move(in0[0], x[2 + ", "is outside"),
        ("ragged matmul of bfloat16", "sm_80", r"< 39\b", "< 40", "is outside"),
        ("ragged matmul of bfloat16", "sm_75", r"< 136\b", "< 137", "is outside|beyond the end"),
        (RING, "sm_80", r"(load_matrix\('[^']*', \w+\[[^\]]*\], \w+\[[^,]*, )", r"\g<1>64 + ", "is outside"),
        (RING, "sm_80", r"(load_matrix\('[^']*', \w+\[[^\]]*\], \w+\[[^\]]*)\]", r"\1 + 4]",
         "is not aligned to 16 bytes"),
        ("linear", "sm_80", r"(async_copy\(x_s0\[t2, [^,]*, )", r"\g<1>2 + ", "is not aligned to 16 bytes"),
        (RING, "sm_80", r"sync\(\)", "if lane < 16:\n                sync()", "only some threads of a block"),
        (RING, "sm_80", r"( +)(multiply\(.*\))", r"\1if lane >= 1:\n\1    \2", "only some threads of a warp"),
        ("softmax", "sm_90a", r"( +)(other0 = .*)\n +(.*)", r"\1if lane >= 1:\n\1    \2\n\1    \3",
         "only some threads of a warp"),
        (RING, "sm_80", r"wait_groups\(2\)", "wait_groups(3)", "where a copy is on its way"),
        (RING, "sm_80", r"wait_groups\(\d\)", "pass", "where a copy is on its way"),
        (RING, "sm_80", r"commit\(\)", "pass", "where a copy is on its way|ends while work of cp.async"),
        (BOXES, "sm_120", r"expect\(.*\)", "pass", "announces 0 bytes"),
        (BOXES, "sm_120", r"expect\((.*), (\d+)\)", r"expect(\1, \g<2>0)", "bytes at .* come"),
        (BOXES, "sm_120", r"tensor_load\(.*\)", "pass", "bytes at .* come"),
        (BOXES, "sm_120", r" and lane == 0( and .*\n +expect)", r"\1", "by several threads of a warp"),
        (BOXES, "sm_120", r"wait_barrier\(.*\)", "pass", "where nobody waits"),
        (BOXES, "sm_120", r"wait_barrier\((.*\]), (.*)\)", r"wait_barrier(\1, 1 - (\2))", "waits for phase 1"),
        (BOXES, "sm_120", r"wait_barrier\((.*\]), (.*)\)", r"wait_barrier(\1, 0)",
         "waits for phase 0 .* after another"),
        (BOXES, "sm_120", r"tensor_load\((\w+\[)([^,]+),(.*)", r"tensor_load(\1(\2 + 1) % 4,\3",
         "on its way|no box has filled"),
        (BOXES, "sm_120", r"tensor_load\((\w+\[[^,]+, )0", r"tensor_load(\g<1>1", "is not aligned to 512 bytes"),
    ],
)  # fmt: skip
def test_one_line_changed(name: str, target: str, pattern: str, replacement: str, told: str) -> None:
    said = planted(show(case(name, target).program), pattern, replacement, target)
    assert re.search(told, said) and "`" in said


@pytest.mark.parametrize(
    ("pattern", "replacement", "told"),
    [
        (r"expect\(.*\)", "pass", "announces 0 bytes at full0"),
        (r"expect\((.*), (\d+)\)", r"expect(\1, \g<2>0)", "bytes at full0.* come"),
        (r"tensor_load\(.*\)", "pass", "bytes at full0.* come"),
        (r" and lane == 0(:\n +for)", r"\1", "`expect.*` is executed by several threads of a warp"),
        (r"wait_barrier\(full.*\)", "pass", "`tensor_load.*` sends a box to full0, where nobody waits"),
        (r"wait_barrier\((full.*\]), (.*)\)", r"wait_barrier(\1, 1 - (\2))", "`wait_barrier.*` waits for phase 1 of"),
        (r"wait_barrier\((full.*\]), (.*)\)", r"wait_barrier(\1, 0)", "`wait_barrier.*phase 0 .* after another"),
        (r"tensor_load\((\w+\[[^,]+, )0", r"tensor_load(\g<1>1", "`tensor_load.*` goes .* beyond the end of x_s0"),
        (r"wait_groups\(0, 'wgmma'\)", "pass", "uses registers of acc0 that wgmma is using"),
        (r"fence\('wgmma'\)", "pass", "acc0 with no wgmma fence"),
        (r"fence\('proxy'\)", "pass", "mm_s0 with no proxy fence"),
    ],
)  # fmt: skip
def test_one_line_of_roles_changed(pattern: str, replacement: str, told: str) -> None:
    assert re.search(told, planted(show(case(BOXES, "sm_90a").program), pattern, replacement, "sm_90a"))


@pytest.mark.parametrize(
    ("pattern", "replacement", "told"),
    [
        (
            r"multiply_async\(.*\)",
            "if lane >= 1:\n                        \\g<0>",
            "only some threads of a warpgroup",
        ),
        (r"(x_s\[t % 4), \(warp // 4\) \* 64 - 64", r"\1, (warp // 4) * 64", "is outside|beyond the end"),
        (r"wait_groups\(0, 'wgmma'\)", "pass", "uses registers of acc that wgmma is using"),
        (r"expect\(full\[t % 4\], 49152\)", "expect(full[t % 4], 32768)", "announces .* 49152|announces"),
        (r"wait_barrier\(full\[t % 4\], t // 4\)", "wait_barrier(full[t % 4], 1 - t // 4)", "waits for phase 1"),
        (r"w_s = shared\(bf16\[4, 256", "w_s = shared(bf16[8, 256", "needs 327.* bytes of shared memory"),
        (r", registers=232\):(\s+acc = registers\()f32\[128\]", r"):\1f32[300]", "registers of a thread"),
    ],
)
def test_one_line_of_a_ring_between_roles_changed(pattern: str, replacement: str, told: str) -> None:
    assert re.search(told, planted(show(by_hand.program("ring")), pattern, replacement, "sm_90a"))


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "told"),
    [
        ("ring", r"fence\('wgmma'\)", "pass", "acc with no wgmma fence"),
        ("cluster", r"fence\('proxy'\)", "pass", "y_s with no proxy fence"),
        ("copied", r"fence\('proxy'\)", "pass", "with no proxy fence"),
        ("copied", r"(wait_groups\(\d+\))(\s+)fence\('proxy'\)", r"fence('proxy')\2\1", "with no proxy fence"),
        ("registers", r"fence\('wgmma'\)", "pass", "with no wgmma fence"),
        ("chain", r"wait_groups\(1, 'wgmma'\)", "wait_groups(2, 'wgmma')", "registers of s that wgmma is using"),
        ("chain", r"s\[j\] = fmax", "o[j] = fmax", "registers of o that wgmma is using"),
        ("chain", r"m64n96k16.f32.bf16", "m64n96k16.f32.f16", "takes f16 or u32, and p holds bf16"),
        ("chain", r"p\[kk \* 8\]", "p[kk * 8 - kk % 2]", "is not aligned to 4 bytes in p"),
        (
            "chain",
            r"(v_s\[t % 2, 0, kk \* 16), 0\], transposed='b'",
            r"\1 + 16, 0], transposed='b'",
            "is outside",
        ),
        ("chain", r"o = registers\(f32\[48\]\)", "o = registers(f32[40])", "beyond the end of o"),
    ],
)
def test_a_fence_or_a_wait_less(name: str, pattern: str, replacement: str, told: str) -> None:
    assert re.search(told, planted(show(by_hand.program(name)), pattern, replacement, "sm_90a"))


def test_a_users_text_is_the_users_error() -> None:
    text = show(case("softmax", "sm_90a").program).replace("x[block,", "x[block + 1,")
    with pytest.raises(UserError, match=r"_softmax: `.*` at \[block \+ 1\] is outside"):
        lowering(parse(text), Options(target="sm_90a"))
    lowering(case("softmax", "sm_90a").program, Options(target="sm_90a"))


def test_blocks_of_a_sample_are_at_the_edges_of_the_grid() -> None:
    (kernel,) = case("ragged matmul of bfloat16", "sm_80").kernels
    assert kernel.grid == 10 and {0, 1, 8, 9} <= set(blocks(kernel))


def race(program: k.Program) -> Any:
    return parse(re.sub(r"(wait_groups\(\d+\)\s+)sync\(\)", r"\1pass", show(program), count=1))


@pytest.mark.parametrize("name", ["matmul", "embedding", "cross entropy", "swiglu", "two results"])
def test_a_sample_of_what_is_right_is_right(name: str) -> None:
    lowering(case(name, "sm_90a").program, Options(target="sm_90a", check=True))


def test_a_sample_finds_a_race() -> None:
    program = race(case(RING, "sm_80").program)
    check(program, gpu("sm_80"))  # which no static check does
    with pytest.raises(CompilerBug, match="no barrier between"):
        check_blocks(program.steps[0])
    with pytest.raises(UserError, match="no barrier between"):
        lowering(program, Options(target="sm_80", check=True))
