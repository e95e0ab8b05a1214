"""Compiling takes time with what is new in a program: work is counted, since seconds depend on the machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from terrazzo.interp.loop import run as run_loop
from terrazzo.ir import node, operators, sites, verify
from terrazzo.ir.canonical import Form, canonical, twin
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.expr import Var
from terrazzo.ir.monoid import monoid
from terrazzo.ir.nest import accumulators
from terrazzo.ir.program import Input
from terrazzo.ir.text import parse
from terrazzo.ir.types import DTYPES, Type
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.attention import online, rounds
from terrazzo.rules.loop.fusion import again, columns_reduced, order
from terrazzo.rules.loop.fusion import fuse as fusion
from terrazzo.rules.loop.fusion import inline as inlining
from terrazzo.rules.loop.fusion.inline import rewrite_loads
from terrazzo.rules.loop.layout import dimensions, lookups, phases, pixels, taps_after, whole_steps
from terrazzo.rules.loop.precision import parts
from terrazzo.rules.loop_to_tile import choose
from terrazzo.rules.loop_to_tile.experience import Experience
from terrazzo.rules.loop_to_tile.products import product_candidates, tiles
from terrazzo.rules.tile_to_kernel import lower as derive
from terrazzo.rules.torch_to_tensor.lower import _Grown


def layers(count: int) -> str:
    """Layers of one shape: a product, a nonlinearity, a mean of each row, and what was there before."""
    weights = ", ".join(f"w{n}: f32[48, 48]" for n in range(count))
    lines = [f"@torch\ndef f(x: f32[32, 48], {weights}):"]
    last = "x"
    for n in range(count):
        lines += [
            f"    mm_{n}: f32[32, 48] = aten.mm.default({last}, w{n})",
            f"    tanh_{n}: f32[32, 48] = aten.tanh.default(mm_{n})",
            f"    mean_{n}: f32[32, 1] = aten.mean.dim(tanh_{n}, [1], True)",
            f"    sub_{n}: f32[32, 48] = aten.sub.Tensor(tanh_{n}, mean_{n})",
            f"    add_{n}: f32[32, 48] = aten.add.Tensor(sub_{n}, {last})",
        ]
        last = f"add_{n}"
    return "\n".join([*lines, f"    return ({last},)\n"])


def unrolled(count: int) -> str:
    """A recurrent net, unrolled: every step reads the same weights."""
    lines = ["@torch\ndef f(h: f32[8, 32], w: f32[32, 32], u: f32[32, 32]):"]
    last = "h"
    for n in range(count):
        lines += [
            f"    mm_{n}: f32[8, 32] = aten.mm.default({last}, w)",
            f"    sigmoid_{n}: f32[8, 32] = aten.sigmoid.default(mm_{n})",
            f"    mul_{n}: f32[8, 32] = aten.mul.Tensor(sigmoid_{n}, {last})",
            f"    mm_u_{n}: f32[8, 32] = aten.mm.default(mul_{n}, u)",
            f"    tanh_{n}: f32[8, 32] = aten.tanh.default(mm_u_{n})",
        ]
        last = f"tanh_{n}"
    return "\n".join([*lines, f"    return ({last},)\n"])


def sequence(count: int) -> str:
    """A recurrent net, unrolled, of which every step reads its own part of what is given."""
    lines = ["@torch\ndef f(h: f32[8, 32], x: f32[64, 8, 32], w: f32[32, 32]):"]
    last = "h"
    for n in range(count):
        lines += [
            f"    x_{n}: f32[8, 32] = aten.select.int(x, 0, {n})",
            f"    mm_{n}: f32[8, 32] = aten.mm.default({last}, w)",
            f"    add_{n}: f32[8, 32] = aten.add.Tensor(mm_{n}, x_{n})",
            f"    sigmoid_{n}: f32[8, 32] = aten.sigmoid.default(add_{n})",
            f"    mul_{n}: f32[8, 32] = aten.mul.Tensor(sigmoid_{n}, x_{n})",
            f"    tanh_{n}: f32[8, 32] = aten.tanh.default(mul_{n})",
        ]
        last = f"tanh_{n}"
    return "\n".join([*lines, f"    return ({last},)\n"])


def cells(count: int) -> str:
    """A recurrent net whose state two read: what is put out, and the next state."""
    lines = ["@torch\ndef f(h: f32[8, 32], c: f32[8, 32], w: f32[32, 32]):"]
    h, c = "h", "c"
    for n in range(count):
        lines += [
            f"    mm_{n}: f32[8, 32] = aten.mm.default({h}, w)",
            f"    sigmoid_{n}: f32[8, 32] = aten.sigmoid.default(mm_{n})",
            f"    mul_{n}: f32[8, 32] = aten.mul.Tensor(sigmoid_{n}, {c})",
            f"    c_{n}: f32[8, 32] = aten.add.Tensor(mul_{n}, mm_{n})",
            f"    tanh_{n}: f32[8, 32] = aten.tanh.default(c_{n})",
            f"    h_{n}: f32[8, 32] = aten.mul.Tensor(tanh_{n}, sigmoid_{n})",
        ]
        h, c = f"h_{n}", f"c_{n}"
    return "\n".join([*lines, f"    return ({h},)\n"])


def attention(count: int) -> str:
    """A softmax between two products, again and again."""
    lines = ["@torch\ndef f(x: bf16[128, 64], k: bf16[64, 128], v: bf16[128, 64]):"]
    last = "x"
    for n in range(count):
        lines += [
            f"    mm_{n}: bf16[128, 128] = aten.mm.default({last}, k)",
            f"    softmax_{n}: bf16[128, 128] = aten._softmax.default(mm_{n}, -1, False)",
            f"    out_{n}: bf16[128, 64] = aten.mm.default(softmax_{n}, v)",
        ]
        last = f"out_{n}"
    return "\n".join([*lines, f"    return ({last},)\n"])


def dense(count: int) -> str:
    """Layers each of which reads what all before it stored, one beside the other."""
    weights = ", ".join(f"w{n}: f32[{16 + 8 * n}, 8]" for n in range(count))
    lines = [f"@torch\ndef f(x: f32[32, 16], {weights}):"]
    found = ["x"]
    for n in range(count):
        lines += [
            f"    cat_{n}: f32[32, {16 + 8 * n}] = aten.cat.default([{', '.join(found)}], 1)",
            f"    mm_{n}: f32[32, 8] = aten.mm.default(cat_{n}, w{n})",
        ]
        found.append(f"mm_{n}")
    return "\n".join([*lines, f"    return (mm_{count - 1},)\n"])


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was done: nodes walked, pairs of kernels, searches for what stands between, kernels scheduled, written."""
    done: Counter[str] = Counter()

    def counted(module: Any, name: str, what: str, size: Any = lambda out: 1) -> None:
        inner = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = inner(*args, **kwargs)
            done[what] += size(out)
            return out

        monkeypatch.setattr(module, name, call)

    for module in (fusion, node):
        counted(module, "topological", "nodes", len)
    counted(order.Order, "apart", "searches")
    counted(fusion, "alike", "pairs")
    counted(fusion, "with_lookups_stored", "priced")
    counted(fusion, "scale_after", "inlined")
    counted(choose, "_choose", "scheduled")
    counted(online, "softmax_into_product", "softmaxes")
    counted(derive, "write", "written")
    counted(verify, "store_problem", "verified")
    counted(tile, "fit", "fitted")
    return done


