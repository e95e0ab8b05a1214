"""Complex numbers as pairs of real ones (docs/adr/019). Only PyTorch has complex tensors; where a program computes with
some, it computes with what `view_as_real` gives of them, which the other rules lower and fuse: rotary embeddings,
filters of spectra. What stays complex (transforms, large products of matrices) is called, and reads and gives views of
pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node, topological
from terrazzo.ir.operators import tried
from terrazzo.ir.program import Program
from terrazzo.ir.types import DType, Type, f32, f64
from terrazzo.rewrite.rule import Log
from terrazzo.rules.torch_to_tensor.sums import is_call, replaced

SHORT = 16
"""Terms of the sums of a product of matrices that is computed here: four products of so many are no more than what it
takes to read and store them, and a library has no kernels for small ones.
"""
REAL = {"c64": f32, "c128": f64}
"""The type of the parts of a complex number, by its name."""
TO_PAIRS, FROM_PAIRS = "aten.view_as_real.default", "aten.view_as_complex.default"
Part = Any
"""The real or the imaginary part of something: a tensor, a number, or None for 0 everywhere."""
Now = Callable[[Node], Any]


def complex_as_pairs(program: Program, log: Log) -> Program:
    """Arithmetic of complex numbers is done on pairs, and what moves such results moves the pairs.

    @torch
    def f(x: f32[3, 4, 2], y: f32[4, 2]):
        a: c64[3, 4] = aten.view_as_complex.default(x)
        b: c64[4] = aten.view_as_complex.default(y)
        c: c64[3, 4] = aten.mul.Tensor(a, b)
        d: f32[3, 4, 2] = aten.view_as_real.default(c)
        return (d,)
    =>
    @torch
    def f(x: f32[3, 4, 2], y: f32[4, 2]):
        v0: f32[3, 4] = aten.select.int(x, -1, 0)
        v1: f32[4] = aten.select.int(y, -1, 0)
        v2: f32[3, 4] = aten.mul.Tensor(v0, v1)
        v3: f32[3, 4] = aten.select.int(x, -1, 1)
        v4: f32[4] = aten.select.int(y, -1, 1)
        v5: f32[3, 4] = aten.mul.Tensor(v3, v4)
        v6: f32[3, 4] = aten.sub.Tensor(v2, v5)
        v7: f32[3, 4] = aten.mul.Tensor(v0, v4)
        v8: f32[3, 4] = aten.mul.Tensor(v3, v1)
        v9: f32[3, 4] = aten.add.Tensor(v7, v8)
        d: f32[3, 4, 2] = aten.stack.default([v6, v9], -1)
        return (d,)
    """
    found = [n for n in topological(program.results) if isinstance(n, Aten) and _function(n) and _defined(n)]
    new: dict[Node, Callable[[Now], Any]] = {}
    for node in _worth(found):
        moves = node.name in MOVED
        new[node] = partial(_moved if moves else _computed, _function(node), node)
    return replaced(program, log, "complex_as_pairs", new) if new else program


def _function(node: Aten) -> Any:
    return COMPUTED.get(node.name) or MOVED.get(node.name)


def _worth(nodes: Sequence[Aten]) -> list[Aten]:
    """Those that real numbers go into, or come out of, or of which several compute: one op between two calls of PyTorch
    has nothing to be fused with, and what it computes would be copied to where the second call takes it.
    """
    group: dict[Node, Node] = {n: n for n in nodes}

    def root(n: Node) -> Node:
        while group[n] is not n:
            group[n] = group[group[n]]
            n = group[n]
        return n

    for n in nodes:
        for c in n.children:
            if c in group and _real(c) is not None:
                group[root(c)] = root(n)
    count: dict[Node, int] = {}
    for n in nodes:
        real = _real(n) is None or any(is_call(c, FROM_PAIRS) or _real(c) is None for c in n.children)
        computes = n.name in COMPUTED and bool(n.children)
        count[root(n)] = count.get(root(n), 0) + (2 if real and computes else int(computes))
    return [n for n in nodes if count[root(n)] > 1]


def _defined(node: Aten) -> bool:
    """Whether a call takes or gives complex numbers whose parts there is a type for, and one tensor."""
    types = [x.type for x in (node, *node.children)]  # type: ignore[attr-defined]
    kinds = [t.dtype for t in types if isinstance(t, Type) and t.dtype.kind == "complex"]
    return bool(kinds) and all(k.name in REAL for k in kinds) and isinstance(node.result, Type)


def _computed(fn: Callable[..., Any], node: Aten, now: Now) -> Any:
    """The value of an op that computes: of complex numbers, what a pair of parts means."""
    found = fn(node, *(_now(a, now) for a in node.args), **dict(node.kwargs))
    if found is None:
        return now_of(node, now)
    return found if _real(node) is None or is_call(found, FROM_PAIRS) else call("view_as_complex.default", found)


def _moved(fn: Callable[..., Any], node: Aten, now: Now) -> Any:
    """The value of an op that only moves elements: moved as pairs where they are computed as pairs."""
    given = [_now(a, now) for a in node.args]
    old = now_of(node, now)
    if not any(is_call(x, FROM_PAIRS) for x in _nodes(given)):
        return old
    pairs = _pair_of_moved(old)
    return old if pairs is None else call("view_as_complex.default", pairs)


def now_of(node: Aten, now: Now) -> Any:
    """The same op on what stands for its arguments now."""
    return node.with_children([now(c) for c in node.children])


def _now(value: Any, now: Now) -> Any:
    if isinstance(value, tuple):
        return tuple(_now(v, now) for v in value)
    return now(value) if isinstance(value, Node) else value


def _nodes(value: Any) -> Iterator[Node]:
    for v in value:
        if isinstance(v, tuple):
            yield from _nodes(v)
        elif isinstance(v, Node):
            yield v


def _real(x: Any) -> DType | None:
    """The type of the parts of a complex tensor; None for anything else."""
    ty = getattr(x, "type", None)
    return REAL.get(ty.dtype.name) if isinstance(ty, Type) else None


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """A call of an op, with PyTorch's word for its type."""
    given = tuple(kwargs.items())
    found = tried(f"aten.{name}", args, given, lambda n: n.type)
    assert isinstance(found, Type), f"{name} of these has no type"
    return Aten(f"aten.{name}", args, given, Type(found.dtype, found.shape))


