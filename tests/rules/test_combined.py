"""What waits to be combined with others is combined as soon as it is there: what that saves, and where it is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from terrazzo.interp import loop as interpreter
from terrazzo.ir import in_place
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.in_place import pairs
from terrazzo.ir.node import topological
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory import combined, lifetimes
from terrazzo.rules.loop.memory.combined import combine_sooner
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.targets import target

RATES = target("sm_90a").rates
SIZE = 8 * 16 * 4


@pytest.fixture(autouse=True)
def any_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """These programs take no longer than a few kernels more."""
    monkeypatch.setattr(combined, "LOSS", 1.0)


def branches(count: int, out: str) -> l.Program:
    """Each row-wise maximum is made of the one before; `out` reads them all."""
    lines = ["@loop", "def f(x: f32[8, 16], w: f32[16, 4]):"]
    for k in range(count):
        before = f"t{k - 1}" if k else "x"
        lines += [
            f"    with kernel('t{k}', t{k}=f32[8, 16]):",
            "        for a0 in free(8):",
            "            for a1 in free(16):",
            "                for r0 in reduce(8):",
            f"                    in0 = {before}[r0, a1]",
            "                    v0 = mul(in0, f32(0.5))",
            "                    acc0 <- max(v0)",
            f"                t{k}[a0, a1] = acc0",
        ]
    return parse("\n".join([*lines, out, "    return (out,)"]))


def added(count: int, at: str, indent: int) -> str:
    lines = [f"in{k} = t{k}[{at}]" for k in range(count)]
    lines += [f"v{k} = add({f'v{k - 1}' if k > 1 else 'in0'}, in{k})" for k in range(1, count)]
    return "\n".join(" " * indent + x for x in lines)


def pointwise(count: int) -> str:
    return f"""\
    with kernel('out', out=f32[8, 16]):
        for a0 in free(8):
            for a1 in free(16):
{added(count, "a0, a1", 16)}
                out[a0, a1] = v{count - 1}"""


def product(count: int) -> str:
    return f"""\
    with kernel('out', out=f32[8, 4]):
        for a0 in free(8):
            for a1 in free(4):
                for r0 in reduce(16):
{added(count, "a0, r0", 20)}
                    b = w[r0, a1]
                    m = mul(v{count - 1}, b)
                    acc0 <- sum(m)
                out[a0, a1] = acc0"""


def reduced(count: int) -> str:
    """The sums of rows, each of its own."""
    sums = "\n".join(
        f"""            for r{k} in reduce(16):
                in{k} = t{k}[a0, r{k}]
                acc{k} <- sum(in{k})"""
        for k in range(count)
    )
    lines = "\n".join(f"            v{k} = add({f'v{k - 1}' if k > 1 else 'acc0'}, acc{k})" for k in range(1, count))
    return f"""\
    with kernel('out', out=f32[8]):
        for a0 in free(8):
{sums}
{lines}
            out[a0] = v{count - 1}"""


def products(count: int) -> str:
    """A sum of products, each of its own: gradients of a weight that is used at every step."""
    sums = "\n".join(
        f"""                for r{k} in reduce(16):
                    in{k} = t{k}[a0, r{k}]
                    b{k} = w[r{k}, a1]
                    m{k} = mul(in{k}, b{k})
                    acc{k} <- sum(m{k})"""
        for k in range(count)
    )
    lines = "\n".join(
        f"                v{k} = add({f'v{k - 1}' if k > 1 else 'acc0'}, acc{k})" for k in range(1, count)
    )
    return f"""\
    with kernel('out', out=f32[8, 4]):
        for a0 in free(8):
            for a1 in free(4):
{sums}
{lines}
                out[a0, a1] = v{count - 1}"""


def guarded(count: int) -> str:
    """What is read at a border, of which only guards name all axes."""
    return pointwise(count).replace("[a0, a1]\n", "[a0, 3] if a1 < 5 else 0\n", count)


LOOKED_UP = """\
    with kernel('place', place=i64[8]):
        for a0 in free(8):
            in0 = t7[a0, 0]
            v0 = i64(in0)
            place[a0] = v0
    with kernel('out', out=f32[8, 16]):
        for a0 in free(8):
            in9 = place[a0]
            for a1 in free(16):
"""


@pytest.mark.parametrize("out", [pointwise, product, reduced, products, guarded])
def test_what_is_summed_waits_as_one(out: object) -> None:
    """Eight branches wait for the last one; then hardly more than two of them do, as many as eager mode keeps."""
    program = branches(8, out(8))  # type: ignore[operator]
    log = Log()
    found = combine_sooner(program, log, replace(RATES, launch=0.0, byte=0.0), 0)
    before, after = (max(in_use(p.steps, p.results)) for p in (program, found))
    assert before >= 8 * SIZE and after <= 4 * SIZE
    assert not problem(found) and all(e.rule == "combine_sooner" and e.fired for e in log.events)
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float32) for b in program.inputs}
    for one, other in zip(interpreter.run(program, inputs), interpreter.run(found, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_is_in_use_is_found_by_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the steps that a way makes it is asked only what its two kernels may store in place: it is as when all are."""
    asked: list[int] = []
    whole = lifetimes.pairs
    monkeypatch.setattr(lifetimes, "pairs", lambda steps: asked.append(len(steps)) or whole(steps))

    def compared(steps: Any, results: Any, *known: Any, **named: Any) -> list[int]:
        before = len(asked)
        found = in_use(steps, results, *known, **named)
        assert len(asked) == before
        assert found == in_use(steps, results)
        return found

    monkeypatch.setattr(combined, "in_use", compared)
    monkeypatch.setattr(in_place, "WORTH", 0)
    program = branches(8, pointwise(8))
    found = combine_sooner(program, Log(), replace(RATES, launch=0.0, byte=0.0), 0)
    assert len(found.steps) > len(program.steps) and pairs(found.steps)