@pytest.mark.parametrize("program", [layers, unrolled, cells])
@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_work_grows_no_faster_than_programs(
    program: Any, target: str, work: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "NEAR", 6)  # so that few steps are many
    monkeypatch.setattr("terrazzo.ir.canonical.MANY", 6)
    counts = []
    for n in (12, 48):
        derive._written.cache_clear()
        product_candidates.best.cache_clear()
        verify._misfit.cache_clear()
        work.clear()
        lowering(parse(program(n)), Options(target=target))
        counts.append(dict(work))
    few, many = counts
    for what in ("nodes", "searches", "pairs"):
        assert many[what] <= 4.8 * few[what], (what, few, many)
    assert few.get("scheduled") == many.get("scheduled")  # what is new is the same
    assert few.get("written") == many.get("written")
    for what in ("verified", "fitted"):  # and what is known of it stays known
        assert many.get(what, 0) <= few.get(what, 0), (what, few, many)
    for what in ("priced", "inlined"):  # equal layers are fused once
        assert 0 < many[what] <= few[what], (what, few, many)


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_steps_that_read_their_parts_of_a_sequence_are_fused_once(target: str, work: Counter[str]) -> None:
    counts = []
    for n in (12, 48):
        work.clear()
        lowering(parse(sequence(n)), Options(target=target))
        counts.append((work["priced"], work["inlined"]))
    (few, many), (fewer, more) = zip(*counts, strict=True)
    assert 0 < many <= few and 0 < more <= fewer