def pairs_of(x: Any) -> Any:
    """A complex tensor as pairs: what it is a view of, or what is moved as it is."""
    if is_call(x, FROM_PAIRS):
        return x.args[0]
    if isinstance(x, Aten) and x.name in MOVED and _defined(x) and (found := _pair_of_moved(x)) is not None:
        return found
    return call("view_as_real.default", x)


def _pair_of_moved(x: Aten) -> Any:
    return MOVED[x.name](x, *x.args, **dict(x.kwargs))


def parts(x: Any) -> tuple[Part, Part]:
    """The real and the imaginary part of a tensor or a number."""
    if isinstance(x, complex):
        return x.real, x.imag
    if _real(x) is None:
        return x, None
    pairs = pairs_of(x)
    if is_call(pairs, "aten.stack.default") and pairs.args[1:] == (-1,):
        return pairs.args[0]  # type: ignore[no-any-return]
    return call("select.int", pairs, -1, 0), call("select.int", pairs, -1, 1)


def stacked(node: Aten, real: Part, imaginary: Part) -> Any:
    """Pairs of the shape and type of a complex result."""
    kind, shape = _real(node), node.result.shape  # type: ignore[union-attr]
    each = []
    for x in (real, imaginary):
        if not isinstance(x, Node):
            each.append(call("full.default", shape, float(x or 0), dtype=kind))
            continue
        part: Any = x if x.type.dtype is kind else call("_to_copy.default", x, dtype=kind)  # type: ignore[attr-defined]
        each.append(part if part.type.shape == shape else call("expand.default", part, shape))
    return call("stack.default", tuple(each), -1)


