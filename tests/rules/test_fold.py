"""What is known of indices is folded, and masks are computed where they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered

from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.text import parse, show
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.folding import fold as folding
from terrazzo.rules.loop.folding.fold import fold, fold_indices


def program(*lines: str, dtype: str = "i64") -> l.Program:
    """A kernel that stores `v`, of indices a0 < 6 and a1 < 9 and of x."""
    body = "".join(f"                {line}\n" for line in lines)
    text = f"""@loop
def f(x: {dtype}[6, 9]):
    with kernel('z', z={dtype}[6, 9]):
        for a0 in free(6):
            for a1 in free(9):
{body}                z[a0, a1] = v
    return (z,)
"""
    return parse(text)  # type: ignore[no-any-return]


def results(p: l.Program) -> Any:
    rng = np.random.default_rng(0)
    given = {b.name: rng.integers(0, 5, b.type.static_shape).astype(b.type.dtype.numpy) for b in p.inputs}
    return loop.run(p, given)[0]


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (["v = add(index(a0), i64(3))"], "index(a0 + 3)"),
        (["v = where(lt(index(a0), i64(6)), x[a0, a1], i64(7))"], "in0"),
        (["v = where(lt(index(a0), i64(0)), x[a0, a1], i64(7))"], "i64(7)"),
        (["v = where(not_(ge(index(a0), i64(0))), i64(7), x[a0, a1])"], "in0"),
        (["v = where(or_(eq(index(a1), index(a1 + 1)), ne(index(a0), index(a0 + 9))), x[a0, a1], i64(0))"], "in0"),
        (["w = where(lt(index(a0), i64(1)), i64(-1), where(ge(index(a0 - 1), i64(0)), index(a0 - 1), i64(0)))",
          "v = sub(index(a0), w)"], "i64(1)"),
        (["v = where(ge(index(a0), i64(2)), where(ge(index(a0), i64(1)), i64(4), i64(5)), i64(4))"], "i64(4)"),
        (["v = where(le(index(a0), i64(3)), i64(4), where(gt(index(a0), i64(4)), i64(6), i64(7)))"], None),
        (["v = x[at(add(index(a0), i64(0)), 6), a1]"], "in0"),
        (["v = fmod(index(a0 * 9 + a1), i64(9))"], "index(a1)"),
        (["v = mod(index(a0 - 6), i64(6))"], "index(a0)"),
        (["v = truncdiv(index(a0 * 9 + a1), i64(9))"], "index(a0)"),
        (["v = floordiv(index(a0 - 6), i64(6))"], "i64(-1)"),
        (["v = fmod(index(a0 - 3), i64(2))"], None),
        (["v = abs(index(a0 + 1))"], "index(a0 + 1)"),
        (["v = sub(i64(5), abs(index(a0 - 5)))"], "index(a0)"),
        (["v = abs(index(a0 - 3))"], None),
        (["v = i64(where(lt(index(a0), index(a1)), i32(1), i32(0)))"], None),
        (["v = where(le(index(a0), index(a1)), x[a0, a1], i64(0))"], None),
        (["v = where(ge(index(a0), i64(3)), x[a0 - 3, a1] if a0 >= 3 else 0, i64(1))"], None),
    ],
)  # fmt: skip
def test_what_is_known_is_folded(lines: list[str], left: str | None) -> None:
    before = program(*lines)
    after = fold(before, Log())
    assert np.array_equal(results(before), results(after))
    if left is not None:
        assert "where" not in show(after)
        assert show(after) == show(program(f"v = {left if left != 'in0' else 'x[a0, a1]'}"))


def test_a_scan_of_nothing_is_nothing() -> None:
    """And who reads it computes it."""
    before = parse("""@loop
def f(x: i64[8]):
    with kernel('c', c=i64[8]):
        for a0 in scan(8):
            v0 = ne(sub(index(a0), index(a0 - 1)), i64(1))
            acc0 <- sum(i64(v0))
            c[a0] = acc0
    with kernel('z', z=i64[8]):
        for a0 in free(8):
            z[a0] = add(x[a0], c[a0])
    return (z,)