def test_equal_layers_are_one_kernel_under_many_names() -> None:
    done = lowering(parse(layers(12)), Options(target="sm_90a"))
    kernels = done.at("kernel").steps
    assert len({s.name for s in kernels}) == len(kernels) >= 12
    assert len({twin(s) for s in kernels}) <= 6


def test_a_state_that_several_read_is_stored_once_and_not_computed_again() -> None:
    done = lowering(parse(cells(12)), Options(target="sm_90a"))
    kernels = [s for s in done.loop.steps if isinstance(s, l.Kernel)]
    assert max(len(s.terms) for s in kernels) < 40
    assert {x.name for s in kernels for x in s.writes} >= {f"c_{n}" for n in range(11)}
    assert len({twin(s) for s in done.at("kernel").steps}) <= 8
    assert any("stored by a reader" in e.reason for e in done.log.events)


def test_what_pytorch_gives_for_a_call_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    inner = operators._shapes
    monkeypatch.setattr(operators, "_shapes", lambda *args: asked.append(args) or inner(*args))
    x = Type(DTYPES["i64"], (4, 4))
    operators._tried.clear()
    for number in (1, 1.0, True, 1):  # which are three: PyTorch gives them other types
        found = operators.tried("aten.add.Tensor", (Input("x", x), number), (), lambda node: node.type)
        assert found.dtype.name == ("f32" if type(number) is float else "i64")
    assert len(asked) == 3
    assert operators.tried("aten.add.Tensor", (Input("x", x), 1), (), lambda node: None) is None


def test_tiles_of_a_product_are_enumerated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    inner = tiles.products.plans
    monkeypatch.setattr(tiles.products, "plans", lambda *args: seen.append(args) or inner(*args))
    tiles._plans.cache_clear()
    product_candidates.best.cache_clear()
    lowering(parse(layers(1).replace("48", "192").replace("32, ", "320, ")), Options(target="sm_90a"))
    assert seen
    assert len(seen) == len(set(seen))


def test_what_reduces_nothing_has_no_nest_to_find_that_out() -> None:
    program = parse("@torch\ndef f(x: f32[977]):\n    y: f32[977] = aten.sin.default(x)\n    return (y,)\n")
    (kernel,) = lowering(program, Options(target="cpu")).loop.steps
    fresh = l.Kernel("another", kernel.axes, kernel.stores)
    assert accumulators(fresh) == {}
    assert not any("nest" in name for name in vars(fresh))


def test_what_lies_between_two_products_is_judged_once_for_all_that_are_alike(work: Counter[str]) -> None:
    for n in (4, 8):
        work.clear()
        done = lowering(parse(attention(n)), Options(target="sm_90a", libraries="never"))
        assert work["softmaxes"] <= 2  # the first and the last may differ
        made = [e for e in done.log.events if e.rule == "softmax_into_product" and e.fired]
        assert [e.subject for e in made] == [f"out_{k}" for k in range(n)]


def test_concatenations_that_begin_as_earlier_ones_do_join_what_is_new() -> None:
    counts = []
    for n in (6, 24):
        tensor = lowering(parse(dense(n)), Options(target="sm_90a", libraries="never")).at("tensor")
        counts.append(len(node.topological(tensor.results)))
    assert counts[1] <= 4.8 * counts[0]


@pytest.mark.parametrize("n", [3, 7])
def test_joined_pieces_are_those_that_were_given(n: int) -> None:
    program = parse(dense(n))
    rng = np.random.default_rng(0)
    given = {i.name: rng.standard_normal(i.type.shape) for i in program.inputs}
    (result,) = run_loop(lowering(program, Options(target="cpu")).loop, given, precise=True)
    found = [given["x"]]
    for k in range(n):
        found.append(np.concatenate(found, 1) @ given[f"w{k}"])
    np.testing.assert_allclose(result, found[-1], rtol=1e-9)


