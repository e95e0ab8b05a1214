"""The simulator notices what a GPU would punish: derived kernels with one line changed, and small ones with each
mistake alone.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.kernels.programs import Lowered, case

from terrazzo.errors import CompilerBug, UserError
from terrazzo.interp import kernel as simulator
from terrazzo.ir.text import parse, show


def changed(found: Lowered, pattern: str, replacement: str, number: int = 0) -> str:
    """The kernels' text with one place changed: the `number`-th that matches."""
    text = show(found.program)
    places = list(re.finditer(pattern, text))
    assert len(places) > number, f"{pattern} is not in\n{text}"
    m = places[number]
    new = text[: m.start()] + m.expand(replacement) + text[m.end() :]
    assert new != text
    return new


def caught(found: Lowered, text: str) -> str:
    """What the simulator says of the text; that the original is fine was seen before."""
    original = parse(show(found.program))
    found.simulated(original)
    with pytest.raises(CompilerBug) as bug:
        found.simulated(parse(text))
    return str(bug.value)


RING = ("matmul of bfloat16", "matmul of half", "matmul", "bmm", "einsum", "long product")
SHARED = (
    "softmax of long rows",
    "rms norm of prime width",
    "variance of all",
    "argmax",
    "sum of very many",
    "logsumexp",
)
SLABS = ("linear", "matmul, both transposed", "bmm")
OTHER_WARP = "|".join(
    (
        "as another warp wrote it, with no barrier between",
        "that nobody wrote",
        "while another warp reads it",
        "where another warp wrote",
        "where a copy is on its way",
    )
)


@pytest.mark.parametrize("name", RING)
def test_a_ring_without_its_barrier(name: str) -> None:
    told = caught(case(name, "sm_80"), changed(case(name, "sm_80"), r"(wait_groups\(\d+\)\s+)sync\(\)", r"\1pass"))
    assert re.search(OTHER_WARP, told)


@pytest.mark.parametrize("name", RING)
def test_a_ring_that_waits_for_too_little(name: str) -> None:
    found = case(name, "sm_80")
    ahead = int(re.findall(r"wait_groups\((\d+)\)", show(found.program))[0])
    assert re.search(OTHER_WARP, caught(found, changed(found, r"wait_groups\(\d+\)", f"wait_groups({ahead + 1})")))


@pytest.mark.parametrize("name", RING)
def test_a_ring_without_its_first_groups(name: str) -> None:
    found = case(name, "sm_80")
    assert re.search(OTHER_WARP, caught(found, changed(found, r"commit\(\)", "pass")))


@pytest.mark.parametrize("name", ["matmul of bfloat16", "matmul of half"])
def test_a_slot_that_is_not_filled_yet(name: str) -> None:
    found = case(name, "sm_80")
    (ring,) = {int(n) for n in re.findall(r"_s\d = shared\(\w+\[(\d+),", show(found.program))}
    text = changed(
        found,
        r"(load_matrix\('ldmatrix.x\d(?:.trans)?', \w+\[[^\]]*\], \w+\[)([^,]+),",
        rf"\1(\2 + {ring - 1}) % {ring},",
    )
    assert "nobody wrote" in caught(found, text)


@pytest.mark.parametrize("name", SHARED)
def test_warps_that_meet_without_a_barrier(name: str) -> None:
    found = case(name, "sm_90a")
    assert re.search(OTHER_WARP, caught(found, changed(found, r"sync\(\)", "pass")))


@pytest.mark.parametrize("name", SLABS)
@pytest.mark.parametrize("number", [0, 1])
def test_slabs_through_registers_without_a_barrier(name: str, number: int) -> None:
    found = case(name, "sm_75")
    assert re.search(OTHER_WARP, caught(found, changed(found, r"sync\(\)", "pass", number)))