""")
    after = fold(before, Log())
    assert np.array_equal(results(before), results(after)) and len(after.steps) == 1


def test_what_is_a_result_or_dear_is_stored() -> None:
    def both(x: Any) -> Any:
        mask = torch.where(torch.arange(8)[None] <= torch.arange(8)[:, None], 0.0, float("-inf"))
        return x + mask, mask

    def dear(x: Any) -> Any:
        angles = torch.arange(8)[:, None] * torch.arange(8)[None]
        return x @ angles.cos(), (x + 1) @ angles.cos()

    for fn in (both, dear):
        found = lowered(fn, (torch.zeros(8, 8),), "sm_90a")
        for ours, exact in zip(found.simulated(), fn(torch.zeros(8, 8)), strict=True):
            assert np.allclose(ours, exact.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("monoid", "what", "left"),
    [
        ("sum", "i64(1)", "mul(i64(1), i64(24))"),
        ("sum", "i64(ge(index(a0), i64(2)))", "i64(24)"),
        ("max", "in0", "z[a0] = in0"),
        ("any", "ge(index(a0), i64(2))", "ge(v0, i64(2))"),
    ],
)
def test_what_is_reduced_alike_at_every_point_is_not_reduced(monoid: str, what: str, left: str) -> None:
    """Counts of elements, as masked means have them without a mask, were a loop of their own beside the sum."""
    kind = {"max": "f32", "any": "bool"}.get(monoid, "i64")
    before = parse(f"""@loop
def f(x: f32[5]):
    with kernel('z', z={kind}[5]):
        for a0 in free(5):
            in0 = x[a0]
            for r0, r1 in reduce(8, 3):
                acc0 <- {monoid}({what})
            z[a0] = acc0
    return (z,)
""")
    after = fold(before, Log())
    assert "reduce" not in show(after) and left in show(after)
    given = {"x": np.arange(5, dtype=np.float32)}
    assert np.array_equal(loop.run(before, given)[0], loop.run(after, given)[0])


@pytest.mark.parametrize("first", [2, 1])
def test_other_rows_are_written_from_what_is_read_anyway(first: int) -> None:
    """Every other row of a grid, by a slice with a step: where that is read, a row is the one of the same number."""
    row = f"((a0 + {first % 2}) // 2) * 2 - {first % 2}"
    before = program(
        f"here = and_(ge(index(a0 - {first}), i64(0)), ge(index(4 - a0), i64(0)))",
        f"other = and_(here, eq(index((a0 + {first % 2}) % 2), i64(0)))",
        f"inner = x[{row}, a1] if a0 >= {first} and a0 < 5 else 0",
        "v = where(other, where(gt(inner, i64(2)), inner, i64(7)), x[a0, a1])",
    )
    after = fold(before, Log())
    assert np.array_equal(results(before), results(after))
    (kernel,) = after.steps
    assert [len(x.inside) for x in kernel.terms if isinstance(x, l.Load)] == [0]
    apart = program("v = where(eq(index(a0 % 2), i64(1)), x[(a0 // 2) * 2, a1], x[a0, a1])")
    assert fold(apart, Log()) == apart, "nothing is known of the others"


def test_what_stores_have_in_common_is_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a lattice stores what flows in nine directions, all of it made of the same sums."""
    text = """@loop
def f(x: f32[6, 9]):
    with kernel('z', y=f32[6, 9], z=f32[6, 9]):
        for a0 in free(6):
            for a1 in free(9):
                in0 = x[a0, a1]
                v0 = exp(in0)
                v1 = where(lt(index(a0), i64(6)), v0, f32(7.0))
                v2 = sin(v1)
                v3 = cos(v1)
                y[a0, a1] = v2
                z[a0, a1] = v3
    return (y, z)
"""
    (kernel,) = parse(text).steps
    asked: list[Any] = []
    fold_node = folding.folding

    def counted(node: Any) -> Any:
        asked.append(node)
        return fold_node(node)

    monkeypatch.setattr(folding, "folding", counted)
    made = fold_indices(kernel)
    assert "where" in show(kernel) and "where" not in show(made)
    assert len(asked) == len(topological([s.value for s in kernel.stores]))