def test_what_is_joined_is_shared_where_type_and_dimension_are_the_same() -> None:
    program = parse(
        "@torch\ndef f(x: f32[4, 4], y: f32[4, 4], z: f64[4, 4]):\n"
        "    a: f32[8, 4] = aten.cat.default([x, y])\n"
        "    b: f32[4, 12] = aten.cat.default([x, y, x], 1)\n"
        "    c: f64[12, 4] = aten.cat.default([x, y, z])\n"
        "    d: f32[12, 4] = aten.cat.default([x, y, x], -2)\n"
        "    return (a, b, c, d)\n"
    )
    grown = _Grown()
    a, b, c, d = (grown.of(x) for x in program.results)
    assert (a, b, c) == program.results[:3]
    assert d.args[0] == (a, program.inputs[0])


def test_a_program_is_the_same_whether_its_kernels_share_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = lowering(parse(layers(3)), Options(target="sm_90a"))
    monkeypatch.setattr(Form, "clashes", lambda *_: True)
    alone = lowering(parse(layers(3)), Options(target="sm_90a"))
    assert shared.at("kernel") == alone.at("kernel")
    assert shared.at("tile") == alone.at("tile")
    assert shared.log.events == alone.log.events


def test_products_that_may_be_computed_again_are_judged_once_for_all_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[Any] = []
    inner = again._judged
    monkeypatch.setattr(again, "_judged", lambda *args, **rest: judged.append(args) or inner(*args, **rest))
    steps = [f"    up_{n}: bf16[128, 64] = aten.mm.default({f'down_{n - 1}' if n else 'x'}, w)\n"
             f"    tanh_{n}: bf16[128, 64] = aten.tanh.default(up_{n})\n"
             f"    down_{n}: bf16[128, 64] = aten.mm.default(tanh_{n}, v)\n" for n in range(6)]  # fmt: skip
    text = f"@torch\ndef f(x: bf16[128, 64], w: bf16[64, 64], v: bf16[64, 64]):\n{''.join(steps)}    return (down_5,)\n"
    done = lowering(parse(text), Options(target="sm_90a", libraries="never"))
    told = {e.subject: e.reason for e in done.log.events if e.rule == again.RULE}
    assert len(told) == 11 and len(judged) == 2  # of two kinds: what tanh is taken of, and what is multiplied as it is
    assert not any("tz" in reason for reason in told.values())


def test_chains_that_are_slower_at_best_are_not_built() -> None:
    text = (
        "@torch\ndef f(x: f32[256, 256], w: f32[256, 256], v: f32[256, 256]):\n"
        "    y: f32[256, 256] = aten.mm.default(x, w)\n    z: f32[256, 256] = aten.mm.default(y, v)\n"
        "    return (z,)\n"
    )
    names = LOWER[: LOWER.index("online")]
    first, second = stages(parse(text), Options(target="sm_90a", libraries="never"), Log(), names)[-1][1].steps
    asked: list[Any] = []

    def price(steps: Any) -> float:
        asked.extend(steps)
        return 1000.0

    why, _ = again._judged([first], [second], price, lambda new: 2000.0, lambda kernel: asked.append(kernel) or "")
    assert why == "2.0 us as chains, 1.0 us stored, by the model" and asked == [first, second]
    again._judged([first], [second], price, lambda new: 500.0, lambda kernel: asked.append(kernel) or "")
    assert len(asked[2:]) == 4  # what is stored, the chain, and whether it is refused


@pytest.mark.parametrize(("rows", "depth", "why"), [(16, 256, "wait for memory"), (64, 64, "CUDA cores are as exact")])
def test_parts_of_products_too_small_for_them_are_not_written_down(
    rows: int, depth: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "parts", None)
    text = (
        f"@torch\ndef f(x: f32[{rows}, {depth}], w: f32[{depth}, 128]):\n"
        f"    y: f32[{rows}, 128] = aten.mm.default(x, w)\n    return (y,)\n"
    )
    log = Log()
    stages(parse(text), Options(target="sm_90a", libraries="never"), log, LOWER[: LOWER.index("schedule")])
    assert [e.reason for e in log.events if e.rule == parts.RULE and why in e.reason]


