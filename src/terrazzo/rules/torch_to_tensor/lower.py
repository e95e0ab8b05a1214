"""The pass from Torch IR to Tensor IR: every ATen op by its rule, or as an opaque call, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import dedent
from types import MappingProxyType
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import Type
from terrazzo.rewrite.engine import rewrite
from terrazzo.rewrite.rule import Event, Log, Rule, rule
from terrazzo.rules.torch_to_tensor.in_tf32 import in_tf32
from terrazzo.rules.torch_to_tensor.library import Libraries, is_called
from terrazzo.rules.torch_to_tensor.placed import Strides, laid_out, placed, typed


@rule(keys=(Aten,))
def opaque(node: Any) -> Any:
    """An op no rule lowers stays what it is: a call of PyTorch.

    @torch
    def f(x: f32[3, 3]):
        z: f32[3, 3] = aten.matrix_exp.default(x)
        return (z,)
    =>
    @tensor
    def f(x: f32[3, 3]):
        z: f32[3, 3] = opaque('aten.matrix_exp.default', x)
        return (z,)
    """
    call = t.Opaque(node.name, node.args, node.kwargs, node.result, node.order)
    if isinstance(node.result, tuple):
        return tuple(None if r is None else t.Get(call, k) for k, r in enumerate(node.result))
    return call


def lower(
    program: Program,
    rules: tuple[Rule, ...],
    log: Log,
    show: Callable[[Any], str] | None = None,
    libraries: Libraries | None = None,
    rough: Callable[[Any], Sequence[bool]] | None = None,
    strides: Sequence[Strides] = (),
    ordered: Mapping[int, Sequence[Strides]] = MappingProxyType({}),
) -> Program:
    """`program` in Tensor IR. Values keep the names and source lines of their ops. `show` adds texts to the events.
    Ops that `libraries` are better at are called. Of results that are `rough`, products have the digits of TF32.
    Results lie in memory with these `strides`, where they have any, and what calls with an order are given with those
    of `ordered`.
    """
    wanted = {r: s for r, s in zip(program.results, strides, strict=False) if s}
    memo: dict[Node, Any] = {}
    done: dict[Node, str] = {}
    called = libraries.chosen(program, log) if libraries else set()
    given = {c for n in called for c in n.children} | set(program.results) if called else set()
    roots = [n for n in topological(program.results) if isinstance(n, Aten)]
    grown = _Grown()
    for node in roots:
        name = program.names.get(node, "")
        if libraries and node in called:
            if not is_called(node):
                log.add(_opaque_event(program, node, rules))
            lowered = node.with_children([memo[c] if c in memo else _got(c, memo) for c in node.children])
            memo[node] = libraries.call(node, lowered)
            _place(node, memo, wanted)
            new = memo[node] if isinstance(memo[node], tuple) else (memo[node],)
            log.applied("torch_to_tensor", opaque.name, name, [lowered], new)
            done.update({v: f"{name}.{k}" if k else name for k, v in enumerate(new) if v is not None and v not in done})
            continue
        text = _texts(show, name, done) if show else None
        short = grown.of(node)
        names = {**program.names, short: name} if short is not node else program.names
        found = rewrite([short], rules, log=log, pass_name="torch_to_tensor", names=names, memo=memo, show=text)[0]
        if rough and any(few := rough(node)):
            found = in_tf32(found, few, [memo[c] if c in memo else _got(c, memo) for c in node.children])
        memo[node] = found
        if isinstance(found, Aten):
            log.add(_opaque_event(program, node, rules))
            found = found if node.order not in ordered else laid_out(found, ordered[node.order])
            memo[node] = libraries.call(node, found) if libraries else opaque.rewrite(typed(found, node, wanted), None)
            log.applied(
                "torch_to_tensor",
                opaque.name,
                name,
                [found],
                memo[node] if isinstance(memo[node], tuple) else [memo[node]],
            )
        if libraries and node in given and isinstance(node.type, Type):
            memo[node] = libraries.placed(node, memo[node])
        _place(node, memo, wanted)
        new = memo[node] if isinstance(memo[node], tuple) else (memo[node],)
        done.update({v: f"{name}.{k}" if k else name for k, v in enumerate(new) if v is not None and v not in done})
    results = rewrite(program.results, rules, log=log, pass_name="torch_to_tensor", memo=memo)
    if wanted:  # of one value that is two results, one may lie row by row
        pairs = zip(program.results, results, strict=True)
        results = [x.x if isinstance(x, t.LaidOut) and r not in wanted else x for r, x in pairs]
    names, sources = _names(program, memo)
    return Program("tensor", program.name, program.inputs, tuple(results), names, sources)


def _place(node: Aten, memo: dict[Node, Any], wanted: Mapping[Node, Strides]) -> None:
    """Have what an op gives lie in memory as it is to, for whoever reads it."""
    if isinstance(node.result, Type):
        memo[node] = placed(memo[node], wanted.get(node))
        return
    memo[node] = tuple(v and placed(v, wanted.get(Get(node, k))) for k, v in enumerate(memo[node]))


class _Grown:
    """Concatenations that begin as earlier ones do, as in nets whose layers read all before them: what is joined
    already is one piece, so that a net of n layers joins n pieces and not n * n / 2.
    """

    def __init__(self) -> None:
        self.known: dict[Any, dict[Any, Any]] = {}  # by dimension: what follows a beginning, by piece; None: its node

    def of(self, node: Aten) -> Aten:
        """The same concatenation, of fewer pieces where these are known."""
        if node.name != "aten.cat.default" or not isinstance(node.result, Type) or node.kwargs:
            return node
        pieces, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        here = self.known.setdefault((dim % max(node.result.rank, 1), node.result.dtype), {})
        longest, count = None, 0
        for n, piece in enumerate(pieces):
            here = here.setdefault(piece, {})
            if None in here and 0 < n < len(pieces) - 1:
                longest, count = here[None], n + 1
        here.setdefault(None, node)
        rest = (longest, *pieces[count:])
        return node if longest is None else Aten(node.name, (rest, *node.args[1:]), (), node.result, node.order)


def _opaque_event(program: Program, node: Aten, rules: tuple[Rule, ...]) -> Event:
    """That PyTorch runs an op since no rule lowered it."""
    where = program.sources.get(program.names.get(node, ""), "")
    tried = any(node.name in r.keys for r in rules)
    reason = "no rule lowers it" if not tried else "its rule declined"
    return Event("torch_to_tensor", "opaque", f"{node.name} {where}".strip(), True, reason)


def _got(node: Node, memo: dict[Node, Any]) -> Any:
    """What an input, or one result of a lowered op of several, became."""
    return memo[node.x][node.index] if isinstance(node, Get) else node


def _texts(show: Callable[[Any], str], name: str, done: Mapping[Node, str]) -> Callable[[Any], str]:
    """Shows what stands for the op `name` before or after a rule, with what was lowered earlier as inputs of that
    name.
    """

    def text(x: Any) -> str:
        results = [r for r in (x if isinstance(x, tuple) else (x,)) if r is not None]
        given = [n for n in topological(results, stop=done.__contains__) if n in done]
        inputs: dict[Any, Any] = {n: Input(done[n], n.type) for n in given}  # type: ignore[attr-defined]
        shown = tuple(substitute(r, inputs) for r in results)
        leaves = tuple(n for n in topological(shown) if isinstance(n, Input))
        names = {r: f"{name}.{k}" if k else name for k, r in enumerate(shown) if r not in leaves}
        lines = show(
            Program("torch" if isinstance(shown[0], Aten) else "tensor", "op", leaves, shown, names)
        ).splitlines()
        return dedent("\n".join(lines[2:-1]))  # without the head and the return

    return text


def _names(program: Program, memo: dict[Node, Any]) -> tuple[dict[Node, str], dict[str, str]]:
    """Values are called after the op they came from; the values inside a composition get its name and a number."""
    names: dict[Node, str] = {i: i.name for i in program.inputs}
    sources: dict[str, str] = {}
    taken = set(names.values()) | set(program.names.values())
    for node in topological(program.results):
        base = program.names.get(node, "")
        new = memo.get(node)
        if not base or isinstance(node, Input):
            continue
        for k, top in enumerate(new if isinstance(new, tuple) else (new,)):
            if not isinstance(top, t.Value):
                continue
            inner = [
                n for n in topological([top], stop=names.__contains__) if isinstance(n, t.Value) and n not in names
            ]
            count = 0
            for n in inner:
                label = base if n is top and k == 0 else ""
                while not label or (label in taken and label != base):
                    count += 1
                    label = f"{base}_{count}"
                names[n] = label
                taken.add(label)
                if base in program.sources:
                    sources[label] = program.sources[base]
    return names, sources
