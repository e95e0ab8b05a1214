"""What a program says of what is loaded: the term that was stored there."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from itertools import count
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import Node, rebuilt, topological
from terrazzo.rules.loop.fusion.inline import element


class Definitions:
    """The one store of every temporary that a kernel stores alone, and who reads what."""

    def __init__(self, program: l.Program) -> None:
        kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
        stores = [s for s in kernels if len(s.stores) == 1]
        self.makers: dict[l.Buffer, l.Kernel] = {s.stores[0].buffer: s for s in stores}
        self.readers: dict[l.Buffer, list[l.Kernel]] = {}
        for s in kernels:
            for b in s.reads:
                self.readers.setdefault(b, []).append(s)
        called = {b for s in program.steps if isinstance(s, l.Call) for b in s.reads}
        self.kept = {*program.inputs, *program.results, *called}

    def of(self, x: Any) -> Any:
        """The term behind a load; None where there is no other."""
        maker = self.makers.get(x.buffer) if isinstance(x, l.Load) else None
        return None if maker is None else element(maker.stores[0], x.index, x.inside)

    def unfold(self, x: Any) -> Any:
        """A term that is not loaded, where that can be said."""
        while (term := self.of(x)) is not None:
            x = term
        return x

    def core(self, x: Any) -> Any:
        """The same, without conversions."""
        while True:
            x = self.unfold(x)
            if not (isinstance(x, l.Apply) and is_cast(x.fn)):
                return x
            (x,) = x.args

    def factors(self, x: Any) -> list[Any]:
        """What a term is the product of: terms that are no products."""
        term = self.unfold(x)
        if isinstance(term, l.Apply) and term.fn.name == "mul":
            return [f for arg in term.args for f in self.factors(arg)]
        return [x]


class Steps(dict[int, Any]):
    """The steps of a program by their places, while others take these or they go; who reads what is known all along."""

    def __init__(self, steps: Iterable[l.Kernel | l.Call]) -> None:
        super().__init__()
        self.readers: dict[l.Buffer, set[int]] = {}
        for n, step in enumerate(steps):
            self[n] = step

    def __setitem__(self, n: int, step: l.Kernel | l.Call) -> None:
        if n in self:
            del self[n]
        super().__setitem__(n, step)
        for b in step.reads:
            self.readers.setdefault(b, set()).add(n)

    def __delitem__(self, n: int) -> None:
        for b in self[n].reads:
            self.readers[b].discard(n)
        super().__delitem__(n)

    def reading(self, step: l.Kernel | l.Call) -> list[int]:
        """Where the steps are that read what one stores."""
        return sorted({n for b in step.writes for n in self.readers.get(b, ())})

    def in_order(self) -> tuple[Any, ...]:
        """Those that are left, as they come."""
        return tuple(self[n] for n in sorted(self))


def unused(name: str, names: Container[str]) -> str:
    """`name`, or the first of name_2, name_3 ... that is not among `names`."""
    return next(x for k in count(1) if (x := f"{name}_{k}" if k > 1 else name) not in names)


def computed_by(fn: str, kernel: l.Kernel, terms: Collection[Node]) -> l.Kernel:
    """A kernel some of whose terms are computed by another scalar function, of the same arguments."""
    if not terms:
        return kernel
    memo: dict[Node, Any] = {}
    for x in topological([kernel]):
        new: Any = rebuilt(x, memo)
        memo[x] = l.apply(fn, *new.args) if x in terms else new
    return memo[kernel]  # type: ignore[no-any-return]


def in_order(program: l.Program, steps: Iterable[l.Kernel | l.Call]) -> l.Program:
    """A program of `steps`, each after what it reads; calls that must keep their order do. CompilerBug where steps read
    each other's results.
    """
    found = list(steps)
    writer = {b: s for s in found for b in s.writes}
    done: dict[Any, None] = {}
    begun: set[Any] = set()

    def visit(root: Node) -> None:
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:
            s, ready = stack.pop()
            if ready:
                done.setdefault(s)
            elif s not in done:
                if s in begun:
                    raise CompilerBug(f"{s.name} reads what is made of its own results")
                begun.add(s)
                stack.append((s, True))
                stack.extend((writer[b], False) for b in reversed(s.reads) if b in writer and writer[b] not in done)

    for s in [*(s for s in found if isinstance(s, l.Call) and s.order), *found]:
        visit(s)
    return l.Program(program.name, program.inputs, tuple(done), program.results)