def test_a_kernel_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever chooses its schedule asks for it, then the pass that derives it, then the plan it has."""
    written: list[Any] = []
    derive._written.cache_clear()
    inner = derive.write
    monkeypatch.setattr(derive, "write", lambda draft, plan: written.append((draft.kernel, plan)) or inner(draft, plan))
    lowering(parse(layers(2)), Options(target="sm_90a", libraries="never"))
    assert written and len(written) == len(set(written))


def test_sums_over_several_axes_are_not_put_into_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_whole", None)  # nobody asks for it
    image = "bf16[2, 64, 16, 16]"
    call = "aten.convolution.default({}, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)"
    text = (
        f"@torch\ndef f(x: {image}, w: bf16[64, 64, 3, 3]):\n    y: {image} = {call.format('x')}\n"
        f"    z: {image} = {call.format('y')}\n    return (z,)\n"
    )
    done = lowering(parse(text), Options(target="sm_90a", libraries="never"))
    assert any(e.rule == again.RULE and "over several axes" in e.reason for e in done.log.events)


def test_no_more_than_a_few_products_are_put_into_each_other() -> None:
    """Each made of the one before twice: n of them put into each other are 2^n, and were not through in minutes."""
    lines, before, last = [], "x", "y"
    for n in range(24):
        lines += [f"    mm_{n}: bf16[32, 32] = aten.mm.default({before}, {last})",
                  f"    add_{n}: bf16[32, 32] = aten.add.Tensor(mm_{n}, {before})"]  # fmt: skip
        before, last = last, f"add_{n}"
    text = "\n".join(["@torch\ndef f(x: bf16[32, 32], y: bf16[32, 32]):", *lines, f"    return ({last},)\n"])
    done = lowering(parse(text), Options(target="sm_90a", libraries="never"))
    assert any(e.rule == again.RULE and f"more than {again.MOST} make" in e.reason for e in done.log.events)
    assert max(len(s.terms) for s in done.loop.steps if isinstance(s, l.Kernel)) < 400


def test_sums_in_sums_are_not_taken_apart_as_if_they_were_over_keys(work: Counter[str]) -> None:
    """Small convolutions are put into each other, and are no softmax: to find that out takes no longer with each."""
    walked = []
    for count in (8, 24):
        lines, last = [], "x"
        for n in range(count):
            call = f"aten.convolution.default({last}, w, None, [1], [1], [1], False, [0], 1)"
            lines += [f"    y_{n}: bf16[2, 1, 64] = {call}", f"    z_{n}: bf16[2, 1, 64] = aten.relu.default(y_{n})"]
            last = f"z_{n}"
        text = "\n".join(["@torch\ndef f(x: bf16[2, 1, 64], w: bf16[1, 1, 3]):", *lines, f"    return ({last},)\n"])
        work.clear()
        lowering(parse(text), Options(target="sm_90a", libraries="never"))
        walked.append(work["nodes"])
    assert walked[1] <= 4.8 * walked[0]


def test_what_every_layer_adds_to_is_stored_before_it_is_a_long_sum() -> None:
    """Small layers with norms in front: what is added up was the sum of all layers before, again in each of them."""
    weights = ", ".join(f"w{n}: bf16[32, 32]" for n in range(24))
    lines, last = [f"@torch\ndef f(x: bf16[16, 32], {weights}):"], "x"
    for n in range(24):
        lines += [
            f"    norm_{n}: (bf16[16, 32], bf16[16, 1], bf16[16, 1]) = "
            f"aten.native_layer_norm.default({last}, [32], None, None, 1e-05)",
            f"    normed_{n}: bf16[16, 32] = get(norm_{n}, 0)",
            f"    product_{n}: bf16[16, 32] = aten.mm.default(normed_{n}, w{n})",
            f"    mm_{n}: bf16[16, 32] = aten.gelu.default(product_{n})",
            f"    add_{n}: bf16[16, 32] = aten.add.Tensor({last}, mm_{n})",
        ]
        last = f"add_{n}"
    done = lowering(parse("\n".join([*lines, f"    return ({last},)\n"])), Options(target="sm_90a"))
    kernels = [s for s in done.loop.steps if isinstance(s, l.Kernel)]
    assert max(len(s.terms) for s in kernels) <= 3 * fusion.AGAIN
    assert any("would compute" in e.reason and "again" in e.reason for e in done.log.events)


def test_the_first_chain_without_room_ends_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that a loop made, trained: a dozen products read each, and what all would be was written down for it."""
    whole: list[Any] = []
    monkeypatch.setattr(again, "_whole", lambda reader, makers: whole.append(reader) or reader)
    why, _ = again._judged([], ["first", "second"], None, lambda new: float("inf"), None)  # type: ignore
    assert "no room" in why and whole == ["first"]