def _times(x: Part, y: Part) -> Part:
    if x is None or y is None:
        return None
    if not isinstance(x, Node):
        x, y = y, x
    return call("mul.Tensor", x, y) if isinstance(x, Node) else x * y


def _plus(x: Part, y: Part) -> Part:
    if x is None or y is None:
        return y if x is None else x
    if not isinstance(x, Node):
        x, y = y, x
    return call("add.Tensor", x, y) if isinstance(x, Node) else x + y


def _minus(x: Part, y: Part) -> Part:
    if isinstance(x, Node) and isinstance(y, Node):
        return call("sub.Tensor", x, y)
    return _plus(x, _times(y, -1))


def _mul(node: Aten, x: Any, y: Any) -> Any:
    (a, b), (c, d) = parts(x), parts(y)
    return stacked(node, _minus(_times(a, c), _times(b, d)), _plus(_times(a, d), _times(b, c)))


def _div(node: Aten, x: Any, y: Any) -> Any:
    """By the larger part of the divisor (R. L. Smith, Algorithm 116, 1962), as PyTorch does: no square of it overflows.
    Above and below are divided by that, and what is left of the smaller part is a `ratio`.
    """
    (a, b), (c, d) = parts(x), parts(y)
    if d is None:
        return stacked(node, *(p if p is None else call("div.Tensor", p, c) for p in (a, b)))
    if c is None:
        c = 0.0
    a, b, c, d = (_tensor(p, node) for p in (a, b, c, d))
    turned = call("gt.Tensor", call("abs.default", d), call("abs.default", c))
    large, small, p, q = (call("where.self", turned, *pair) for pair in ((d, c), (c, d), (b, a), (a, b)))
    zero = call("eq.Scalar", large, 0)  # by 0 each part is divided as real numbers are
    ratio = call("where.self", zero, _tensor(0.0, node), call("div.Tensor", small, large))
    below = call("where.self", zero, _tensor(0.0, node), _plus(large, _times(small, ratio)))
    real, imaginary = _plus(p, _times(q, ratio)), _minus(q, _times(p, ratio))
    signed = call("where.self", turned, call("neg.default", imaginary), imaginary)
    return stacked(node, call("div.Tensor", real, below), call("div.Tensor", signed, below))


def _reciprocal(node: Aten, x: Any) -> Any:
    return _div(node, 1.0, x)


def _add(node: Aten, x: Any, y: Any, alpha: Any = 1) -> Any:
    if isinstance(alpha, complex):
        return None
    return stacked(
        node, *(_plus(a, b if alpha == 1 else _times(b, alpha)) for a, b in zip(parts(x), parts(y), strict=True))
    )


def _sub(node: Aten, x: Any, y: Any, alpha: Any = 1) -> Any:
    if isinstance(alpha, complex):
        return None
    return stacked(
        node, *(_minus(a, b if alpha == 1 else _times(b, alpha)) for a, b in zip(parts(x), parts(y), strict=True))
    )


def _neg(node: Aten, x: Any) -> Any:
    return call("neg.default", pairs_of(x))


def _conj(node: Aten, x: Any) -> Any:
    if _real(x) is None:
        return None
    real, imaginary = parts(x)
    return stacked(node, real, call("neg.default", imaginary))


def _complex(node: Aten, x: Any, y: Any) -> Any:
    return stacked(node, x, y)


def _polar(node: Aten, x: Any, angle: Any) -> Any:
    return stacked(node, _times(x, call("cos.default", angle)), _times(x, call("sin.default", angle)))


def _exp(node: Aten, x: Any) -> Any:
    real, imaginary = parts(x)
    return _polar(node, call("exp.default", real), imaginary)


def _as_real(node: Aten, x: Any) -> Any:
    return pairs_of(x)


def _abs(node: Aten, x: Any) -> Any:
    return call("hypot.default", *parts(x))


