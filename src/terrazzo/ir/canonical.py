"""Kernels up to names: what is worked out for one serves all that differ from it in names only (ADR 010).

The canonical form of a kernel has names by order of appearance. Whatever is made of it has these names too, perhaps
with something before or after them, and becomes what it is for a kernel of the program when they are replaced.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from operator import is_
from typing import Any, TypeVar

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import Scalar
from terrazzo.ir.expr import Expr
from terrazzo.ir.monoid import Monoid
from terrazzo.ir.node import Node, per_node, remade, replaced, topological
from terrazzo.ir.types import DType, Type

T = TypeVar("T")

_MARK = "tz{}z"  # nobody calls a tensor so; if somebody did, its kernel would have no canonical form
_MARKS = re.compile(r"tz\d+z|[A-Za-z_]*?tzz")
_NAMELESS = (Type, DType, Monoid, Scalar)
_PLAIN = {int, bool, float, type(None)}


@dataclass(frozen=True, eq=False)
class Form:
    """The canonical form of something: of a kernel, perhaps under a schedule, and what its names stand for."""

    kernel: Any
    names: Mapping[str, str]
    source: str
    schedule: Any = None

    def named(self, x: T) -> T:
        """What was made of the canonical form, with the names of the kernel whose form it is."""
        named: T = self._renaming.of(x)
        return named

    def clashes(self, words: Iterable[str]) -> bool:
        """Whether names of the kernel meet other ones of `words`, those of what was made of the canonical form. A
        kernel may be called as what it writes.
        """
        marked, others = _parted(frozenset(words))
        new = {self._renaming.text(w) for w in marked}
        return len(new) < len(marked) or not new.isdisjoint(others)

    @cached_property
    def _renaming(self) -> _Renaming:
        return _Renaming(self.names, self.source)


@lru_cache(maxsize=1024)
def _parted(words: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Words with marks that are replaced, and those without; kernels are called so by nobody else."""
    marked = frozenset(w for w in words if "tz" in w and "tzz" not in w)
    return marked, frozenset(w for w in words - marked if "tzz" not in w)


MANY = 128
"""Steps of a program from which on many may be alike: a decoder layer has some 60 before they are fused."""


def many_alike(program: l.Program) -> bool:
    """Whether it is worth finding forms where a kernel is looked at once: that takes about as long."""
    return len(program.steps) >= MANY


@per_node
def canonical(kernel: l.Kernel) -> Form:
    """The canonical form of a kernel of Loop IR."""
    form = together((kernel,))
    return Form(form.kernel[0], form.names, form.source)


@per_node
def nameless(kernel: l.Kernel) -> l.Kernel:
    """The canonical form of a kernel, whatever it is called: what a kernel takes does not depend on that."""
    form = canonical(kernel).kernel
    return l.Kernel("tzz", form.axes, form.stores)


def once_per_form(fn: Callable[[l.Kernel], T]) -> Callable[[l.Kernel], T]:
    """`fn` of a kernel's canonical form, with the kernel's names; found once for all that have the form."""
    known: dict[l.Kernel, T] = {}

    def named(kernel: l.Kernel) -> T:
        form = canonical(kernel)
        if form.kernel not in known:
            known[form.kernel] = fn(form.kernel)
        return form.named(known[form.kernel])

    return named


def may_have(program: l.Program, has: Callable[[l.Kernel], bool]) -> Callable[[l.Kernel], bool]:
    """Whether it is worth looking for something in a kernel: where a program has many, whether its form `has` it, asked
    once for all that differ in names only.
    """
    return once_per_form(has) if many_alike(program) else lambda _: True


def together(kernels: Sequence[l.Kernel]) -> Form:
    """The canonical form of several kernels, a tuple of theirs. What is made of it is called as the last of them."""
    last = kernels[-1]
    buffers = dict.fromkeys(b for kernel in kernels for b in (*kernel.writes, *kernel.reads))
    name = form_name(last.name)
    names = {_MARK.format(n): b.name for n, b in enumerate(buffers)}
    new: dict[Any, Any] = {b: l.Buffer(mark, b.type) for b, mark in zip(buffers, names, strict=True)}
    forms = tuple(l.Kernel(name, x.axes, with_buffers(x, new)) for x in kernels)
    return Form(forms, {**names, name: last.name}, last.source)


def form_name(name: str) -> str:
    """What the canonical form of a kernel is called: a form is its own form."""
    return re.sub(r"\W|_*\d+|tzz$", "", name, flags=re.ASCII).strip("_") + "tzz"


def with_buffers(kernel: l.Kernel, new: Mapping[Any, Any]) -> tuple[l.Store, ...]:
    """The stores of a kernel with other buffers, of the same types, in place of its own: what is in a normal form
    remains in it, but for indices from memory, which are sorted by names.
    """
    memo = dict(new)
    for x in _above_buffers(kernel):
        values = replaced(x.values, memo)
        memo[x] = type(x).make(*values) if isinstance(x, Expr) else remade(x, values, ("dtype", "free"))
    return tuple([memo[s] for s in kernel.stores])


@per_node
def sorted_by_names(kernel: l.Kernel) -> bool:
    """Whether other names may change the order of what is in a kernel: of indices that are read from memory."""
    return any(isinstance(x, Expr) for x in _above_buffers(kernel))


