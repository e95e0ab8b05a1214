"""Wrong rules, planted one at a time: what each is, a program in which it fires, and what a checker must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from terrazzo import pipelines
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Bound, Expr
from terrazzo.ir.node import Node, transform
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.loop.fusion import fuse
from terrazzo.rules.loop.layout import layout
from terrazzo.rules.loop.precision import relax
from terrazzo.rules.loop_to_tile.reductions import pieces
from terrazzo.rules.loop_to_tile.walked import crossed
from terrazzo.rules.tensor_to_loop import lift
from terrazzo.rules.tile_to_kernel import lower
from terrazzo.rules.torch_to_tensor import pointwise, reduction, view
from terrazzo.targets.cpu import emit

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    """A wrong rule: how it is planted, where it shows, and the rule, its subject and the kernel that a checker must
    name.
    """

    plant: Callable[[Patch], None]
    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    rule: str
    subject: str
    kernel: str
    target: str = "interpreter"


def result_of(rule: Rule, wrong: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Plants a rule whose result is `wrong` of what it was."""

    def plant(patch: Patch) -> None:
        right = rule.rewrite
        patch.setitem(rule.__dict__, "rewrite", lambda node, ctx: wrong(right(node, ctx)))

    return plant


def function(module: Any, name: str, wrong: Callable[..., Any]) -> Callable[[Patch], None]:
    """Plants a function of a module, `wrong(right, *arguments)` in its place."""

    def plant(patch: Patch) -> None:
        right = getattr(module, name)
        patch.setattr(module, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    return plant


def swapped(root: Any, fn: str) -> Any:
    """The operands of a scalar function, the other way round."""

    def visit(node: Node) -> Any:
        if isinstance(node, t.Elementwise | l.Apply) and node.fn.name == fn:
            return type(node)(node.fn, node.args[::-1])
        return node

    return transform(root, visit)


def summed_as_it_is(root: Any) -> Any:
    """The sum without the cast before it, and with one after."""

    def visit(node: Node) -> Any:
        if isinstance(node, t.Reduce) and isinstance(x := node.args[0], t.Elementwise) and is_cast(x.fn):
            return t.cast(t.Reduce(node.monoid, x.args, node.axes), x.type.dtype)
        return node

    return transform(root, visit)


def mask_moved(root: Any) -> Any:
    """Every mask one tighter."""

    def visit(node: Node) -> Any:
        return (
            t.IndexMap(node.x, node.shape, node.index, tuple(e - 1 for e in node.inside))
            if isinstance(node, t.IndexMap)
            else node
        )

    return transform(root, visit)


def load_turned(root: Any) -> Any:
    """Loads of square matrices, the other way round."""

    def visit(node: Node) -> Any:
        turned = isinstance(node, l.Load) and len(node.index) == 2 and len(set(node.buffer.type.shape)) == 1
        return l.Load(node.buffer, node.index[::-1], node.inside) if turned else node

    return transform(root, visit)


def inlined_where_it_is_added(right: Any, consumer: l.Kernel, producer: l.Kernel) -> Any:
    new = right(consumer, producer)
    return load_turned(new) if consumer.name == "add" and producer.name == "exp" else new


def read_turned(right: Any, index: Any, group: Any, shape: Any) -> Any:
    """Dimensions merged the other way round where they are read in a reduction, and as they should be where they are
    written.
    """
    read = any(isinstance(v, Bound) for e in index if isinstance(e, Expr) for v in e.free)
    return right(index, group[::-1] if read else group, shape)


def merged_twice(right: Any, first: Any, second: Any, dead: Any = frozenset()) -> Any:
    new = right(first, second, dead)
    if new is None:
        return None
    twice = [
        l.Store(s.buffer, s.index, l.apply("add", s.value, s.value)) if s.buffer in first.writes else s
        for s in new.stores
    ]
    return l.Kernel(new.name, new.axes, tuple(twice), new.source)


def one_digit_twice(right: Any, kernel: l.Kernel) -> Any:
    new = right(kernel)
    return new if new is kernel else load_turned(new)


def finished_negative(right: Any, *args: Any) -> Any:
    first, second = right(*args)
    stores = tuple(l.Store(s.buffer, s.index, l.apply("neg", s.value)) for s in second.stores)
    return first, l.Kernel(second.name, second.axes, stores, second.source)


def last_left_out(right: Any, *given: Any) -> k.Kernel:
    """Conditions that leave the last element of a tail out."""
    new: k.Kernel = right(*given)

    def visit(node: Node) -> Any:
        return (
            k.If(tuple(e - 1 if isinstance(e, Expr) else e for e in node.inside), node.body)
            if isinstance(node, k.If)
            else node
        )

    fields = dict(zip(new._fields, new.values, strict=True))
    return k.Kernel(**{**fields, "body": tuple(transform(s, visit) for s in new.body)})


def unrecorded(right: Any, program: l.Program, log: Any) -> l.Program:
    """A pass that swaps the operands of differences and says nothing."""
    steps = tuple(swapped(s, "sub") if isinstance(s, l.Kernel) else s for s in right(program, log).steps)
    return l.Program(program.name, program.inputs, steps, program.results)


def minus_for_plus(right: Any, kernel: Any) -> Any:
    entry, source = right(kernel)
    return entry, source.replace("(in1 + in2)", "(in1 - in2)")


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def odd(*shape: int) -> torch.Tensor:
    """Odd whole numbers of 24 bits. The sum of an odd number of them is odd and wider than that: exact in float64 and
    wrong in float32, in whatever order it is formed.
    """
    return 2.0**24 - torch.randint(1 << 20, shape) * 2.0 - 1


def sub_and_norm(x: Any, y: Any) -> Any:
    z = torch.tanh(x) - y
    return torch.softmax(z, -1) * 2


def heads(x: Any, w: Any) -> Any:
    """Rows that are transposed and then read as one dimension, as after attention."""
    return torch.bmm(x, x).transpose(0, 1).reshape(x.shape[1], -1) @ w


PLANTS: dict[str, Plant] = {
    "operands swapped": Plant(
        result_of(pointwise.sub, lambda x: swapped(x, "sub")), sub_and_norm, lambda: (r(5, 7), r(5, 7)),
        "torch_to_tensor:sub", "sub", "mul",
    ),
    "a cast dropped": Plant(
        result_of(reduction.sum_, summed_as_it_is), lambda x: x.neg().sum(-1, dtype=torch.float64),
        lambda: (odd(4, 901),), "torch_to_tensor:sum_", "sum_1", "sum_1",
    ),
    "a permutation inverted": Plant(
        result_of(view.permute, lambda x: t.permute(x, (2, 0, 1))), lambda x: x.permute(2, 0, 1) + x,
        lambda: (r(6, 6, 6),), "torch_to_tensor:permute", "permute", "add",
    ),
    "a mask off by one": Plant(
        result_of(view.constant_pad, mask_moved), lambda x: F.pad(x, (2, 1)) * 2, lambda: (r(3, 5),),
        "torch_to_tensor:constant_pad", "constant_pad_nd", "mul",
    ),
    "a reduction over the wrong axis": Plant(
        result_of(lift.reduce, load_turned), lambda x: x.amax(0) - 1, lambda: (r(6, 6),),
        "tensor_to_loop:reduce", "amax", "sub",
    ),
    "inlined with axes swapped": Plant(
        function(fuse, "inline", inlined_where_it_is_added), lambda x: torch.exp(x.sin() * 2) + x, lambda: (r(8, 8),),
        "fuse:inline", "exp into add", "add",
    ),
    "merged and doubled": Plant(
        function(fuse, "merged", merged_twice), lambda x, y: (x + y, (x + y).amax(-1)), lambda: (r(64, 64), r(64, 64)),
        "fuse:merge", "add with amax", "amax",
    ),
    "dimensions merged the wrong way": Plant(
        function(layout, "_merge", read_turned), heads, lambda: (r(16, 16, 16), r(256, 64)),
        "store_as_read:merge_dimensions", "bmm", "mm",
    ),
    "a quotient upside down": Plant(
        function(relax, "_rounded", lambda right, node: swapped(right(node), "approx_div")),
        lambda x, y: (x / y).bfloat16(), lambda: (r(40), r(40) + 9),
        "relax:approximate", "_to_copy", "_to_copy", "sm_80",
    ),
    "a pass that says nothing": Plant(
        function(pipelines, "relax", unrecorded), lambda x, y: x.sin() - y, lambda: (r(40), r(40)),
        "relax:relax", "sub", "sub",
    ),
    "axes collapsed in the wrong order": Plant(
        function(crossed, "collapse", one_digit_twice), lambda x, y: x.t() + y, lambda: (r(9, 9), r(9, 9)),
        "schedule:collapse", "add", "add", "sm_80",
    ),
    "a split that finishes wrong": Plant(
        function(pieces, "split", finished_negative), lambda x: x.sum(), lambda: (r(300, 1000),),
        "schedule:split", "sum_1", "sum_1", "sm_80",
    ),
    "a tail cut short": Plant(
        function(lower, "lower", last_left_out), lambda x: torch.tanh(x) * 2 - 1, lambda: (r(7, 11, 13),),
        "derive:derive", "sub", "sub", "sm_80",
    ),
    "a sum emitted as a difference": Plant(
        function(emit, "emit", minus_for_plus), lambda x, y: x + y, lambda: (r(9), r(9)),
        "emit:emit", "add", "add", "cpu",
    ),
}  # fmt: skip