def _angle(node: Aten, x: Any) -> Any:
    real, imaginary = parts(x)
    return call("atan2.default", imaginary, real)


def _to_copy(node: Aten, x: Any, dtype: Any = None, **others: Any) -> Any:
    if _real(node) is None or any(name != "layout" for name in others):
        return None
    return stacked(node, *parts(x))


def _sum(name: str) -> Callable[..., Any]:
    def summed(node: Aten, x: Any, dims: Any = (), keepdim: bool = False, *, dtype: Any = None) -> Any:
        if _real(x) is None or dtype is not None:
            return None
        rank = x.type.rank
        given = (dims,) if isinstance(dims, int) else dims or ()
        axes = tuple(d % rank for d in given) if given else tuple(range(rank))
        return call(name, pairs_of(x), axes, keepdim) if rank else None

    return summed


def _full(node: Aten, shape: Any, value: Any, **others: Any) -> Any:
    return stacked(node, *parts(value))


def _scalar(node: Aten, value: Any, **others: Any) -> Any:
    return stacked(node, *parts(value))


def _like(value: int) -> Callable[..., Any]:
    return lambda node, x, **others: stacked(node, value, None)


def _tensor(part: Part, node: Aten) -> Any:
    """A part as a tensor, of the type of a complex result's parts where it is a number."""
    return part if isinstance(part, Node) else call("full.default", (), float(part or 0), dtype=_real(node))


def _where(node: Aten, chosen: Any, x: Any, y: Any) -> Any:
    each = zip(parts(x), parts(y), strict=True)
    return stacked(node, *(call("where.self", chosen, *(_tensor(p, node) for p in pair)) for pair in each))


def _power(node: Aten, x: Any, exponent: Any) -> Any:
    return _mul(node, x, x) if exponent == 2 and _real(x) is not None else None


def _product(name: str) -> Callable[..., Any]:
    """A product of matrices of short sums, as many small ones beside each other are."""

    def product(node: Aten, x: Any, y: Any) -> Any:
        if x.type.shape[-1] > SHORT:
            return None

        def times(p: Part, q: Part) -> Part:
            return call(name, p, q) if isinstance(p, Node) and isinstance(q, Node) else None

        (a, b), (c, d) = parts(x), parts(y)
        return stacked(node, _minus(times(a, c), times(b, d)), _plus(times(a, d), times(b, c)))

    return product


COMPUTED: dict[str, Callable[..., Any]] = {
    TO_PAIRS: _as_real,
    "aten.mul.Tensor": _mul,
    "aten.mul.Scalar": _mul,
    "aten.div.Tensor": _div,
    "aten.div.Scalar": _div,
    "aten.reciprocal.default": _reciprocal,
    "aten.add.Tensor": _add,
    "aten.add.Scalar": _add,
    "aten.sub.Tensor": _sub,
    "aten.sub.Scalar": _sub,
    "aten.neg.default": _neg,
    "aten._conj.default": _conj,
    "aten._conj_physical.default": _conj,
    "aten.conj_physical.default": _conj,
    "aten.complex.default": _complex,
    "aten.polar.default": _polar,
    "aten.exp.default": _exp,
    "aten.abs.default": _abs,
    "aten.angle.default": _angle,
    "aten._to_copy.default": _to_copy,
    "aten.sum.default": _sum("sum.dim_IntList"),
    "aten.sum.dim_IntList": _sum("sum.dim_IntList"),
    "aten.mean.default": _sum("mean.dim"),
    "aten.mean.dim": _sum("mean.dim"),
    "aten.full.default": _full,
    "aten.scalar_tensor.default": _scalar,
    "aten.zeros_like.default": _like(0),
    "aten.ones_like.default": _like(1),
    "aten.where.self": _where,
    "aten.pow.Tensor_Scalar": _power,
    "aten.mm.default": _product("mm.default"),
    "aten.bmm.default": _product("bmm.default"),
}
"""What is computed of complex numbers: pairs, or real numbers where that is the result; None where it is to be called
all the same.
"""


