"""`torch.associative_scan`: the scans that PyTorch has by name; the linear recurrence, an operator of ours; and for any
other function that combines, a few steps over all elements.

What a function combines is found by calling it with symbols for its operands: each of its results must be a polynomial
of them that we know, however it is written.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from terrazzo.ir.recurrence import linear_recurrence

Combine = Callable[..., Any]
"""A function of the elements that are earlier, those that are later, and what else it takes, one after the other."""


class _Unknown(Exception):
    """What a function computes is no polynomial."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of products: of each, which factors it has, how often, and its coefficient. A factor is the name of an
    operand, or a function with its arguments, in any order.
    """

    terms: frozenset[tuple[frozenset[tuple[Any, int]], Any]]

    @classmethod
    def made(cls, terms: Sequence[tuple[Counter[Any], Any]]) -> Polynomial:
        total: Counter[frozenset[tuple[Any, int]]] = Counter()
        for factors, coefficient in terms:
            total[frozenset(factors.items())] += coefficient
        return cls(frozenset((factors, x) for factors, x in total.items() if x != 0))

    @classmethod
    def of(cls, x: Any) -> Polynomial:
        """A number, the name of a factor, or what is one already."""
        if isinstance(x, Polynomial):
            return x
        if isinstance(x, int | float) and not isinstance(x, bool):
            return cls.made([(Counter(), x)])
        if isinstance(x, str | tuple):
            return cls.made([(Counter([x]), 1)])
        raise _Unknown

    def listed(self) -> list[tuple[Counter[Any], Any]]:
        return [(Counter(dict(factors)), x) for factors, x in self.terms]

    def add(self, other: Any, *, alpha: Any = 1) -> Polynomial:
        return Polynomial.made([*self.listed(), *Polynomial.of(other).mul(alpha).listed()])

    def mul(self, other: Any) -> Polynomial:
        both = [(a, b) for a in self.listed() for b in Polynomial.of(other).listed()]
        return Polynomial.made([(a + b, x * y) for (a, x), (b, y) in both])

    def sub(self, other: Any, *, alpha: Any = 1) -> Polynomial:
        return self.add(other, alpha=-alpha)

    def addcmul(self, a: Any, b: Any, *, value: Any = 1) -> Polynomial:
        return self.add(Polynomial.of(a).mul(b), alpha=value)

    def _of_both(self, name: str, other: Any) -> Polynomial:
        return Polynomial.of((name, frozenset((self, Polynomial.of(other)))))

    def maximum(self, other: Any) -> Polynomial:
        return self._of_both("max", other)

    def minimum(self, other: Any) -> Polynomial:
        return self._of_both("min", other)

    def logaddexp(self, other: Any) -> Polynomial:
        return self._of_both("logaddexp", other)

    __add__ = __radd__ = add
    __mul__ = __rmul__ = multiply = mul
    __sub__ = subtract = sub

    def __rsub__(self, other: Any) -> Polynomial:
        return Polynomial.of(other).sub(self)

    def __neg__(self) -> Polynomial:
        return self.mul(-1)

    max, min = maximum, minimum

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in FUNCTIONS or not args:
            raise _Unknown
        return getattr(cls.of(args[0]), name)(*args[1:], **(kwargs or {}))


FUNCTIONS = ("add", "sub", "subtract", "mul", "multiply", "addcmul", "max", "maximum", "min", "minimum", "logaddexp")
"""The functions of PyTorch that polynomials know."""


def scanned(combine: Combine, xs: Sequence[Any], more: Sequence[Any] = (), meant: Combine | None = None) -> list[Any]:
    """The running combinations along the first dimension. `combine` is given elements one behind the other along it;
    `meant` is what it does to one.
    """
    found = [] if more else _by_name(meant or combine, xs)
    return [scan() for scan in found] if found else _by_doubling(combine, xs, more)


def _by_name(combine: Combine, xs: Sequence[Any]) -> list[Callable[[], Any]]:
    """How each tensor is scanned, where that is known of all: of the last element, each is the combination of what is
    before and it.
    """
    import torch

    earlier, later = ([Polynomial.of(f"{side}{k}") for k in range(len(xs))] for side in ("earlier", "later"))
    plain = getattr(combine, "forward", combine)  # a graph that is called as a module prints what fails in it
    try:
        results = plain(*earlier, *later)
    except Exception:  # it may do with its operands whatever it likes
        return []
    results = list(results) if isinstance(results, tuple | list) else [results]
    if len(results) != len(xs) or any(x.dtype is torch.bool for x in xs):
        return []
    found = []
    for x, was, new, result in zip(xs, earlier, later, results, strict=True):
        known: dict[Polynomial, Callable[[], Any]] = {
            new: x.clone,
            was + new: partial(x.cumsum, 0, dtype=x.dtype),
            was * new: partial(x.cumprod, 0, dtype=x.dtype),
        }
        if not x.is_complex():
            known[was.maximum(new)] = partial(_best, x.cummax)
            known[was.minimum(new)] = partial(_best, x.cummin)
            for a, factor in zip(xs, later, strict=True):
                if factor is not new and not a.is_complex():
                    known[factor * was + new] = partial(linear_recurrence(), a, x, 0)
        if x.is_floating_point():
            known[was.logaddexp(new)] = partial(x.logcumsumexp, 0)
        if result not in known:
            return []
        found.append(known[result])
    return found


def _best(scan: Any) -> Any:
    return scan(0).values


def _by_doubling(combine: Combine, xs: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Each step joins what the last one found of twice as many elements (Hillis and Steele 1986): all of them, so that
    it is the same few operations whatever the number of elements.
    """
    import torch

    found, step, count = list(xs), 1, xs[0].shape[0]
    while step < count:
        joined = combine(*(x[:-step] for x in found), *(x[step:] for x in found), *more)
        joined = joined if isinstance(joined, tuple | list) else [joined]
        found = [torch.cat([x[:step], y]) for x, y in zip(found, joined, strict=True)]
        step *= 2
    return found if step > 1 else [x.clone() for x in found]


@contextmanager
def associative_scans() -> Iterator[None]:
    """Within this, PyTorch's associative scans, when they are called, are those of this page."""
    module: Any = importlib.import_module("torch._higher_order_ops.associative_scan")

    def generic(combine: Any, leaves: Sequence[Any], dim: int = 0, additional_inputs: Sequence[Any] = ()) -> Any:
        return scanned(combine, leaves, additional_inputs, _of_one(combine))

    new = {
        "generic_associative_scan": generic,
        "associative_scan_op": lambda combine, xs, additional_inputs: scanned(combine, xs, additional_inputs),
        "_maybe_compile_and_run_fn": lambda fn, *args: fn(*args),
    }
    old = {name: getattr(module, name) for name in new if hasattr(module, name)}
    try:
        for name in old:
            setattr(module, name, new[name])
        yield
    finally:
        for name, value in old.items():
            setattr(module, name, value)


def _of_one(combine: Any) -> Combine:
    """What combines two elements, as the user wrote it, of what PyTorch made of it for many at once (by vmap)."""
    many = combine.keywords["combine_fn"]
    one = inspect.getclosurevars(many).nonlocals.get("func", many)
    return partial(combine.func, **{**combine.keywords, "combine_fn": one})
