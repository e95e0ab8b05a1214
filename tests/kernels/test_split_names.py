"""Reductions that go first, twice in a row, have names of their own."""

from __future__ import annotations

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import topological
from terrazzo.ir.text import parse
from terrazzo.rules.loop_to_tile.reductions.split import reduced_first

TEXT = """
@loop
def f(x: f32[3, 4], w: f32[3, 5]):
    with kernel('z', y=f32[3], z=f32[3, 4]):
        for a0 in free(3):
            for r0 in reduce(4):
                in0 = x[a0, r0]
                acc0 <- sum(in0)
            y[a0] = acc0
            for r1 in reduce(5):
                in1 = w[a0, r1]
                acc1 <- max(in1)
            for a1 in free(4):
                in2 = x[a0, a1]
                v0 = sub(in2, acc1)
                z[a0, a1] = v0
    return (y, z)
"""


def test_kernels_that_go_first_one_after_the_other_have_names_of_their_own() -> None:
    """The first stores nothing that the rest reads, so the rest cannot see its name."""
    (kernel,) = parse(TEXT).steps
    total, most = (r for r in accumulators(kernel).values() if isinstance(r, l.Reduce))
    first, rest = reduced_first(kernel, [total])
    second, last = reduced_first(rest, [most])
    assert len({x.name for x in (first, second, last)}) == 3


THREE = """
@loop
def f(x: f32[3, 4]):
    with kernel('z', z=f32[3, 4]):
        for a0 in free(3):
            for r0 in reduce(4):
                in0 = x[a0, r0]
                acc0 <- max(in0)
            for r1 in reduce(4):
                in1 = x[a0, r1]
                v0 = sub(in1, acc0)
                acc1 <- sum(v0)
            for r2 in reduce(4):
                in2 = x[a0, r2]
                v1 = sub(in2, acc1)
                acc2 <- max(v1)
            for a1 in free(4):
                in3 = x[a0, a1]
                v2 = sub(in3, acc2)
                z[a0, a1] = v2
    return (z,)
"""


def test_the_third_that_goes_first_knows_the_name_of_the_first_that_it_does_not_read() -> None:
    (rest,) = parse(THREE).steps
    written: list[str] = []
    for _ in range(3):
        found = [r for r in accumulators(rest).values() if isinstance(r, l.Reduce)]
        (r,) = (r for r in found if not any(x is not r and x in topological(r.args) for x in found))
        first, rest = reduced_first(rest, [r])
        written += [b.name for b in first.writes]
    assert len(set(written)) == 3
