"""Random programs of Tensor IR: every primitive, every scalar function, every monoid, every element type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from terrazzo.errors import UserError
from terrazzo.ir.dialects import scalar as sc
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.monoid import MONOIDS, monoid
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import DTYPES, DType, Type, bf16, bool_, contiguous_strides, f16, f32, f64, i32, i64
from tests.fuzz.known import DIGITS, Known, known
from tests.fuzz.views import affine, view

EXTENTS = (0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 100, 128)
MATRIX_EXTENTS = (16, 32, 8, 64, 24, 48, 17, 3, 1)
REAL = [d for d in DTYPES.values() if d.kind != "complex"]
COMMON = [f32] * 6 + REAL
SELECTS = ("neg", "abs", "min", "max", "fmin", "fmax", "where", "copysign", "sign", "floor", "ceil", "trunc", "round")
"""Functions that round nothing of exact operands, and make no number larger."""
JUMPS = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "signbit", "copysign", "sign", "floor", "ceil", "trunc", "round"),
    *("mod", "fmod", "nextafter", "atan2", "pow"),
}
"""Functions a rounding of whose operands may change the result by any amount."""
STEADY = ("sum", "prod", "max", "min", "welford", "logsumexp", "recurrence")
"""The monoids a rounding of whose operands changes the result by about as much."""
LARGEST = 10_000
"""Elements of a value at most."""
WHOLE_INPUT = 4
"""The largest number in an input of whole ones."""


@dataclass
class Draft:
    """A program that is being drawn: at most `cap` elements a value, `work` points a reduction."""

    draw: Any
    cap: int
    work: int
    inputs: list[Input] = field(default_factory=list)
    values: list[Known] = field(default_factory=list)

    # -- choices ------------------------------------------------------------------------------------------------------

    def one(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(items))

    def chance(self, in_: int) -> bool:
        """True once in `in_`; False is simpler."""
        return bool(self.draw(st.integers(0, in_ - 1)) == in_ - 1)

    def number(self, least: int, most: int) -> int:
        return int(self.draw(st.integers(least, most)))

    def shape(self, extents: Sequence[int] = EXTENTS) -> tuple[int, ...]:
        """Ranks 0 to 6, with no more than `cap` elements."""
        out: list[int] = []
        for _ in range(self.one((1, 2, 2, 3, 3, 0, 4, 5, 6))):
            room = self.cap // max(math.prod(e for e in out if e), 1)
            out.append(self.one([e for e in extents if e <= max(room, 1)]))
        return tuple(out)

    def pick(self) -> Known:
        """A value; the last one often, so that chains get long."""
        return self.values[-1] if self.draw(st.booleans()) else self.one(self.values)

    # -- values -------------------------------------------------------------------------------------------------------

    def add(self, found: Known) -> Known:
        if math.prod(found.shape) <= LARGEST:
            self.values.append(found)
        return found

    def fresh(self, dtype: DType | None = None, shape: tuple[int, ...] | None = None) -> Known:
        """A new input. What it holds follows from its name (see `harness.random_inputs`)."""
        dtype = dtype or self.one(COMMON)
        shape = self.shape() if shape is None else shape
        name = "whole" if not dtype.is_float else self.one(("x", "whole", "x", "special", "x", "infinite"))
        node = Input(f"{name}{len(self.inputs)}", Type(dtype, shape, self.strides(shape)))
        self.inputs.append(node)
        return self.add(known(node, True, 1 if dtype is bool_ else WHOLE_INPUT if name == "whole" else None))

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Strides of a transposed input, sometimes with gaps; mostly none."""
        if len(shape) < 2 or not self.chance(6):
            return None
        order = self.draw(st.permutations(range(len(shape))))
        gap = self.one((0, 0, 1, 3))
        own = contiguous_strides(tuple(shape[d] + gap for d in order))
        return tuple(own[order.index(d)] for d in range(len(shape)))  # type: ignore[return-value]

    def cast(self, x: Known, to: DType) -> Known | None:
        """`x` as another type; None where that would jump, or mean nothing in C."""
        if x.dtype is to:
            return x
        if x.dtype.is_float and not to.is_float:
            if not x.exact or ((x.whole is None or x.whole > 127) and to is not bool_):
                return None
            x = x if to.kind != "uint" else self.apply("abs", self.cast(x, x.dtype.compute) or x)
            x = Known(t.cast(x.node, x.dtype.compute), x.exact, x.whole)
        exact = (
            not to.is_float
            or x.whole is not None
            or (x.exact and x.dtype.is_float and DIGITS[x.dtype.name] <= DIGITS[to.name])
        )
        wrapped = to.kind == "uint" and x.dtype.kind == "int"
        return known(t.cast(x.node, to), exact and x.exact, None if wrapped else 1 if to is bool_ else x.whole)

    def computed(self, x: Known) -> Known:
        """`x` in the type it computes in."""
        return self.cast(x, x.dtype.compute) or x

    def apply(self, fn: str, *args: Known) -> Known:
        node = t.apply(fn, *(a.node for a in args))
        exact, bounds = all(a.exact for a in args), [a.whole for a in args[fn == "where" :]]
        whole = None
        if all(b is not None for b in bounds):
            whole = {"add": sum, "sub": sum, "mul": math.prod}.get(fn, max if fn in SELECTS else lambda _: None)(bounds)
        kept = fn in SELECTS or (
            fn in ("add", "sub", "mul") and whole is not None and whole <= 1 << DIGITS.get(node.type.dtype.name, 64)
        )
        return known(node, exact and kept, whole)

    def like(self, x: Known, dtype: DType) -> Known:
        """A value of x's shape and some type: one there is, converted and broadcast, or a new one."""

        def fits(v: Known) -> bool:
            a, b = v.shape, x.shape
            return len(a) <= len(b) and all(p in (1, q) for p, q in zip(a[::-1], b[::-1], strict=False))

        found = self.one([v for v in self.values if fits(v)] or [x])
        kind = self.one(("old", "old", "old", "new", "literal", "iota"))
        made = self.cast(found, dtype) if kind == "old" and fits(found) else None
        if kind == "iota" and dtype.size > 4 and x.shape:
            made = self.cast(self.iota(x.shape), dtype)
        if kind == "literal" or (made is None and kind != "new"):
            value = self.one((0, 1, 2, 3, -1))
            value = abs(value) if dtype.kind == "uint" else value
            return known(t.literal(value, dtype, x.shape), True, abs(value))
        if made is None:
            made = self.fresh(
                dtype,
                tuple(
                    1 if self.chance(5) else e for e in x.shape[self.number(0, len(x.shape)) if self.chance(4) else 0 :]
                ),
            )
        return Known(t.broadcast(made.node, x.shape), made.exact, made.whole)

    def iota(self, shape: tuple[int, ...]) -> Known:
        here = t.coordinates(shape)
        e: Any = self.number(-2, 2)
        for v in here:
            e = e + self.one((0, 1, 1, -1, 3)) * v
        e = {"": e, "mod": e % 5, "div": e // 3}[self.one(("", "", "mod", "div"))]
        return known(t.iota(shape, e), True, 3 * sum(shape) + 2)

    # -- steps --------------------------------------------------------------------------------------------------------

    def elementwise(self) -> Known:
        """Any scalar function on operands it takes."""
        x = self.pick() if self.chance(4) else self.computed(self.pick())  # numbers of 16 bits are only compared
        dtype = x.dtype
        rows = [
            r
            for r in sc.SCALARS.values()
            if r.name != "where" and (x.exact or r.name not in JUMPS) and _takes(r, dtype)
        ]
        if not rows:
            return x
        fn = self.one(rows)
        others = [self.like(x, dtype) for _ in range(fn.arity - 1)]
        if fn.name in JUMPS and not all(o.exact for o in others):
            return x
        if fn.name in ("shl", "shr"):  # by as many bits as there are
            others = [self.apply("and_", others[0], Known(t.literal(7, dtype, x.shape)))]
        return self.apply(fn.name, x, *others)

    def select(self) -> Known:
        x = self.pick()
        condition = self.like(x, bool_)
        return self.apply("where", condition, x, self.like(x, x.dtype))

    def convert(self) -> Known:
        x = self.pick()
        return self.cast(x, self.one(COMMON)) or x

    def view(self) -> Known:
        x = self.pick()
        return Known(view(self, x.node, x.shape), x.exact, x.whole)

    def mapped(self) -> Known:
        """An index map of any quasi-affine expressions, guarded wherever they may leave the operand."""
        x = self.pick()
        shape = self.shape()
        here = t.coordinates(shape)
        index, inside = [], []
        for extent in x.shape:
            e = affine(self, here, extent)
            index.append(e)
            inside += [e, extent - 1 - e]
        if 0 in x.shape and 0 not in shape and not inside:
            return x
        return Known(t.index_map(x.node, shape, index, inside), x.exact, x.whole)

    def gather(self) -> Known:
        """One axis indexed by integers from data."""
        x = self.pick()
        if not x.shape or 0 in x.shape:
            return x
        axis = self.number(0, len(x.shape) - 1)
        ids = self.one([v for v in self.values if v.dtype.is_integer] or [None])
        ids = self.fresh(self.one((i64, i32)), (self.one(EXTENTS[1:8]),)) if ids is None or self.chance(3) else ids
        if (limit := x.shape[axis]) > ids.dtype.highest:
            return x
        at = self.apply("mod", ids, Known(t.literal(limit, ids.dtype, ids.shape)))
        shape = (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :])
        if math.prod(shape) > self.cap:
            return x
        here = t.coordinates(shape)
        own = here[axis : axis + len(ids.shape)]
        index = (*here[:axis], t.loaded(at.node, own, limit), *here[axis + len(ids.shape) :])
        return Known(t.index_map(x.node, shape, index), x.exact, x.whole)

    def reduce(self) -> Known:
        x = self.computed(self.pick())
        if not x.shape:
            return x
        known = [m for m in MONOIDS if MONOIDS[m].commutes and (x.exact or m in STEADY) and _combines(m, x.dtype)]
        m = self.one(known or ["sum"])
        if not _combines(m, x.dtype):
            return x
        axes = sorted(self.draw(st.sets(st.integers(0, len(x.shape) - 1), min_size=1)))
        args = self.arguments(m, x, axes)
        n = math.prod(x.shape[a] for a in axes)
        if self.chance(4):  # as one may write it, not as the builders do
            node = t.Reduce(monoid(m), tuple(a.node for a in args), tuple(axes))
            results: Any = [t.Get(node, k) for k in range(node.monoid.width)] if node.monoid.width > 1 else node
        else:
            results = t.reduce(m, [a.node for a in args], axes, keepdim=self.chance(3))
        return self.combined(m, x, results, n)

    def scan(self) -> Known:
        x = self.computed(self.pick())
        m = self.one([m for m in MONOIDS if (x.exact or m in STEADY) and _combines(m, x.dtype)] or ["sum"])
        if not x.shape or not _combines(m, x.dtype):
            return x
        axis = self.number(0, len(x.shape) - 1)
        results = t.scan(m, [a.node for a in self.arguments(m, x, [axis])], axis)
        return self.combined(m, x, results, x.shape[axis])

    def arguments(self, m: str, x: Known, axes: Sequence[int]) -> list[Known]:
        """What a monoid of several values combines, beside x."""
        if m.startswith("arg"):
            return [
                x,
                Known(t.iota(x.shape, t.coordinates(x.shape)[axes[0]]))
                if self.draw(st.booleans())
                else self.like(x, i64),
            ]
        if m == "welford":
            return [x, Known(t.literal(0.0, x.dtype, x.shape)), Known(t.literal(1.0, x.dtype, x.shape))]
        if m == "logsumexp":
            return [x, Known(t.literal(1.0, x.dtype, x.shape))]
        if m == "recurrence":  # half of what came before, which no value outgrows
            return [Known(t.literal(0.5, x.dtype, x.shape)), x]
        return [x]

    def combined(self, m: str, x: Known, results: Any, n: int) -> Known:
        """What is known of the results of a reduction or scan of n elements; the last of several."""
        values = list(results) if isinstance(results, (tuple, list)) else [results]
        if m in ("sum", "prod") and x.dtype.is_float:
            whole = None if x.whole is None else x.whole * max(n, 1) if m == "sum" else max(x.whole, 1) ** min(n, 64)
            exact = whole is not None and whole <= 1 << DIGITS[x.dtype.name]
            return self.add(known(values[0], exact and x.exact, whole))
        exact = x.exact and m not in ("welford", "logsumexp", "recurrence")
        whole = x.whole if m in ("max", "min") and n > 0 else None
        order = self.draw(st.permutations(range(len(values))))
        return [self.add(known(values[k], exact, whole)) for k in order][-1]

    def contract(self) -> Known:
        """A product of matrices, of a value and a new one or of two new ones: batched, transposed, in types of 16
        bits.
        """
        x = self.pick()
        if len(x.shape) >= 2 and 0 < math.prod(x.shape) <= self.work // 8 and self.draw(st.booleans()):
            batch, m, k = (), math.prod(x.shape[:-1]), x.shape[-1]
            dtype = f32 if x.dtype is bool_ else x.dtype
            a = self.cast(Known(t.reshape(x.node, (m, k)), x.exact, x.whole), dtype) or x
        else:
            batch = self.one(((), (), (), (2,), (3,), (2, 2)))
            m, k = self.one(MATRIX_EXTENTS), self.one((*MATRIX_EXTENTS, 128))
            m = m if math.prod(batch) * m * k * 8 <= self.work else 1
            a = self.fresh(self.one((f32, bf16, f16, bf16, f16, f64, i32)), (*batch, m, k))
        n = self.one([e for e in MATRIX_EXTENTS if math.prod(batch) * m * k * e <= self.work] or [1])
        turned, b_turned = self.draw(st.booleans()), self.draw(st.booleans())
        b = self.fresh(a.dtype, (*batch, n, k) if b_turned else (*batch, k, n))
        rank = len(batch)
        space = (*batch, n, m, k) if turned else (*batch, m, n, k)
        here = t.coordinates(space)
        lead, (i, j, r) = here[:rank], (here[rank + turned], here[rank + 1 - turned], here[-1])
        left = t.index_map(self.computed(a).node, space, (*lead, i, r))
        right = t.index_map(self.computed(b).node, space, (*lead, j, r) if b_turned else (*lead, r, j))
        product = self.apply("mul", Known(left, a.exact, a.whole), Known(right, b.exact, b.whole))
        if self.chance(8):
            product = self.apply("mul", product, self.like(product, product.dtype))
        return self.combined("sum", product, t.reduce("sum", product.node, [rank + 2]), k)

    def normalize(self) -> Known:
        """Softmax along an axis, or division by the root of the mean square."""
        x = self.cast(self.pick(), f32)
        if x is None or not x.shape:
            return x or self.values[-1]
        axis = [self.number(0, len(x.shape) - 1)]
        if self.draw(st.booleans()):
            top = t.broadcast(t.reduce("max", x.node, axis, keepdim=True), x.shape)
            y = t.apply("exp", t.apply("sub", x.node, top))
            return known(t.apply("div", y, t.broadcast(t.reduce("sum", y, axis, keepdim=True), x.shape)), False)
        square = t.reduce("sum", t.apply("mul", x.node, x.node), axis, keepdim=True)
        root = t.apply("rsqrt", t.apply("add", square, t.literal(1e-3, f32, square.type.shape)))
        return known(t.apply("mul", x.node, t.broadcast(root, x.shape)), False)

    def rows(self) -> Known:
        """A long axis, for what threads, warps or blocks share."""
        length = self.one((100, 128, 257, 1000, 1024, 4099))
        shape = (self.one([e for e in (1, 2, 5, 33) if e * length <= LARGEST]), length)
        return self.fresh(self.one((f32, f32, bf16, f64, i64)), shape[:: self.one((1, 1, -1))])

    def window(self) -> Known:
        """Windows that slide along an axis: weighted sums (a convolution), or maxima, zero outside."""
        x = self.computed(self.pick())
        if not x.shape or 0 in x.shape or x.dtype is bool_:
            return x
        taps, step, spread, margin = self.number(1, 5), self.number(1, 3), self.number(1, 2), self.number(0, 2)
        out = (x.shape[-1] + 2 * margin - spread * (taps - 1) - 1) // step + 1
        if out < 1:
            return x
        space = (*x.shape[:-1], out, taps)
        here = t.coordinates(space)
        at = here[-2] * step + here[-1] * spread - margin
        seen = Known(t.index_map(x.node, space, (*here[:-2], at), (at, x.shape[-1] - 1 - at)), x.exact, x.whole)
        if self.chance(2):
            return self.combined("max", seen, t.reduce("max", seen.node, [len(space) - 1]), taps)
        weights = self.fresh(x.dtype, (taps,))
        product = self.apply("mul", seen, Known(t.broadcast(weights.node, space), weights.exact, weights.whole))
        return self.combined("sum", product, t.reduce("sum", product.node, [len(space) - 1]), taps)

    def leaf(self) -> Known:
        return self.iota(self.shape()) if self.chance(2) else self.fresh()

    def laid_out(self) -> Known:
        """The same values, in memory with the last dimension outermost."""
        x = self.pick()
        strides = Type(x.dtype, (x.shape[-1], *x.shape[:-1])).element_strides if x.shape else ()
        return known(t.LaidOut(x.node, (*strides[1:], *strides[:1])), x.exact, x.whole)

    def opaque(self) -> Known:
        """What PyTorch runs for us: one result, or two of different types."""
        x = self.pick()
        x = x if x.dtype in (f64, i64) else self.cast(x, f32) or x
        if x.dtype not in (f32, f64, i64) or not x.exact:
            return x
        if x.dtype is i64 or not x.shape or 0 in x.shape:
            return known(t.Opaque("aten.neg.default", (x.node,), (), Type(x.dtype, x.shape)), True, x.whole)
        out = Type(x.dtype, x.shape[1:])
        both = t.Opaque("aten.max.dim", (x.node, 0), (), (out, Type(i64, out.shape)))
        self.add(known(t.Get(both, 0), True, x.whole))
        return known(t.Get(both, 1))