def test_products_that_are_alike_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way takes one of twelve products out of their sum, in every round: what is left are the same products."""
    priced: list[l.Kernel] = []
    cost = combined.cost
    monkeypatch.setattr(combined, "cost", lambda kernel, rates: (priced.append(kernel), cost(kernel, rates))[1])
    program = branches(12, products(12))
    assert combine_sooner(program, Log(), replace(RATES, launch=0.0, byte=0.0), 0) != program
    assert len(priced) <= 4 * len(program.steps)


def test_it_must_be_worth_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done below a megabyte, nor for a large part of the time, or for one that memory is not worth."""
    program = branches(8, pointwise(8))
    assert combine_sooner(program, Log(), RATES) == program
    assert combine_sooner(program, Log(), RATES, 0) != program
    for name, limit in (("RATE", 100.0), ("LOSS", 0.01)):
        with monkeypatch.context() as m:
            m.setattr(combined, name, limit)
            assert combine_sooner(program, Log(), RATES, 0) == program


def test_what_is_read_again_later_is_not_combined() -> None:
    """Summands that somebody reads after most was in use wait in any case."""
    later = pointwise(8).replace("'out', out", "'sum', sum").replace("                out[", "                sum[")
    program = branches(8, later + "\n" + pointwise(8).replace("add(", "mul("))
    assert combine_sooner(program, Log(), replace(RATES, launch=0.0, byte=0.0), 0) == program


def test_what_becomes_wider_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth of what waits is read: in float32 it takes less, but tensor cores would not multiply it."""
    monkeypatch.setattr(combined, "RATE", 1e-3)
    program = parse(
        "@loop\n"
        "def f(x: f32[64, 64], y: f32[16, 16]):\n"
        "    with kernel('t', t=bf16[64, 64]):\n"
        "        for a0 in free(64):\n"
        "            for a1 in free(64):\n"
        "                in0 = x[a0, a1]\n"
        "                v0 = bf16(in0)\n"
        "                t[a0, a1] = v0\n"
        "    with kernel('s', s=f32[64, 64]):\n"
        "        for a0 in free(64):\n"
        "            for a1 in free(64):\n"
        "                in0 = x[a1, a0]\n"
        "                v0 = exp(in0)\n"
        "                s[a0, a1] = v0\n"
        "    with kernel('out', out=f32[16, 16]):\n"
        "        for a0 in free(16):\n"
        "            for a1 in free(16):\n"
        "                for r0 in reduce(64):\n"
        "                    in0 = t[a0, r0]\n"
        "                    v0 = f32(in0)\n"
        "                    in1 = s[r0, a1]\n"
        "                    v1 = mul(v0, in1)\n"
        "                    acc0 <- sum(v1)\n"
        "                out[a0, a1] = acc0\n"
        "    return (out,)\n"
    )
    assert combine_sooner(program, Log(), RATES, 1) == program


def test_what_an_index_reads_comes_first() -> None:
    """A term that looks a row up may be combined when the row's number is there, not only the rows."""
    chosen = f"""\
    with kernel('rows', rows=bool[8]):
        for a0 in free(8):
            for r0 in reduce(16):
                in0 = t2[a0, r0]
                acc0 <- max(in0)
            v0 = gt(acc0, f32(0.0))
            rows[a0] = v0
    with kernel('out', out=f32[8, 16]):
        for a0 in free(8):
            in9 = rows[a0]
            v9 = where(in9, i64(7), i64(0))
            for a1 in free(16):
{added(3, "at(v9, 8), a1", 16)}
                out[a0, a1] = v2"""
    kernel: l.Kernel = branches(3, chosen).steps[-1]  # type: ignore[assignment]
    found = dict(combined._terms(kernel))
    assert any("rows" in {b.name for b in reads} for reads in found.values())
    for term, reads in found.items():
        assert reads == {x.buffer for x in topological([term]) if isinstance(x, l.Load)}


def test_what_is_looked_up_waits_for_its_place() -> None:
    """Branches are read where a number that is made of the last one says: none is combined before that is there."""
    lines = added(8, "at(in9, 8), a1", 16)
    program = branches(8, f"{LOOKED_UP}{lines}\n                out[a0, a1] = v7")
    assert not problem(program)
    found = combine_sooner(program, Log(), replace(RATES, launch=0.0, byte=0.0), 0)
    assert not problem(found)