UNEQUAL = r"line \d+ `wait_barrier.*`: \d+ bytes are expected at \w+\[0\], and \d+ came"
BOXES = ("transposed matmul of bfloat16", "bmm of half", "swiglu", "transposed matmul of bfloat16 in many steps")


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize(
    ("pattern", "replacement", "told"),
    [
        (r"init_barriers\(\w+\)", "pass", "which nobody made"),
        (r"(init_barriers\(\w+\)\s+)sync\(\)", r"\1pass", "as one thread makes it"),
        (r"expect\(.*\)", "pass", "waits for ever|phase"),
        (r"expect\((.*), (\d+)\)", r"expect(\1, \g<2>0)", UNEQUAL),
        (r"expect\((.*), (\d+)\)", r"expect(\1, 16)", r"`: 16 bytes are expected at \w+\[0\], and \d{3,} came"),
        (r"tensor_load\(.*\)", "pass", UNEQUAL),
        (r" and lane == 0( and .*\n +expect)", r"\1", "Expect is executed by several threads of a warp"),
        (r"wait_barrier\(.*\)", "pass", "where a copy is on its way"),
        (r"wait_barrier\((.*\]), (.*)\)", r"wait_barrier(\1, 1 - (\2))", "waits for ever"),
        (
            r"wait_barrier\((\w+)\[([^\]]*)\]",
            r"wait_barrier(\1[(\2 + 1) % 4]",
            "nobody wrote|where a copy is on its way|waits for ever",
        ),
        (r"tensor_load\((\w+\[)([^,]+),(.*)", r"tensor_load(\1(\2 + 1) % 4,\3", OTHER_WARP),
    ],
)
def test_boxes_that_come_to_a_ring(name: str, pattern: str, replacement: str, told: str) -> None:
    found = case(name, "sm_120")
    assert "tensor_load" in show(found.program) and "role" not in show(found.program)
    said = caught(found, changed(found, pattern, replacement))
    assert re.search(told, said) and not ("bytes are expected" in said and "for ever" in said)


def test_a_box_that_nobody_waits_for() -> None:
    found = case("transposed matmul of bfloat16 in many steps", "sm_120")
    steps = changed(found, r"serial\(9\)", "serial(5)")
    assert "ends while copies are on their way" in caught(found, steps)


def test_a_box_that_comes_to_a_slot_in_use() -> None:
    found = case("transposed matmul of bfloat16 in many steps", "sm_120")
    assert "while another warp reads it" in caught(found, changed(found, r"(wait_barrier\(.*\)\s+)sync\(\)", r"\1pass"))


@pytest.mark.parametrize(
    ("pattern", "replacement", "told"),
    [
        (r"init_barriers\(empty\w+\)", "pass", "which nobody made"),
        (r"(init_barriers\(empty\w+\)\s+)sync\(\)", r"\1pass", "as one thread makes it"),
        (r"expect\(.*\)", "pass", "waits for ever|phase"),
        (r"expect\((.*), (\d+)\)", r"expect(\1, \g<2>0)", "bytes are expected|waits for ever"),
        (r"tensor_load\(.*\)", "pass", "bytes are expected|waits for ever"),
        (r" and lane == 0(:\n +for)", r"\1", "by several threads of a warp"),
        (r"warp % 4 == 0 and (lane == 0:\n +for)", r"\1", "arrive|phase|bytes|in flight|on its way"),
        (r"wait_barrier\(full.*\)", "pass", "where a copy is on its way|nobody wrote"),
        (r"wait_barrier\((full.*\]), (.*)\)", r"wait_barrier(\1, 1 - (\2))", "waits for ever|on its way|nobody wrote"),
        (r"wait_barrier\(empty.*\)", "pass", "whose phase before may not have ended"),
        (r"wait_barrier\((empty.*\]), (.*)\)", r"wait_barrier(\1, 1 - (\2))", "waits for ever"),
        (r"arrive\(empty0\[\(.*\)", "pass", "waits for ever"),
        (r"(tensor_load\(\w+\[)([^,]+),(.*)", r"\1(\2 + 1) % 8,\3", OTHER_WARP),
        (r"wait_groups\(1, 'wgmma'\)", "pass", "while another warp reads it"),
        (r"wait_groups\(0, 'wgmma'\)", "pass", "uses registers of acc0 that wgmma is using"),
        (r"fence\('wgmma'\)", "pass", "fence"),
        (r"fence\('proxy'\)", "pass", "fence"),
        (r"(fence\('proxy'\)\s+)sync\(1, 4\)", r"\1pass", OTHER_WARP),
    ],
)
def test_roles_that_hand_a_ring_on(pattern: str, replacement: str, told: str) -> None:
    found = case("transposed matmul of bfloat16 in many steps", "sm_90a")
    assert re.search(told, caught(found, changed(found, pattern, replacement)))