STEPS = (
    *("elementwise",) * 6, *("view",) * 4, *("reduce",) * 4, *("contract",) * 2, *("mapped",) * 2, *("convert",) * 2,
    *("normalize",) * 2, "select", "scan", "gather", "window", "leaf", "laid_out", *("opaque",) * 2,
)  # fmt: skip


@st.composite
def tensor_programs(
    draw: Any, steps: int = 8, sizes: Sequence[int] = (40, 40, 600, 3000), opaque: bool = True
) -> Program:
    """A random program. `sizes` are what a tensor may have of elements; `opaque` says whether PyTorch may run parts of
    it.
    """
    cap = draw(st.sampled_from(sizes))
    draft = Draft(draw, cap, draw(st.sampled_from((500, 20_000, 60_000))))
    kinds = [s for s in STEPS if opaque or s != "opaque"]
    draft.fresh() if (
        first := draw(st.sampled_from(("fresh", "fresh", "rows", "contract")))
    ) != "rows" else draft.rows()
    if first == "contract":
        draft.add(draft.contract())
    for _ in range(draw(st.integers(1, steps))):
        try:
            draft.add(getattr(draft, draw(st.sampled_from(kinds)))())
        except UserError as why:  # the drawer's fault, not the compiler's: the program would not exist
            raise AssertionError(f"an ill-typed step was drawn: {why}") from why
    results = [draft.values[-1], *(v for v in draft.values[1:-1] if draft.chance(6))]
    return Program("tensor", "random", tuple(draft.inputs), tuple(dict.fromkeys(v.node for v in results)))


def _takes(row: sc.Scalar, dtype: DType) -> bool:
    return row.result([dtype] * row.arity) is not None


def _combines(m: str, dtype: DType) -> bool:
    """Whether a monoid is defined on a type."""
    if m in ("welford", "logsumexp", "recurrence"):
        return dtype in (f32, f64)
    if m.startswith("arg"):
        return dtype is not bool_ or m != "argmax"
    fn = {"sum": "add", "prod": "mul", "any": "or_", "all": "and_"}.get(m, m)
    return _takes(sc.SCALARS[fn], dtype)