def test_what_stores_have_in_common_is_rewritten_once() -> None:
    """Each of many gradients is made of the sum of all branches."""
    x, y = (l.Buffer(name, Type(DTYPES["f32"], (8,))) for name in "xy")
    axis = Var("a0", 8)
    term: Any = l.Load(x, (axis,))
    for n in range(20):
        term = l.apply("add", l.apply("sin", term), l.Load(y, ((axis + n) % 8,)))
    stores = tuple(l.Store(l.Buffer(f"z{n}", x.type), (axis,), l.apply("mul", term, term)) for n in range(16))
    seen: list[Any] = []
    assert node.transformed(stores, lambda z: seen.append(z) or z) == stores
    assert len(seen) == len({*seen})
    there = node.substituted(stores, {axis: Var("a1", 8)})
    assert there == tuple(node.substitute(s, {axis: Var("a1", 8)}) for s in stores) != stores


def test_sums_of_indices_that_nobody_keeps_are_not_made_again() -> None:
    i, j = Var("i", 64), Var("j", 64)
    offset = i * 64 + j  # which keeps no i * 64
    made = id(i * 64)
    assert offset is not None and id(i * 64) == made and (i * 64 + j) is offset


def test_a_form_is_its_own_form() -> None:
    (kernel, *_) = lowering(parse(layers(1)), Options(target="cpu")).loop.steps
    assert canonical(canonical(kernel).kernel).kernel is canonical(kernel).kernel


def test_what_stands_in_several_reductions_is_rewritten_once() -> None:
    """Of twenty sums of sums, each read twice, every load once: the march along a ray was not through in minutes."""
    x, y = (l.Buffer(name, Type(DTYPES["f32"], (size,))) for name, size in (("x", 4), ("y", 3)))
    term, seen = l.Load(x, (Var("a0", 4),)), []
    for k in range(20):
        axis = Var(f"r{k}", 3)
        reach = l.apply("mul", term, l.Load(y, (axis,)))
        low, sums = (l.Reduce.make(monoid(name), (axis,), (reach,)) for name in ("min", "sum"))
        term = l.apply("add", low, sums)

    def replace(load: l.Load) -> l.Load:
        seen.append(load)
        return load

    assert rewrite_loads(term, replace) is term
    assert len(seen) <= 1 + 2 * 20


@pytest.mark.parametrize("place", ["[a0 + 1]", "[a0 - 1] if a0 >= 1 else 0"])
def test_what_stores_have_in_common_is_moved_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four results of one long chain, read at another place: there the chain is made once, guards and all."""
    rebuilt = Counter[str]()
    for module in (node, inlining):

        def count(x: Any, memo: Any, made: Any = module.rebuilt) -> Any:
            rebuilt["nodes"] += 1
            return made(x, memo)

        monkeypatch.setattr(module, "rebuilt", count)
    chain = "\n".join(f"            v{n + 1} = exp(v{n})" for n in range(100))
    stores = ", ".join(f"y{n}=f32[9]" for n in range(4))
    lines = "\n".join(f"            z{n} = mul(v100, f32({n + 2}.0))\n            y{n}[a0] = z{n}" for n in range(4))
    loads = "\n".join(f"            in{n} = y{n}{place}" for n in range(4))
    program = parse(f"""\
@loop
def f(x: f32[9]):
    with kernel('y', {stores}):
        for a0 in free(9):
            in0 = x[a0]
            v0 = exp(in0)
{chain}
{lines}
    with kernel('out', out=f32[8]):
        for a0 in free(8):
{loads}
            s0 = add(in0, in1)
            s1 = add(s0, in2)
            s2 = add(s1, in3)
            out[a0] = s2
    return (out,)
