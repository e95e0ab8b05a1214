"""Where an op of PyTorch is called although a rule lowers it: its library is faster than our kernels, by the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.hw import library
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node, topological
from terrazzo.ir.operators import pointwise, tried
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import DType, Type, dense, ordered_strides
from terrazzo.rewrite.rule import Choice, Event, Log
from terrazzo.rules.torch_to_tensor.added import ADDS, Given, Way, stored_narrow, ways
from terrazzo.rules.torch_to_tensor.families import (
    ATTENTION,
    BACKWARD,
    FAMILIES,
    ON_A_PROCESSOR,
    PRODUCTS,
    channels_at_end,
    convolved,
    family_of,
    first_result,
    inverts,
    is_convolution,
    kind_of,
    read_by,
    results_of,
)
from terrazzo.rules.torch_to_tensor.placed import moved
from terrazzo.rules.torch_to_tensor.scatter import PUTS, SCATTER_ADD, WRITES
from terrazzo.rules.torch_to_tensor.sums import is_zero

PASS = "torch_to_tensor"
LIBRARY, OURS = "the library", "ours"


@dataclass
class Libraries:
    """What decides: the machine, and what our kernels for an op by itself take on it, in nanoseconds (infinitely long
    where there are none), or " at most" so long, if that is less than what is enough. Of an op in float32 is asked
    whether libraries compute it in `tf32`, and of some sums is known in which type they are `stored`. On a processor,
    which is no `gpu`, nothing is priced: of a program that is called which `on_a_processor` gives.
    """

    gpu: Gpu | None
    ours: Callable[[Aten, float], tuple[float, str]]
    tf32: Callable[[Aten], bool] = lambda op: False
    on_a_processor: Callable[[Program, Callable[[Node], Type]], list[Aten]] = lambda program, laid_out: []
    layouts: dict[Node, Any] = field(default_factory=dict)
    stored: dict[Node, DType] = field(default_factory=dict)

    def chosen(self, program: Program, log: Log) -> set[Node]:
        """The ops of a program of Torch IR that are called; why, and why others are not, is in the log."""
        if self.gpu is None:
            theirs = self.on_a_processor(program, self.laid_out)
            for node in theirs:
                why = f"{node.name}: {LIBRARY}'s is faster on a processor"
                log.add(Event(PASS, "library", program.names.get(node, node.name), True, why))
            return {*theirs}
        nodes = [n for n in topological(program.results) if isinstance(n, Aten)]
        self.stored = stored_narrow(nodes, program.results)
        read = {c.x if isinstance(c, Get) else c for n in nodes for c in n.children}
        found: set[Node] = set()
        for node in nodes:
            if node.args and inverts(node, node.args[0]) and node.args[0].x in found:
                continue
            if (choice := self._choice(node, node in read, self.gpu)) is None:
                continue
            ours, their = choice.cost[OURS], choice.cost[LIBRARY]
            better = slower(ours, their)
            mine = f"{OURS} {ours / 1e3:.1f} us {choice.options[OURS]}"
            told = f"{choice.subject}: {mine}, {LIBRARY}'s {their / 1e3:.1f} us"
            log.add(Event(PASS, "library", program.names.get(node, node.name), better, told))
            if better:
                found.add(node)
        return found

    def _choice(self, node: Aten, read: bool, gpu: Gpu) -> Choice | None:
        """The op as the library has it and as our kernels have it; None where there is nothing to choose."""
        if not is_priced(node) or (not _asked_always(node) and any(map(_widened, node.children))):
            return None
        given, alone = self._alone(node)
        theirs = price(alone, gpu, self.tf32(node))
        if node.name == SCATTER_ADD and (other := self._other_way(node, alone, gpu)) is not None:
            theirs = _price_of(other, gpu)
        if read:  # what follows cannot be part of the op: it is a kernel that reads the result again
            size = math.prod(first_result(node).static_shape) * first_result(node).dtype.size
            theirs += gpu.launch + 2 * size / gpu.memory
        ours, exact = beside(alone, gpu)
        told = "" if exact else " at least"
        if not exact and not slower(ours, theirs):
            ours, told = self.ours(_channels_last(node, given) if gpu.warpgroups else alone, library.MARGIN * theirs)
        if math.isinf(ours):
            return None
        options = {OURS: f"by the model{told}", LIBRARY: node.name}
        return Choice(node.name, options, {OURS: ours, LIBRARY: theirs})

    def _alone(self, node: Aten) -> tuple[dict[Node, Input], Aten]:
        """An op of inputs that lie as what it is given does: these, and the op."""
        given = {x: Input(f"x{k}", self.laid_out(x)) for k, x in enumerate(dict.fromkeys(node.children))}
        return given, node.with_children([given[x] for x in node.children])

    def _other_way(self, node: Aten, op: Aten, gpu: Gpu) -> Way | None:
        """The cheapest other call for an op, which is `op` of other arguments; None where it is called itself. One that
        sorts is to take half as long as any that is one launch.
        """
        if node.name not in ADDS:
            return None
        alike: list[int] = []
        if node.name == SCATTER_ADD:
            index = self.laid_out(node.args[2])
            steps = zip(index.shape, index.element_strides, strict=True)
            alike = [d for d, (n, step) in enumerate(steps) if n == 1 or not step]
        given = Given(alike, is_zero(node.args[0]), self.stored.get(node))
        known: list[tuple[float, Way | None]] = [
            (price(self._alone(node)[1], gpu) * (SORTING if node.name in PUTS else 1.0), None)
        ]
        known += [(_price_of(x, gpu) * (SORTING if x.sorts else 1.0), x) for x in ways(op, given)]
        return min(known, key=lambda x: x[0])[1]

    def laid_out(self, node: Node) -> Type:
        """The type of a value with the strides it has in eager mode."""
        return eager_type(node, self.layouts)

    def call(self, node: Aten, lowered: Aten) -> Any:
        """The call of an op, or its results where there are several. They, and arguments that are computed, lie as in
        eager mode.
        """
        if self.gpu and (other := self._other_way(node, lowered, self.gpu)) is not None:
            return other.value
        exactly = not takes_any_strides(node.name)
        placed = [self.placed(x, new, exactly) for x, new in zip(node.children, lowered.children, strict=True)]
        new = lowered.with_children(placed)
        if isinstance(node.result, Type):
            return t.Opaque(new.name, new.args, new.kwargs, dense(self.laid_out(node)), new.order)
        each = [r if r is None else dense(self.laid_out(Get(node, k))) for k, r in enumerate(node.result)]
        call = t.Opaque(new.name, new.args, new.kwargs, tuple(each), new.order)
        return tuple(None if r is None else t.Get(call, k) for k, r in enumerate(each))

    def placed(self, node: Node, lowered: Any, exactly: bool = False) -> Any:
        """A value in the memory it has in eager mode, where that has no gaps and is not row by row; or, `exactly`, row
        by row, too.
        """
        wanted = dense(self.laid_out(node))
        same = lowered.type.strides == wanted.strides or (wanted.strides is None and not exactly)
        if same or isinstance(node, Input):
            return lowered
        return moved(lowered, wanted.element_strides)  # type: ignore[arg-type]


def eager_type(node: Node, layouts: dict[Node, Any]) -> Type:
    """The type of a value with the strides it has in eager mode: what PyTorch itself says without running it. What it
    said before is in `layouts`.
    """
    for x in topological([node], stop=layouts.__contains__):
        if x in layouts:
            continue
        if isinstance(x, Aten) and row_by_row(x, [layouts[y] for y in x.children]):
            layouts[x] = x.type
        elif isinstance(x, Aten):
            layouts[x] = tried(x.name, x.args, x.kwargs, layouts.__getitem__)
        elif isinstance(x, Get):
            several = layouts[x.x]
            layouts[x] = several[x.index] if isinstance(several, tuple) else None
        else:
            layouts[x] = x.type  # type: ignore[attr-defined]
    found, own = layouts[node], node.type  # type: ignore[attr-defined]
    if not isinstance(found, Type) or (found.dtype, found.shape) != (own.dtype, own.shape):
        return own  # type: ignore[no-any-return]
    return found


def _channels_last(op: Aten, given: Mapping[Node, Input]) -> Aten:
    """A convolution of such inputs, or a gradient of one, as our kernels find its images, where these are computed in
    16 bits: with channels last, whatever eager mode gives it. Other ops as they are.
    """
    images = () if not is_convolution(op) else op.args[: 2 if op.name == BACKWARD else 1]
    found = dict(given)
    for x in images:
        kind = given[x].type
        if isinstance(x, Aten | Get) and kind.rank > 2 and kind.dtype.is_float and kind.dtype.size == 2:
            order = (0, *range(2, kind.rank), 1)
            found[x] = Input(given[x].name, Type(kind.dtype, kind.shape, ordered_strides(kind.static_shape, order)))
    return op.with_children([found[x] for x in op.children])  # type: ignore[no-any-return]


SORTING = 2.0
"""A call that sorts takes so much more of an op than its price says: a host launches some ten kernels for it."""


def slower(ours: float, theirs: float) -> bool:
    """Whether our kernels take so much longer than a library that this is called."""
    return ours >= library.MARGIN * theirs


def beside(op: Aten, gpu: Gpu) -> tuple[float, bool]:
    """The least that our kernels for tensors one beside the other take by the model, in nanoseconds, and whether they
    take just that: what lowering them would find, in a thousandth of the time. A net whose layers read the results of
    all before them has as many of these ops as layers, with hundreds of tensors each. Of other ops nothing is known.
    """
    family, _ = FAMILIES.get(op.name, ("", None))
    count = len(set(op.children))
    types = [x.type for x in op.children]  # type: ignore[attr-defined]
    result = first_result(op)
    if family != "cat" or not 1 < count == len(types) or not _plainly_beside(types, result):
        return 0.0, False
    points, size = math.prod(result.static_shape), result.dtype.size
    # A kernel is one text for all points: each looks into every tensor.
    busy = max(2 * points * size / gpu.memory, count * points * size / gpu.cache)
    return busy + (gpu.launch if count < SEVERAL else 2 * gpu.launch), count <= ONE


def _plainly_beside(types: Sequence[Type], result: Any) -> bool:
    """Whether tensors have one type, elements, and no strides of their own."""
    same = all(x.dtype is result.dtype and x.strides is None and 0 not in x.shape for x in types)
    return same and result.strides is None and result.dtype.kind != "complex"


ONE, SEVERAL = 64, 96
"""Up to how many tensors one beside the other are stored by one kernel, and from how many on by several: their terms
are larger than what fusion makes (`fused.LARGEST`).
"""


def row_by_row(op: Aten, given: Sequence[Any]) -> bool:
    """Whether the result of an op on what is given lies row by row, as far as that is plain: asking PyTorch takes a
    millisecond.
    """
    name = op.name.split(".")[1]
    if not isinstance(op.result, Type) or "memory_format" in dict(op.kwargs):
        return False
    if name in PRODUCTS:
        return True
    return all(isinstance(x, Type) and x.strides is None for x in given) and (name in KEEP or pointwise(op.name))


KEEP = ("_to_copy", "view", "_unsafe_view", "mean", "sum", "amax", "cat", "stack")
"""Ops whose results lie row by row where all that they are given does so, beside those that go point by point."""


def _asked_always(op: Aten) -> bool:
    """Whether an op is a convolution in 16 bits, or a gradient of one, or writes, or lays tensors one beside the other,
    whatever its inputs were made of.
    """
    family, _ = FAMILIES[op.name]
    return family in (*WRITES, "cat") or (is_convolution(op) and first_result(op).dtype.size == 2)


def _widened(node: Node) -> bool:
    """Whether a value is a converted one of 16 bits, scaled or moved perhaps: a product of such runs on tensor cores,
    or is part of attention, and is ours.
    """
    while isinstance(node, Aten) and node.children and node.name.split(".")[1] in MOVES:
        (first, *_), after = node.children, node
        node = first
        kinds = [getattr(x, "type", None) for x in (node, after)]
        if after.name == "aten._to_copy.default" and isinstance(kinds[0], Type) and kinds[0].dtype.size == 2:
            return True
    return False


MOVES = (
    "_to_copy", "view", "_unsafe_view", "expand", "transpose", "permute", "t", "clone", "mul", "unsqueeze", "squeeze",
    "slice", "select", "alias",
)  # fmt: skip
"""Ops whose values are those of their first argument, or that times something."""


def is_called(op: Any) -> bool:
    """Whether an op of PyTorch (of Torch IR, or a call in Loop IR) is one that a library is, or may be, chosen for."""
    return chosen(op.name, kind_of(op))


def takes_any_strides(name: str) -> bool:
    """Whether an op may be given its arguments as they lie in memory, whatever eager mode would give it. Attention
    takes heads whose elements are beside each other, and does not ask.
    """
    if name.startswith(ATTENTION):
        return False
    return name in FAMILIES or name.split(".")[1].removesuffix("_backward") in OF_IMAGES


OF_IMAGES = frozenset(
    ("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool2d",
     "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "reflection_pad2d", "replication_pad2d",
     "grid_sampler_2d", "grid_sampler_3d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")
)  # fmt: skip
"""Ops whose results are the same numbers wherever the channels of an image lie. To copy an image that has them last
took four times as long as the gradient of its pooling.
"""


def chosen(name: str, dtype: str) -> bool:
    """Whether a call of this op on tensors of this type is one that a library was chosen for."""
    if name not in FAMILIES:
        return False
    family, _ = FAMILIES[name]
    return library.reach(family, dtype) is not None or (family, dtype) in ON_A_PROCESSOR


def is_priced(op: Any) -> bool:
    """Whether it is known what the library takes for an op on a GPU."""
    return op.name in FAMILIES and library.reach(FAMILIES[op.name][0], kind_of(op)) is not None


def price(op: Any, gpu: Gpu, tf32: bool = False) -> float:
    """What the library takes for an op (of Torch IR, or a call in Loop IR), in nanoseconds, in TF32 or not."""
    family, operations = family_of(op)
    moved = sum(_bytes(x) for x in (*(y.type for y in read_by(op)), *results_of(op)))
    made, times = (op.args[0].type, sum(op.args[-1][:2])) if op.name == BACKWARD else (first_result(op), 1)

    def taken(name: str) -> float:
        """What it takes by the record of this name; infinitely long where there is none."""
        if (found := library.reach(name, kind_of(op), tf32)) is None:
            return math.inf
        needed = times * operations(convolved(op), made, found.tile)  # a gradient takes as many as the result does
        return library.price(found, gpu, needed, moved)

    if family != "convolution":
        return taken(family)
    turned, added = _around(op, gpu, tf32)
    kind = "gradient" if op.name == BACKWARD else "transposed" if convolved(op)[6] else "forward"
    if convolved(op)[1].type.rank < 5:
        return min(taken(family) + turned, taken(f"{kind} in rows")) + added
    if (whole := taken(f"{kind} in 3d")) < math.inf:  # images are turned in what was measured, too
        return whole + added
    return taken("convolution in 3d" if taken("convolution in 3d") < math.inf else family) + turned + added


def _price_of(way: Way, gpu: Gpu) -> float:
    """What another call takes, with the kernels around it."""
    return price(way.call, gpu) + way.launches * gpu.launch + way.moved / gpu.memory


def _bytes(kind: Type) -> int:
    return math.prod(kind.static_shape) * kind.dtype.size


def _around(op: Any, gpu: Gpu, tf32: bool) -> tuple[float, float]:
    """What other kernels take around that of a convolution: those that bring channels to the end and back for tensor
    cores, where they come first and it is more than a product of pixels; and one that adds the bias.
    """
    x, w, bias, stride, padding, _, transposed, _, groups = convolved(op)
    dtype, back = kind_of(op), op.name == BACKWARD
    last = channels_at_end(x.type)
    plain = math.prod(w.type.static_shape[2:]) == math.prod(stride) == groups == 1 and not any(padding)
    around = added = 0.0
    if (turned := library.reach("image turned", dtype, tf32)) and not last and (back or transposed or not plain):
        images = [y for y in (*(z.type for z in read_by(op)), *results_of(op)) if y.shape != w.type.shape]
        around = library.price(turned, gpu, 0.0, 2 * sum(map(_bytes, images)))
    if bias is not None and not back and (known := library.reach("bias", dtype)):
        added = library.price(known, gpu, 0.0, 2 * _bytes(first_result(op)))
    return around, added