def _sized(name: str) -> Callable[..., Any]:
    return lambda node, x, *rest: call(name, pairs_of(x), (*node.result.shape, 2))


def _at(name: str, more: int = 0) -> Callable[..., Any]:
    """Ops of one dimension, the first argument after the tensor."""
    return lambda node, x, dim, *rest: call(name, pairs_of(x), dim % max(x.type.rank + more, 1), *rest)


def _slice(node: Aten, x: Any, dim: int = 0, *rest: Any) -> Any:
    return call("slice.Tensor", pairs_of(x), dim % x.type.rank, *rest)


def _permute(node: Aten, x: Any, dims: Any) -> Any:
    rank = x.type.rank
    return call("permute.default", pairs_of(x), (*(d % rank for d in dims), rank))


def _transpose(node: Aten, x: Any, a: int, b: int) -> Any:
    rank = max(x.type.rank, 1)
    return call("transpose.int", pairs_of(x), a % rank, b % rank)


def _joined(name: str, more: int) -> Callable[..., Any]:
    def joined(node: Aten, xs: Any, dim: int = 0) -> Any:
        if len({x.type.dtype for x in xs}) > 1:
            return None
        return call(name, tuple(map(pairs_of, xs)), dim % (xs[0].type.rank + more))

    return joined


def _placed(name: str) -> Callable[..., Any]:
    """A part of the first tensor is the second."""

    def placed(node: Aten, x: Any, y: Any, dim: int = 0, *rest: Any) -> Any:
        if _real(x) is None or x.type.dtype is not y.type.dtype:
            return None
        return call(name, pairs_of(x), pairs_of(y), dim % x.type.rank, *rest)

    return placed


def _pad(node: Aten, x: Any, pad: Any, value: Any = 0) -> Any:
    return call("constant_pad_nd.default", pairs_of(x), (0, 0, *pad), 0.0) if value == 0 else None


def _copy(node: Aten, x: Any, source: Any, *rest: Any) -> Any:
    return pairs_of(source) if source.type == x.type else None


def _flip(node: Aten, x: Any, dims: Any) -> Any:
    return call("flip.default", pairs_of(x), tuple(d % x.type.rank for d in dims))


def _as_it_is(name: str) -> Callable[..., Any]:
    return lambda node, x, *rest: call(name, pairs_of(x), *rest)


MOVED: dict[str, Callable[..., Any]] = {
    **{f"aten.{n}.default": _sized("view.default") for n in ("view", "_unsafe_view", "squeeze")},
    "aten.reshape.default": _sized("reshape.default"),
    "aten.expand.default": _sized("expand.default"),
    "aten.permute.default": _permute,
    "aten.t.default": lambda node, x: call("permute.default", pairs_of(x), (*range(x.type.rank)[::-1], x.type.rank)),
    "aten.transpose.int": _transpose,
    "aten.unsqueeze.default": _at("unsqueeze.default", 1),
    "aten.squeeze.dim": _sized("reshape.default"),
    "aten.squeeze.dims": _sized("reshape.default"),
    "aten.select.int": _at("select.int"),
    "aten.slice.Tensor": _slice,
    "aten.index_select.default": _at("index_select.default"),
    "aten.cat.default": _joined("cat.default", 0),
    "aten.stack.default": _joined("stack.default", 1),
    "aten.slice_scatter.default": _placed("slice_scatter.default"),
    "aten.select_scatter.default": _placed("select_scatter.default"),
    "aten.constant_pad_nd.default": _pad,
    "aten.flip.default": _flip,
    "aten.copy.default": _copy,
    "aten.index.Tensor": _as_it_is("index.Tensor"),
    "aten.clone.default": lambda node, x, **how: call("clone.default", pairs_of(x)),
    "aten.alias.default": _as_it_is("alias.default"),
}
"""What moves elements, as what moves pairs."""