@pytest.mark.parametrize("name", ["softmax of long rows", "argmax", "sum of very many"])
def test_a_barrier_that_only_some_reach(name: str) -> None:
    found = case(name, "sm_90a")
    told = caught(found, changed(found, r"( +)sync\(\)", r"\1if lane < 16:\n\1    sync()"))
    assert "only some threads of a block reach a barrier" in told


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "target"),
    [
        ("softmax", r"x\[block,", "x[block + 1,", "sm_90a"),
        ("gelu", r"\bx\[", "x[1 + ", "sm_90a"),
        ("transposed", r"= x\[", "= x[1 + ", "sm_90a"),
        ("transposed", r"move\(add\[", "move(add[1 + ", "sm_90a"),
        ("layer norm", r"meet0\[warp", "meet0[warp + 1", "sm_90a"),
        ("matmul of bfloat16", r"(load_matrix\('[^']*', \w+\[[^\]]*\], \w+\[[^,]*, )", r"\g<1>64 + ", "sm_80"),
        ("matmul of bfloat16", r"(multiply_async\(.*, x_s0\[)", r"\g<1>12 + ", "sm_90a"),
        ("sum of the outer axes", r"(meet0\[)lane % 8", r"\1lane % 8 + 1", "sm_90a"),
        ("cumsum", r"x\[block,", "x[block + 1,", "sm_90a"),
    ],
)
def test_an_index_out_of_bounds(name: str, pattern: str, replacement: str, target: str) -> None:
    found = case(name, target)
    said = caught(found, changed(found, pattern, replacement))
    assert ("goes beyond the end of x_s0" if "multiply" in pattern else "is outside [0, ") in said


@pytest.mark.parametrize(
    ("name", "pattern"), [("softmax of long rows", r"meet0\[.*\] = .*"), ("matmul, both transposed", r"move\(x_s0\[.*")]
)
def test_shared_memory_that_nobody_wrote(name: str, pattern: str) -> None:
    found = case(name, "sm_75")
    assert "nobody wrote" in caught(found, changed(found, pattern, "pass"))


def test_an_index_from_data_that_is_out_of_range_is_the_users_error() -> None:
    found = case("embedding", "sm_90a")
    ids = next(name for name, x in found.inputs.items() if x.dtype == np.int64)
    wrong = {**found.inputs, ids: found.inputs[ids] + 50}
    with pytest.raises(UserError, match="out of range"):
        simulator.run(found.program, wrong)


SMALL = """@kernel
def forward(x: f32[64]):
    with launch('y', _grid=1, _warps=2, _resident=1, _reads=[x], y=f32[64]):
        s = shared(f32[128])
        {}
    return (y,)
"""
WRITE = "s[lane + warp * 32] = x[lane + warp * 32]"
READ = "y[lane + warp * 32] = s[63 - lane - warp * 32]"
COPY = "async_copy(s[lane + warp * 32], x[lane + warp * 32], 1)"


def small(lines: list[str]) -> np.ndarray:
    program = parse(SMALL.format("\n        ".join(lines)))
    return simulator.run(program, {"x": np.arange(64, dtype=np.float32)})[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "lines",
    [
        [WRITE, "sync()", READ],
        [COPY, "commit()", "wait_groups(0)", "sync()", READ],
        [
            "for i in serial(2):",
            f"    {COPY}",
            "    commit()",
            "    wait_groups(0)",
            "    sync()",
            f"    {READ}",
            "    sync()",
        ],
        [WRITE, "sync()", "if warp == 0:", "    s[lane + 64] = s[lane]", "sync()", READ],
    ],
)
def test_what_is_right_is_accepted(lines: list[str]) -> None:
    np.testing.assert_array_equal(small(lines), np.arange(64)[::-1])