@per_node
def _above_buffers(kernel: l.Kernel) -> tuple[Node, ...]:
    """What has buffers somewhere in it in the stores of a kernel, children first."""
    found: dict[Node, None] = {}
    buffers: set[Node] = set()
    for x in topological(kernel.stores):
        if isinstance(x, l.Buffer):
            buffers.add(x)
        elif not (buffers.isdisjoint(x.children) and found.keys().isdisjoint(x.children)):
            found[x] = None
    return tuple(found)


def words(*made: Any) -> frozenset[str]:
    """Every word in nodes, records and texts."""
    texts: set[str] = set()
    seen: set[Node] = set()
    rest: list[Any] = [made]
    while rest:
        x = rest.pop()
        if type(x) is str:
            texts.add(x)
        elif type(x) is tuple:
            rest += x
        elif isinstance(x, Node):
            if x not in seen:
                seen.add(x)
                rest += x.values
        else:
            rest += (getattr(x, name) for name in _fields(x))
    return frozenset(w for text in texts for w in re.findall(r"\w+", text))


def plain(name: str) -> str:
    """The name of a kernel or a buffer without what marks it as that of a canonical form."""
    return _MARKS.sub(lambda m: m[0][:-3] if m[0].endswith("tzz") else m[0].replace("z", ""), name)


_forms: weakref.WeakKeyDictionary[Node, dict[Hashable, Form]] = weakref.WeakKeyDictionary()


def remember(kernel: Node, form: Form, schedule: Hashable = None) -> None:
    """Keep what a kernel (under a schedule) is the same as; where that was known, with all that has its names."""
    known = _forms.setdefault(kernel, {})
    was = known.get(schedule)
    if was is None or (was.kernel, was.schedule, was.names) != (form.kernel, form.schedule, form.names):
        known[schedule] = form


def form_of(kernel: Node, schedule: Hashable = None) -> Form | None:
    """What a kernel (under a schedule) is the same as; None where nobody said so."""
    return _forms.get(kernel, {}).get(schedule)


def as_its_form(fn: Callable[[Any], T], kernel: Node) -> T:
    """`fn` of what a kernel is the same as, with this one's names; of itself where nobody said so."""
    form = form_of(kernel)
    return form.named(fn(form.kernel)) if form else fn(kernel)


def twin(kernel: T) -> T:
    """The kernel of which this one differs in names only, or itself."""
    form = form_of(kernel)  # type: ignore[arg-type]
    return form.kernel if form else kernel


@per_node
def _marked(x: Node) -> bool:
    """Whether there are names in or below a node that stand for others, or it is a kernel, which has a source."""
    return isinstance(x, l.Kernel | k.Kernel) or any(map(_has_marks, x.values))


def _has_marks(x: Any) -> bool:
    if type(x) is str:
        return _MARKS.search(x) is not None
    if type(x) is tuple:
        return any(map(_has_marks, x))
    if isinstance(x, Node):
        return _marked(x)
    return bool(_fields(x))


@per_node
def _below(root: Node) -> tuple[tuple[Node, tuple[int, ...]], ...]:
    """The nodes at or below one that have names in them that stand for others, children first, and in which of their
    fields.
    """
    if (known := f"{__name__}._marked") not in root.__dict__:  # asked of children first, however deep they lie
        for x in topological([root], stop=lambda x: known in x.__dict__):
            _marked(x)
    nodes = topological([root], stop=lambda x: not _marked(x))
    return tuple((x, tuple(n for n, v in enumerate(x.values) if _has_marks(v))) for x in nodes if _marked(x))


def _fields(x: Any) -> tuple[str, ...]:
    """The fields of a record that may have names in them; none of what is no record."""
    return _of_class(type(x))  # type: ignore[arg-type]  # classes can be hashed


@cache
def _of_class(kind: type) -> tuple[str, ...]:
    found = dataclasses.is_dataclass(kind) and not issubclass(kind, _NAMELESS)
    return tuple(f.name for f in dataclasses.fields(kind)) if found else ()


class _Renaming:
    """Replaces names in nodes, records, tuples and texts."""

    def __init__(self, names: Mapping[str, str], source: str) -> None:
        self.names, self.source = names, source
        self.texts: dict[str, str] = {}
        self.nodes: dict[Node, Any] = {}

    def of(self, x: Any) -> Any:
        if type(x) is str:
            return self.text(x)
        if type(x) is tuple:
            items = tuple(map(self.of, x))
            return x if all(map(is_, items, x)) else items
        if isinstance(x, Node):
            return self.node(x)
        if fields := _fields(x):
            new = {}
            for name in fields:
                old = getattr(x, name)
                if type(old) not in _PLAIN and (now := self.of(old)) is not old:
                    new[name] = now
            return dataclasses.replace(x, **new) if new else x
        return x

    def node(self, root: Node) -> Any:
        known = self.nodes
        if root in known:
            return known[root]
        for x, places in _below(root):
            if x in known:
                continue
            new = list(x.values)
            for n in places:
                v = new[n]
                new[n] = known[v] if isinstance(v, Node) else self.of(v)
            if isinstance(x, l.Kernel | k.Kernel):
                known[x] = type(x)(**dict(zip(x._fields, new, strict=True), source=self.source))
            else:
                known[x] = type(x).make(*new)
        return known.get(root, root)

    def text(self, text: str) -> str:
        if text not in self.texts:
            self.texts[text] = self.marks(text)
        return self.texts[text]

    def marks(self, text: str) -> str:
        return _MARKS.sub(lambda m: self.names.get(m[0], m[0]), text)
