"""What is stored only to be read soon is made in windows: which kernels go together, what stays, what calls give."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import GPUS
from terrazzo.interp.loop import run
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.regions import WHOLE, WINDOW, regions
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import problem
from terrazzo.options import Options
from terrazzo.pipelines import PASSES, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory import in_windows as windows_of
from terrazzo.rules.loop.memory import windows
from terrazzo.rules.loop.memory.in_windows import in_windows
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.rules.loop_to_tile.choose import schedule
from terrazzo.rules.loop_to_tile.copies import copies_in_windows
from terrazzo.run.compiled import compile_program
from terrazzo.run.misfit import shared
from terrazzo.run.plan import Plan

PARTS = """
    with kernel('{x}_parts', {x}_1=f32[{n}, 512]):
        for a0 in free({n}):
            for a1 in free(512):
                in0 = {x}[a0, a1]
                v0 = neg(in0)
                {x}_1[a0, a1] = v0"""
PRODUCT = """
    with kernel('{y}', {y}=f32[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce(512):
                    in0 = {x}[{row}]
                    in1 = {w}[{column}]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                {y}[a0, a1] = acc0"""


def parts(x: str, n: int) -> str:
    return PARTS.format(x=x, n=n)


def product(x: str, w: str, y: str, m: int, n: int, row: str = "a0, r0", column: str = "a1, r0") -> str:
    return PRODUCT.format(x=x, w=w, y=y, m=m, n=n, row=row, column=column)


def program(*kernels: str, results: str, inputs: str = "x: f32[256, 512], w: f32[2048, 512]") -> Any:
    return parse(f"@loop\ndef f({inputs}):" + "".join(kernels) + f"\n    return ({results},)")


def windowed(p: Any, price: Any = lambda steps: 1.0) -> tuple[Any, list[Any]]:
    log = Log()
    found = in_windows(p, log, price, lambda maker: True, worth=1 << 20)
    assert not problem(found)
    return found, [e for e in log.events if e.fired]


def wholes(told: list[Any]) -> set[str]:
    """What is said to be in windows, of whatever that is a window itself."""
    return {e.subject.split("_w")[0] for e in told}


def same(p: Any, q: Any) -> None:
    """Both give the same; of small whole numbers whatever the order of sums."""
    rng = np.random.default_rng(0)
    given = {b.name: rng.integers(-4, 5, b.type.static_shape).astype(np.float32) for b in p.inputs}
    for one, other in zip(run(p, given, call=call_numpy), run(q, given, call=call_numpy), strict=True):
        np.testing.assert_array_equal(one, other)


def most(p: Any) -> int:
    return max(in_use(p.steps, p.results))


def test_a_weight_in_windows_of_columns() -> None:
    p = program(parts("w", 2048), product("x", "w_1", "y", 256, 2048), results="y")
    found, told = windowed(p)
    named = regions(found.steps, found.results)
    assert told and most(found) < 0.6 * most(p)
    assert named.calls == {s for s in found.steps if isinstance(s, l.Call)}
    assert {s.name for s in named.calls} == {WINDOW, WHOLE}
    (y,) = found.results
    starts = sorted(start for whole, start in named.of.values() if whole is y)
    assert starts[0] == 0 and starts[1] % 256 == 0, "columns of rows"
    assert parse(show(found)) == found
    same(p, found)


def test_who_reads_it_too_goes_along() -> None:
    """Two products read it by rows; where a third one sums over its rows, it stays whole."""
    inputs = "x: f32[4096, 512], w: f32[64, 512], v: f32[64, 4096]"
    both = parts("x", 4096), product("x_1", "w", "y", 4096, 64), product("x_1", "w", "z", 4096, 64)
    p = program(*both, results="y, z", inputs=inputs)
    found, told = windowed(p)
    assert wholes(told) == {"x_parts", "y", "z"} and most(found) < 0.7 * most(p)
    same(p, found)
    over = product("v", "x_1", "t", 64, 512, column="r0, a1").replace("reduce(512)", "reduce(4096)")
    p = program(*both, over, results="y, z, t", inputs=inputs)
    assert windowed(p)[0] == p


def test_who_reads_nothing_of_a_maker_is_not_asked_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an unrolled net each of many makers has few readers."""
    asked: list[str] = []
    read = windows.windows_read

    def windows_read(kernel: l.Kernel, *rest: Any) -> frozenset[Any]:
        asked.append(kernel.name)
        return read(kernel, *rest)

    monkeypatch.setattr(windows, "windows_read", windows_read)
    inputs = "x: f32[4096, 512], w: f32[64, 512]"
    both = parts("x", 4096), parts("w", 64), product("x_1", "w", "y", 4096, 64), product("x", "w_1", "z", 4096, 64)
    x_parts, w_parts, y, z = program(*both, results="y, z", inputs=inputs).steps
    readers = {y: y.axes[0]}
    reading = windows.Reading(readers, [x_parts, w_parts])
    first = reading.themselves(x_parts, 2)
    assert first and reading.extents == {4096} and asked == ["y"]
    readers[z] = z.axes[1]
    assert reading.themselves(x_parts, 2) == first and reading.extents == {4096, 64} and asked == ["y"]
    assert reading.themselves(w_parts, 2) and asked == ["y", "z"]


STATE = """
    with kernel('s{n}', s{n}=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                in0 = s{m}[a0, a1]
                in1 = m{m}[a0, a1]
                v0 = mul(in0, in1)
                in2 = m{n}[a0, a1]
                v1 = add(v0, in2)
                s{n}[a0, a1] = v1"""


def test_who_reads_what_others_of_a_group_store_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state of a recurrent net reads the one before: how far a group would go behind that makes no difference."""
    asked: list[Any] = []
    real = windows_of._makers

    def makers(uses: Any, readers: Any, refused: Any) -> Any:
        asked.append((frozenset(readers.items()), frozenset(refused)))
        return real(uses, readers, refused)

    monkeypatch.setattr(windows_of, "_makers", makers)
    steps = 12
    made = "".join(PARTS.format(x=f"x{n}", n=512).replace(f"x{n}_1", f"m{n}") for n in range(steps))
    states = "".join(STATE.format(m=n - 1, n=n) for n in range(1, steps))
    inputs = ", ".join(f"x{n}: f32[512, 512]" for n in range(steps))
    program = parse(f"@loop\ndef f({inputs}, s0: f32[512, 512]):{made}{states}\n    return (s{steps - 1},)")
    in_windows(program, Log(), lambda s: float(len(s)), worth=0)
    assert max(len(readers) for readers, _ in asked) == 1
    assert max(map(asked.count, asked)) <= 2  # with others that read what is made for it, and alone


def test_what_guards_of_other_axes_leave_out() -> None:
    """Where the row before the first one would be read but for a guard, it is of no window."""
    shifted = product("x_1", "w", "y", 4096, 2, row="a0 + a1 - 1, r0")
    shifted = shifted.replace("- 1, r0]", "- 1, r0] if a1 >= 1 else 0")
    p = program(parts("x", 4096), shifted, results="y", inputs="x: f32[4096, 512], w: f32[2, 512]")
    found, told = windowed(p)
    assert {e.subject for e in told} == {"x_parts", "y"} and most(found) < 0.8 * most(p)
    same(p, found)


HEADS = """
    with kernel('y', y=f32[16, 64]):
        for a0 in free(16):
            for a1 in free(64):
                for r0 in reduce(256):
                    in0 = x_1[r0 + (a0 // 4) * 256, (a0 % 4) * 128 + a1]
                    in1 = x_1[r0 + (a0 // 4) * 256, (a0 % 4) * 128 + a1 + 64]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0"""


OF_IMAGES = """
    with kernel('s', s=f32[16, 128, 128]):
        for a0 in free(4):
            for a1 in free(4):
                for a2 in free(128):
                    for a3 in free(128):
                        for r0 in reduce(16):
                            in0 = x[a0 * 128 + a2, r0 + a1 * 16]
                            in1 = w[a0 * 128 + a3, r0 + a1 * 16]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        s[a0 * 4 + a1, a2, a3] = acc0"""
OF_HEADS = """
    with kernel('{y}', {y}=f32[16, 128, 16]):
        for a0 in free(16):
            for a1 in free(128):
                for a2 in free(16):
                    for r0 in reduce(128):
                        in0 = {s}[a0, {at}]
                        in1 = x[r0 + (a0 // 4) * 128, (a0 % 4) * 16 + a2]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    {y}[a0, a1, a2] = acc0"""
BETWEEN = """
    with kernel('d', d=f32[16, 128, 128]):
        for a0 in free(4):
            for a1 in free(4):
                for a2 in free(128):
                    for a3 in free(128):
                        in0 = s[a0 * 4 + a1, a2, a3]
                        v0 = {of}
                        d[a0 * 4 + a1, a2, a3] = v0"""
TOTALS = """
    with kernel('t', t=f32[16, 128]):
        for a0 in free(4):
            for a1 in free(4):
                for a2 in free(128):
                    for r0 in reduce(128):
                        in0 = s[a0 * 4 + a1, a2, r0]
                        acc0 <- sum(in0)
                    t[a0 * 4 + a1, a2] = acc0"""
TOKENS = "x: f32[512, 64], w: f32[512, 64]"


def test_what_others_read_too_stays_whole() -> None:
    """Where these would go along only with what lies between: a summand of which a product is made, too."""
    add = """
    with kernel('z', z=f32[2048, 512]):
        for a0 in free(2048):
            for a1 in free(512):
                for r0 in reduce(512):
                    in0 = y_1[a0, r0]
                    in1 = v[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                in2 = x_1[a0, a1]
                in3 = y[a0, a1]
                v1 = add(acc0, in2)
                v2 = add(v1, in3)
                z[a0, a1] = v2"""
    layers = (parts("x", 2048), product("x_1", "w", "y", 2048, 512), parts("y", 2048), add)
    p = program(*layers, results="z", inputs="x: f32[2048, 512], w: f32[512, 512], v: f32[512, 512]")
    found, told = windowed(p)
    assert wholes(told) == {"y_parts", "z"}
    assert most(found) < 0.82 * most(p)
    same(p, found)


def test_windows_of_inputs_begin_where_vectors_do() -> None:
    """Nobody writes there; what kernels write begins at lines of memory."""
    rows, line = 100, 10004  # so few rows are divided in equal parts only
    assert rows // 2 * line * 4 % 256 and not rows // 2 * line * 4 % 16
    layers = [x.replace("512", str(line)) for x in (parts("x", rows), product("x_1", "w", "y", rows, 64))]
    p = program(*layers, results="y", inputs=f"x: f32[{rows}, {line}], w: f32[64, {line}]")
    found, told = windowed(p)
    assert wholes(told) == {"x_parts", "y"} and most(found) < most(p)
    same(p, found)


def test_an_input_that_is_stored_over_is_read_by_its_name() -> None:
    """Who stores over it comes after all who read it, and lies there, which nothing does that has regions."""
    over = """
    with kernel('new', new=over(x)):
        for a0 in free(512):
            in0 = row[a0]
            new[7, a0] = in0"""
    twice = parts("x", 2048).replace("512", "1024").replace("x[a0, a1]", "x[a0, a1 % 512]", 1)
    layers = (twice, product("x_1", "w", "y", 2048, 64).replace("512", "1024"), over)
    inputs = "x: f32[2048, 512], w: f32[64, 1024], row: f32[512]"
    p = program(*layers, results="y, new", inputs=inputs)
    assert any(s.over for s in p.steps)
    other = program(*layers[:2], results="y", inputs=inputs)
    has = [{whole.name for whole, _ in regions(windowed(x)[0].steps, x.results).of.values()} for x in (p, other)]
    assert "x" not in has[0] and "x" in has[1]


def test_heads_of_images_go_along_with_images() -> None:
    """Who reads scores along four images, and who does along all heads of these, sixteen."""
    values = OF_HEADS.format(y="y", s="s", at="r0, a1")
    p = program(OF_IMAGES, values, TOTALS, results="y, t", inputs=TOKENS)
    found, told = windowed(p)
    assert wholes(told) == {"s", "y", "t"} and most(found) < 0.5 * most(p)
    same(p, found)


def test_who_reads_what_readers_make_goes_along() -> None:
    """Gradients of scores are there in windows as the scores are, for two that multiply these and one that multiplies
    those: a window of one is made for a window of the other.
    """
    both = OF_HEADS.format(y="y", s="d", at="r0, a1"), OF_HEADS.format(y="z", s="d", at="a1, r0")
    early = OF_HEADS.format(y="v", s="s", at="r0, a1")
    p = program(OF_IMAGES, early, BETWEEN.format(of="mul(in0, in0)"), *both, results="y, z, v", inputs=TOKENS)
    found, told = windowed(p)
    assert wholes(told) == {"s", "d", "y", "z", "v"} and most(found) < 0.6 * most(p)
    same(p, found)


def test_heads_that_lie_side_by_side_in_rows() -> None:
    """Each window makes the rows that it reads, once for all that reads them."""
    p = program(parts("x", 1024), HEADS, results="y", inputs="x: f32[1024, 512]")
    found, told = windowed(p)
    assert wholes(told) == {"x_parts", "y"}
    made = [b.type.span for s in found.steps if s.name.startswith("x_parts") for b in s.writes]
    assert sum(made) == 4 * 1024 * 512
    same(p, found)


GUARDED = """
    with kernel('y', y=f32[2, 2048, 64]):
        for a0 in free(2):
            for a1 in free(2048):
                for a2 in free(64):
                    for r0 in reduce(512):
                        in0 = x_1[a0 * 2048 + a1, r0] if a0 < 1 else 0
                        in1 = w[a2, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    y[a0, a1, a2] = acc0"""


def test_a_window_does_not_leave_memory() -> None:
    """What is read under a guard may lie beyond the end where that is not met."""
    p = program(parts("x", 2048), GUARDED, results="y", inputs="x: f32[2048, 512], w: f32[64, 512]")
    found, told = windowed(p)
    assert told
    same(p, found)


def test_time_counts() -> None:
    p = program(parts("w", 2048), product("x", "w_1", "y", 256, 2048), results="y")
    found, told = windowed(p, lambda steps: float(len(steps)))
    assert found == p and not told


def test_what_pytorch_reads_stays() -> None:
    sort = "\n    z, k = call('aten.sort.default', w_1, _types=(f32[2048, 512], i64[2048, 512]))"
    p = program(parts("w", 2048), product("x", "w_1", "y", 256, 2048), sort, results="y, z")
    assert windowed(p)[0] == p


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_calls_of_such_programs(tmp_path: Path) -> None:
    """Nothing is called or copied: windows are of inputs, pieces of temporaries."""
    last = product("y", "v", "z", 256, 64, row="a0, r0 * 4")
    p = program(
        parts("w", 2048),
        product("x", "w_1", "y", 256, 2048),
        last,
        results="z",
        inputs="x: f32[256, 512], w: f32[2048, 512], v: f32[64, 512]",
    )
    found, _ = windowed(p)
    options = Options(target="cpu", cache_dir=tmp_path, fuse=False)
    torch.manual_seed(0)
    given = [torch.randint(-4, 5, b.type.static_shape).float() for b in p.inputs]
    plain, ours = (compile_program(x, {}, options) for x in (p, found))
    for one, other in zip(plain(given), ours(given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    made = ours.plan
    assert all(s.key for s in made.steps) and any(s.of is not None for s in made.slots) and not shared(made)
    assert made.arena < plain.plan.arena
    assert Plan.from_json(made.to_json()) == made
    again = compile_program(found, {}, options)
    assert again.program is None, "it came from the cache"
    torch.testing.assert_close(again(given)[0], plain(given)[0], rtol=0, atol=0)


SCORES = """
    with kernel('s', s=f32[{shape}, 512]):
        for a0 in free(2):
            for a1 in free(4):
                for a2 in free(512):
                    for a3 in free(512):
                        for r0 in reduce(16):
                            in0 = q[a0, a1, a2, r0]
                            in1 = k[a0, a1, a3, r0]
                            v0 = mul(in0, in1)
                            acc0 <- sum(v0)
                        s[{index}, a2, a3] = acc0"""
OVER = """
    with kernel('o', o=f32[8, 512, 16]):
        for a0 in free(8):
            for a1 in free(512):
                for a2 in free(16):
                    for r0 in reduce(512):
                        in0 = s[{index}, a1, r0]
                        in1 = v[a0, r0, a2]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    o[a0, a1, a2] = acc0"""


@pytest.mark.parametrize(("shape", "index", "read"), [("8, 512", "a0 * 4 + a1", "a0"), ("2, 4, 512", "a0, a1", "")])
def test_a_product_in_windows_of_its_batch(shape: str, index: str, read: str) -> None:
    """Scores take more than all that they are made of, and all that is made of them: so nobody must want them. A batch
    may be one axis for one product and two for the other.
    """
    inputs = "q: f32[2, 4, 512, 16], k: f32[2, 4, 512, 16], v: f32[8, 512, 16]"
    read = read or "a0 // 4, a0 % 4"
    p = program(SCORES.format(shape=shape, index=index), OVER.format(index=read), results="o", inputs=inputs)
    log = Log()
    found = in_windows(p, log, lambda steps: 1.0, lambda maker: False, worth=1 << 20)
    assert wholes([e for e in log.events if e.fired]) == {"s", "o"} and most(found) < 0.3 * most(p)
    same(p, found)
    rows = program(product("x", "w", "h", 4096, 2048), product("h", "v", "y", 4096, 64), results="y",
                   inputs="x: f32[4096, 512], w: f32[2048, 512], v: f32[64, 512]")  # fmt: skip
    assert in_windows(rows, Log(), lambda steps: 1.0, lambda maker: False, worth=1 << 20) is rows, "this has no batch"


SCALED = """
    with kernel('w_parts', w_least=f32[2048], w_1=f32[2048, 512]):
        for a0 in free(2048):
            for r0 in reduce(512):
                in0 = w[a0, r0]
                acc0 <- max(in0)
            w_least[a0] = acc0
            for a1 in free(512):
                in1 = w[a0, a1]
                v0 = sub(in1, acc0)
                w_1[a0, a1] = v0"""


def test_numbers_of_rows_go_along_with_these() -> None:
    added = "in2 = w_least[a1]\n                v1 = add(acc0, in2)\n                y[a0, a1] = v1"
    more = product("x", "w_1", "y", 256, 2048).replace("y[a0, a1] = acc0", added)
    p = program(SCALED, more, results="y")
    found, told = windowed(p)
    assert {e.subject for e in told} == {"w_parts", "y"} and most(found) < 0.6 * most(p)
    same(p, found)


def test_a_second_layer_has_no_more_windows_than_help() -> None:
    """It goes down to what is in use in the first one all the same."""
    layers = (parts(x, 2048) + product("x", f"{x}_1", y, 16, 2048) for x, y in (("w", "y"), ("v", "z")))
    p = program(*layers, results="y, z", inputs="x: f32[16, 512], w: f32[2048, 512], v: f32[2048, 512]")
    found, told = windowed(p)
    assert {e.subject for e in told} == {"w_parts", "y", "v_parts", "z"}
    y, z = (sum(s.name.startswith(f"{x}_w") for s in found.steps) for x in ("y", "z"))  # type: ignore[union-attr]
    assert 1 < y < z and most(found) < 0.1 * most(p)
    same(p, found)


@pytest.mark.parametrize(
    "layer, image, way",
    [
        (torch.nn.Conv2d(3, 64, 7, padding=3), (3, 32, 32), "from patch to patch"),
        (torch.nn.Conv1d(1, 64, 127, stride=21, padding=40), (1, 20000), "points of its own"),  # along one axis
    ],
    ids=["images", "signals"],
)
def test_patches_that_schedules_store_are_there_in_windows(layer: Any, image: tuple[int, ...], way: str) -> None:
    """Of whole images, since others are no pieces of what is stored; others stay as they were."""
    net = torch.nn.Sequential(layer, torch.nn.ReLU()).bfloat16().to("meta")
    x = torch.empty(8, *image, dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        captured = capture(net, (x,)).program
    names = tuple(p.name for p in PASSES if p.dst != "kernel" and p.name not in ("schedule", "plan"))
    options = Options(target="sm_90a", libraries="never")
    p = stages(captured, options, Log(), names)[-1][1]
    gpu = GPUS["sm_90a"]

    def again(p: l.Program, log: Log) -> Any:
        return schedule(p, gpu, log)

    done, log = schedule(p, gpu, Log()), Log()
    assert copies_in_windows(p, done, Log(), lambda steps: 1.0, again) is done, "little is in use"
    found = copies_in_windows(p, done, log, lambda steps: 1.0, again, worth=1 << 20)
    assert wholes([e for e in log.events if e.fired and e.rule == "in_windows"]) == {"relu", "relu_input"}
    assert most(found.loop) < 0.6 * most(done.loop) and not problem(found)
    pieces = [e.reason for e in log.events if e.rule == "points" and e.subject.startswith("relu_input_w")]
    assert pieces and all(way in why for why in pieces), "each is stored as the whole would be"
    assert stages(found, options, Log(), ("plan", "derive"))[-1][0].name == "derive"
    rng = np.random.default_rng(0)
    given = {b.name: rng.integers(-4, 5, b.type.static_shape).astype(np.float32) for b in p.inputs}
    for one, other in zip(run(p, given, call=call_numpy), run(found.loop, given, call=call_numpy), strict=True):
        np.testing.assert_array_equal(one, other)
    scheduled = {n for n, _ in found.schedules}
    assert scheduled == {n for n, s in enumerate(found.loop.steps) if isinstance(s, l.Kernel)}


def test_what_is_there_in_windows_is_not_read_whole() -> None:
    """The window of the second image seems to read both of `m`, whose index is not known to be that of one where its
    guard holds. All of `m` would be made of all of `h`, which is there in windows only.
    """
    p = parse("""
@loop
def f(x: f32[2, 63, 4096]):
    with kernel('h', h=f32[2, 63, 4096]):
        for a0 in free(2):
            for a1 in free(63):
                for a2 in free(4096):
                    in0 = x[a0, a1, a2]
                    v0 = neg(in0)
                    h[a0, a1, a2] = v0
    with kernel('m', m=f32[2, 63]):
        for a0 in free(2):
            for a1 in free(63):
                for r0 in reduce(4096):
                    in0 = h[a0, a1, r0]
                    acc0 <- max(in0)
                m[a0, a1] = acc0
    with kernel('y', y=f32[2, 64]):
        for a0 in free(2):
            for a1 in free(64):
                in0 = m[((a1 - 1) // 63) + a0, (a1 - 1) % 63] if a1 >= 1 else 0
                y[a0, a1] = in0
    return (y,)
""")
    found, _ = windowed(p)
    same(p, found)


def test_what_all_windows_read_is_made_again_before_each() -> None:
    """Parts of the filters of three branches: each is multiplied by one window of the images after the other."""
    shapes = (4, 2048, 64, 64), *[(256, 2048, 3, 3)] * 3
    branches = lambda x, *ws: [F.conv2d(x, w, padding=6 * n, dilation=6 * n) for n, w in enumerate(ws, 1)]  # noqa: E731
    program = capture(branches, tuple(torch.empty(s, device="meta") for s in shapes)).program
    names, log = [p.name for p in PASSES], Log()
    options = Options(target="sm_90a", fp32="split", libraries="never")
    done = stages(program, options, log, tuple(names[: names.index("remake") + 1]))[-1][1]
    events = [e for e in log.events if e.fired and e.rule in ("in_windows", "make_again")]
    windows = next(n for n, e in enumerate(events) if e.rule == "in_windows")
    again = [e.subject for e in events[windows:] if e.rule == "make_again"]
    assert again and all(name.endswith("_parts") for name in again)
    assert {f"{name}_again" for name in again} <= {s.name for s in done.steps}


def test_a_place_alone_is_no_axis() -> None:
    """Of an axis that a window has a single place of there is nothing left, so a window within that is proved right:
    what is stored at a0 * 16 + a1 lies at a1.
    """
    inputs = "q: f32[2, 16, 512, 16], k: f32[2, 16, 512, 16], v: f32[32, 512, 16]"
    scores = SCORES.format(shape="32, 512", index="a0 * 16 + a1").replace("free(4)", "free(16)")
    over = OVER.format(index="a0").replace("free(8)", "free(32)").replace("[8, ", "[32, ")
    p = program(scores, over, results="o", inputs=inputs)
    found = in_windows(p, Log(), lambda steps: 1.0, lambda maker: False, worth=1 << 20)
    assert not problem(found) and most(found) < 0.3 * most(p)
    assert all(a.extent > 1 for s in found.steps if isinstance(s, l.Kernel) for a in s.axes)
    same(p, found)
