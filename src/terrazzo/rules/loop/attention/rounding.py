"""What is a multiple of weights is rounded to the 16 bits of what it is multiplied with."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.types import DType
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.edited import Edited, kernels_of
from terrazzo.rules.loop.precision.rounded import aligned


class Rounding(Edited):
    """A program whose weights, and what is a multiple of them, may be rounded."""

    rates: Rates
    weights: set[l.Buffer]

    def round_factors(self) -> None:
        """Have every factor of a product that is a multiple of weights stored in the 16 bits of the other factor, where
        these are what the product is rounded to.
        """
        rounded: dict[tuple[l.Buffer, DType], l.Buffer] = {}
        multiples = self.multiples()
        for kernel in kernels_of(self.program):
            value = kernel.stores[0].value
            if not isinstance(value, l.Apply) or value.fn.name != "mul" or len(kernel.stores) > 1:
                continue
            for x, y in (value.args, value.args[::-1]):
                kind = self.narrow(y)
                if (
                    isinstance(x, l.Load)
                    and x.dtype.size == 4
                    and kind is not None
                    and x.buffer in multiples
                    and len(self.known.readers[x.buffer]) > (x.buffer in self.weights)
                    and self.ends_in(kernel, kind)
                ):
                    self.round_factor(kernel, x, kind, rounded)
                    break
        self.round_terms(rounded)

    def round_factor(
        self, kernel: l.Kernel, x: l.Load, kind: DType, rounded: dict[tuple[l.Buffer, DType], l.Buffer]
    ) -> None:
        """Have a kernel read a factor in `kind`, which another one stores."""
        made = []
        factor, (x, by) = x, self.unscaled(x)
        if (x.buffer, kind) not in rounded:
            b = l.Buffer(self.fresh(f"{x.buffer.name}_{kind.name}"), aligned(kind, x.buffer.type))
            axes = tuple(Var(f"a{d}", n) for d, n in enumerate(b.type.static_shape))
            store = l.Store(b, axes, l.apply(kind.name, l.Load(x.buffer, axes)))
            made.append(l.Kernel(b.name, axes, (store,), kernel.source))
            rounded[x.buffer, kind] = b
            self.say("rounded_factors", x.buffer.name, f"{kernel.name} multiplies it with {kind.name}, in {kind.name}")
        narrow = converted(l.Load(rounded[x.buffer, kind], x.index, x.inside), x.dtype)
        new = substitute(kernel, {factor: narrow if by is None else l.apply("mul", narrow, by)})
        self.replace({kernel: [*made, new]})

    def unscaled(self, x: Any) -> tuple[Any, Any]:
        """What is stored of a factor before it is multiplied by a constant, if there are sums of that too, and the
        constant; else the factor.
        """
        match self.known.of(x):
            case l.Apply(fn=fn, args=(l.Load(buffer=b) as load, l.Literal() as by)) if fn.name == "mul":
                readers = (s for s in self.known.readers[b] if self.known.makers.get(x.buffer) is not s)
                return (load, by) if any(map(_sums, readers)) else (x, None)
        return x, None

    def round_terms(self, rounded: Mapping[tuple[l.Buffer, DType], l.Buffer]) -> None:
        """Have sums of what is stored in 16 bits for others, which are rounded to these themselves, read it so: as that
        of a bias of scores, whose gradient is a sum over all batches.
        """
        for (wide, kind), narrow in rounded.items():
            for kernel in self.known.readers.get(wide, []):
                terms = [x for x in topological(kernel.stores) if isinstance(x, l.Load) and x.buffer is wide]
                if _sums(kernel) and narrow not in kernel.writes and self.ends_in(kernel, kind):
                    new = {x: converted(l.Load(narrow, x.index, x.inside), x.dtype) for x in terms}
                    self.replace({kernel: [substitute(kernel, new)]})

    def narrow(self, x: Any) -> DType | None:
        """The type in 16 bits that a factor is of, whatever constants it is multiplied by."""
        found = [self.known.unfold(y) for y in self.known.factors(x) if not isinstance(y, l.Literal)]
        kind = found[0].args[0].dtype if len(found) == 1 and _widens(found[0]) else None
        return kind if kind is not None and kind.name in self.rates.matrix else None

    def multiples(self) -> set[l.Buffer]:
        """The buffers that hold weights times something: found along the program, which may be a chain of thousands."""
        found = set(self.weights)
        for kernel in kernels_of(self.program):
            if len(kernel.stores) == 1 and _multiple(kernel.stores[0].value, found):
                found.add(kernel.stores[0].buffer)
        return found

    def ends_in(self, kernel: l.Kernel, kind: DType) -> bool:
        """Whether what a kernel stores is summed and scaled, and then rounded to `kind`, by all who read it."""
        (store,) = kernel.stores
        readers = self.known.readers.get(store.buffer, [])
        if store.buffer in self.known.kept or not readers:
            return False
        for s in readers:
            value = s.stores[0].value
            while isinstance(value, l.Reduce) and value.monoid.name == "sum":
                (value,) = value.args
            linear = [x for x in topological([value], stop=lambda x: isinstance(x, l.Load)) if isinstance(x, l.Apply)]
            if len(s.stores) > 1 or any(x.fn.name not in ("mul", "add") and not is_cast(x.fn) for x in linear):
                return False
            if not any(x.dtype is kind for x in linear) and not self.ends_in(s, kind):
                return False
        return True


def _sums(kernel: l.Kernel) -> bool:
    return any(isinstance(x, l.Reduce) for x in topological(kernel.stores))


def _widens(x: Any) -> bool:
    casts = isinstance(x, l.Apply) and is_cast(x.fn)
    return casts and x.args[0].dtype.size < x.dtype.size


def converted(x: Any, kind: DType) -> Any:
    return x if x.dtype is kind else l.apply(kind.name, x)


def _multiple(x: Any, weights: Set[l.Buffer]) -> bool:
    """Whether a term is weights times something."""
    if isinstance(x, l.Load):
        return x.buffer in weights
    if not isinstance(x, l.Apply):
        return isinstance(x, l.Literal) and x.value == 0
    each = [_multiple(a, weights) for a in x.args]
    if x.fn.name == "mul":
        return any(each)
    if x.fn.name in ("where", "div"):
        return all(each[1:]) if x.fn.name == "where" else each[0]
    return (x.fn.name in ("add", "sub", "neg") or is_cast(x.fn)) and all(each)