""")
    first, second = program.steps
    made = inlining.inline(second, first)
    assert set(made.reads) == set(program.inputs) and len(made.terms) > 100
    assert rebuilt["nodes"] < 3 * 100


def masked(count: int) -> str:
    """Attention under masks, each made of places."""
    lines = ["@torch\ndef f(x: bf16[128, 64], k: bf16[64, 128], v: bf16[128, 64]):"]
    last = "x"
    for n in range(count):
        lines += [
            f"    row_{n}: i64[128] = aten.arange.default(128)",
            f"    column_{n}: i64[128, 1] = aten.view.default(row_{n}, [128, 1])",
            f"    hidden_{n}: bool[128, 128] = aten.gt.Tensor(row_{n}, column_{n})",
            f"    mm_{n}: bf16[128, 128] = aten.mm.default({last}, k)",
            f"    seen_{n}: bf16[128, 128] = aten.masked_fill.Scalar(mm_{n}, hidden_{n}, -inf)",
            f"    softmax_{n}: bf16[128, 128] = aten._softmax.default(seen_{n}, -1, False)",
            f"    out_{n}: bf16[128, 64] = aten.mm.default(softmax_{n}, v)",
        ]
        last = f"out_{n}"
    return "\n".join([*lines, f"    return ({last},)\n"])


@pytest.mark.parametrize("program", [layers, attention, masked])
def test_pairs_of_kernels_are_tried_once_for_all_that_are_alike(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: Counter[str] = Counter()
    for module, name in ((columns_reduced, "_reduced"), (rounds, "summed")):
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, f=inner, name=name: tried.update([name]) or f(*x))
    counts = []
    for n in (4, 12):
        tried.clear()
        lowering(parse(program(n)), Options(target="sm_90a", libraries="never"))
        counts.append(dict(tried))
    assert counts[0] == counts[1]


def test_candidates_after_one_that_was_lost_are_heard_of() -> None:
    """Whoever builds kernels begins with them, where processors are idle: each takes up to a second to compile."""

    class Lossy(Experience):
        """The first kernel it is asked of was lost."""

        def __init__(self, losses: int) -> None:
            self.losses, self.seen, self.next = losses, list[Any](), list[Any]()

        def lost(self, kernel: Any) -> str:
            self.seen += [kernel] if kernel not in self.seen else []
            return "it spills" if self.seen.index(kernel) < self.losses else ""

        def perhaps(self, kernel: Any) -> None:
            self.next.append(kernel)

    text = "@torch\ndef f(x: bf16[512, 512], w: bf16[512, 512]):\n    y: bf16[512, 512] = aten.mm.default(x, w)\n"
    names = LOWER[LOWER.index("schedule") :]
    above = lowering(parse(f"{text}    return (y,)\n"), Options(target="sm_90a", libraries="never"))
    program = above.stages[-len(names) - 1][1]
    for losses, heard in ((0, 0), (1, choose.NEXT)):
        tried = Lossy(losses)
        stages(program, Options(target="sm_90a"), Log(), names, tried)
        assert len(tried.next) == heard and not {*tried.next} & {*tried.seen}


def test_alike_kernels_are_looked_at_once_by_rules_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred layers every kernel was asked by each of eight rules how its operands lie."""
    monkeypatch.setattr("terrazzo.ir.canonical.MANY", 6)
    asked: Counter[str] = Counter()
    names = ((lookups, "operands_stored"), (pixels, "times"), (dimensions, "times"), (phases, "factors_of"),
             (taps_after, "multiplied_first"), (whole_steps, "product"))  # fmt: skip
    for module, name in names:
        inner = getattr(module, name)
        what = f"{module.__name__}.{name}"
        monkeypatch.setattr(module, name, lambda *x, f=inner, what=what: asked.update([what]) or f(*x))
    counts = []
    for n in (12, 48):
        asked.clear()
        sites._product.cache_clear()
        lowering(parse(layers(n)), Options(target="sm_90a", libraries="never"))
        counts.append(dict(asked))
    assert counts[0] == counts[1] and len(counts[0]) >= len(names) - 1