@pytest.mark.parametrize(
    "lines",
    [
        [WRITE, READ],
        ["sync()", READ],
        [COPY, "commit()", "sync()", READ],
        [COPY, "commit()", "wait_groups(0)", READ],
        [COPY, "commit()", "wait_groups(1)", "sync()", READ],
        [COPY, "wait_groups(0)", "sync()", READ],
        [WRITE, "sync()", READ, "s[lane + warp * 32] = f32(1.0)"],
        [WRITE, "s[63 - lane - warp * 32] = f32(1.0)", "sync()", READ],
        [WRITE, "if warp == 0:", "    sync()", READ],
        ["s[lane + warp * 32 + 65] = f32(1.0)"],
        ["y[lane + warp * 32] = x[lane + warp * 32 - 1]"],
        ["y[lane + warp * 64] = x[lane + warp * 32]"],
        [WRITE, "sync()", "v0 = s[0]", "if warp >= 1:", "    s[0] = f32(7.0)"],
        ["s[0] = x[lane + warp * 32]", "sync()", "y[lane + warp * 32] = s[0]"],
        [WRITE, "sync()", "if warp == 0:", "    async_copy(s[lane + 32], x[lane], 1)", "commit()", READ, "sync()",
                  "wait_groups(0)"],
        ["s[lane + warp * 32] = f32(5.0)", COPY, "commit()", "y[lane + warp * 32] = s[lane + warp * 32]",
                  "wait_groups(0)"],
        ["a = registers(f32[1])", "y[lane + warp * 32] = a[0]"],
        ["a = registers(f32[8], f32(0.0))", "move(a[0], x[60], 8)"],
        ["a = registers(f32[4], f32(0.0))", "move(a[0], x[1], 4)"],
        ["if lane < 16:", "    async_copy(s[lane * 4], x[lane * 8], 4)", "commit()", "wait_groups(0)"],
        ["a = registers(f32[1], f32(0.0))", "v0 = x[lane]", "if lane < 16:", "    a[0] = shuffle(v0, 16)"],
        ["x[lane] = f32(0.0)"],
        ["y[lane] = x[lane + warp * 32]"],
    ],
)  # fmt: skip
def test_one_mistake_at_a_time(lines: list[str]) -> None:
    with pytest.raises((CompilerBug, UserError)):
        small(lines)


def cluster(lines: list[str]) -> np.ndarray:
    """Two blocks of one warp in a cluster, each of which reads what the other wrote to its shared memory."""
    body = "".join(f"        {line}\n" for line in lines)
    text = f"""@kernel
def forward(x: f32[64]):
    with launch('f', _grid=2, _warps=1, _resident=1, _reads=[x], _cluster=2, y=f32[64]):
        s = shared(f32[32])
        met = barriers(1, 1)
        if lane == 0:
            init_barriers(met)
        cluster_sync()
        s[lane] = x[lane + block * 32]
{body}        y[lane + block * 32] = remote(s[lane], 1 - block)
        cluster_sync()
    return (y,)
"""
    return simulator.run(parse(text), {"x": np.arange(64, dtype=np.float32)})[0]  # type: ignore[no-any-return]


def test_an_arrival_at_another_block_releases_no_plain_writes() -> None:
    arrival = ["if lane == 0:", "    arrive(met[0], 1 - block)", "wait_barrier(met[0], 0)"]
    with pytest.raises(CompilerBug, match="reads s as another warp wrote it, with no barrier between"):
        cluster(arrival)
    np.testing.assert_array_equal(cluster([*arrival, "cluster_sync()"]), np.roll(np.arange(64), 32))
