"""The one node class of all IRs: immutable, interned, typed at construction.

A subclass lists its fields; construction, traversal, rebuilding, hashing, printing and parsing follow from them::

    class Get(Node, dialect="tensor", op="get"):
        x: Node
        index: int

Nodes are *interned*: building the same node twice gives the same object, so equality is `is` and common sub-expressions
are shared by construction. Five laws keep that sound:

1. The key of a scalar includes its Python type and its sign: 1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals
itself. 2. A binder canonicalises the names it binds (see `expr.Bound`), so two loops over the same thing *are* the same
term. 3. A node caches only what follows from its fields, never what holds in one context.
4. What has an effect or is random carries an order number, so two of them are two nodes.
5. Only constructors make nodes; nothing ever mutates one.
"""

from __future__ import annotations

import dataclasses
import weakref
from _weakref import _remove_dead_weakref  # type: ignore[attr-defined]
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform, overload

from terrazzo.collector import remembered

N = TypeVar("N", bound="Node")
T = TypeVar("T")


class _Reference(weakref.ref["Node"]):
    """What the table has of a node, and where."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


_table: dict[tuple[Any, ...], _Reference] = {}
"""Every node there is, by its class and what tells its fields from others."""


def _gone(
    reference: _Reference,
    table: dict[tuple[Any, ...], _Reference] = _table,
    remove: Callable[[dict[Any, Any], Any], None] = _remove_dead_weakref,
) -> None:
    """A node is no more. Where its like was made meanwhile, that stays. (When Python ends, globals are gone first.)"""
    remove(table, reference.key)


class derived(Generic[T]):
    """What follows from the fields of a node, computed when it is first asked for: `functools.cached_property` without
    the lock, which takes longer than most of it.
    """

    def __init__(self, fn: Callable[[Any], T]) -> None:
        self.fn, self.name, self.__doc__ = fn, fn.__name__, fn.__doc__

    @overload
    def __get__(self, node: None, owner: type) -> derived[T]: ...
    @overload
    def __get__(self, node: Any, owner: type) -> T: ...
    def __get__(self, node: Any, owner: type) -> Any:
        if node is None:
            return self
        found = node.__dict__[self.name] = self.fn(node)
        return found


_PLAIN: set[type] = {int, str, type(None)}
"""Types whose values tell themselves from others: these, every class of nodes, and what is said to be `distinct`."""

C = TypeVar("C", bound=type)


def distinct(kind: C) -> C:
    """A class whose values are equal to no values of other classes, as fields of nodes."""
    _PLAIN.add(kind)
    return kind


def key_of(value: Any) -> Any:
    """What tells a value of a field from others: 1, 1.0 and True are three."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else tuple(map(key_of, value))
    if kind is float:
        return (float, value.hex())
    if kind is complex:
        return (complex, value.real.hex(), value.imag.hex())
    return (kind, value)


class _Interned(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(cls._fields):  # type: ignore[attr-defined]
            args = cls._bind(args, kwargs)  # type: ignore[attr-defined]
        return _interned(cls, args)


def _interned(cls: Any, args: tuple[Any, ...], known_of_it: Mapping[str, Any] | None = None) -> Any:
    """The node of a class with these fields, which are checked where nothing is known of a new one."""
    key = (cls, *args)
    for x in args:  # most fields are plain, or tuples of what is
        if (kind := type(x)) not in _PLAIN and not (kind is tuple and _PLAIN.issuperset(map(type, x))):
            key = (cls, *map(key_of, args))
            break
    known = _table.get(key)
    found = known() if known is not None else None
    if found is not None:
        return found
    node: Any = object.__new__(cls)
    node.__dict__.update(zip(cls._fields, args, strict=True))  # what a dataclass would do field by field
    if known_of_it is None:
        node.check()
    else:
        node.__dict__.update(known_of_it)
    reference = _Reference(node, _gone)
    reference.key = key
    while (known := _table.setdefault(key, reference)) is not reference:
        if (found := known()) is not None:  # another thread made it meanwhile
            return found
        _remove_dead_weakref(_table, key)  # it was about to go
    return node


def remade(node: Node, values: tuple[Any, ...], same: tuple[str, ...]) -> Any:
    """A node like another one, in a normal form already, with fields that fit as those of the other do: it is not
    checked, and has the same of what is called `same`, as far as that is known of the other one.
    """
    known = node.__dict__
    return _interned(type(node), values, {name: known[name] for name in same if name in known})


@dataclass_transform(frozen_default=True, eq_default=False)
class Node(metaclass=_Interned):
    """Base of everything in every IR. See the module's docstring."""

    dialect: ClassVar[str] = ""
    op: ClassVar[str] = ""
    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _get: ClassVar[Callable[[Any], tuple[Any, ...]] | None] = None

    def __init_subclass__(cls, dialect: str = "", op: str = "") -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        _PLAIN.add(cls)
        cls.dialect = dialect or cls.dialect
        cls.op = op or cls.__name__.lower()
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls._fields = tuple(f.name for f in fields)
        cls._get = attrgetter(*cls._fields) if len(fields) > 1 else None
        cls._defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        if dialect:
            OPS.setdefault(cls.dialect, {})[cls.op] = cls

    @classmethod
    def _bind(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = dict(zip(cls._fields, args, strict=False))
        if len(args) > len(cls._fields) or given.keys() & kwargs.keys() or kwargs.keys() - set(cls._fields):
            raise TypeError(
                f"{cls.__name__} takes the fields {', '.join(cls._fields)}; got {len(args)} and {list(kwargs)}"
            )
        given = {**cls._defaults, **given, **kwargs}
        missing = [f for f in cls._fields if f not in given]
        if missing:
            raise TypeError(f"{cls.__name__} is missing {', '.join(missing)}")
        return tuple(given[f] for f in cls._fields)

    @classmethod
    def make(cls, *args: Any) -> Any:
        """Rebuild from field values; a class with a normal form overrides this to go through it."""
        return cls(*args)

    def check(self) -> None:
        """Raise UserError where the fields do not fit together, so that an ill-formed node cannot exist."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the fields, in order."""
        get = type(self)._get
        return get(self) if get else tuple(getattr(self, f) for f in self._fields)

    @derived
    def children(self) -> tuple[Node, ...]:
        """Every node in the fields, in order, looking into tuples."""
        found: list[Node] = []
        _collect(self.values, found)
        return tuple(found)

    @derived
    def free(self) -> frozenset[Any]:
        """The index variables that occur free below this node; variables and binders override this."""
        return free_in(self.children)

    def with_children(self: N, new: Iterable[Any]) -> Any:
        """The same node with its children replaced, in the order of `children`."""
        rest = iter(new)
        return type(self).make(*(_refill(v, rest) for v in self.values))

    def __repr__(self) -> str:
        return type(self).printer(self)

    def plainly(self) -> str:
        """The op and its fields, for what has no text of its own."""
        return f"{self.op}({', '.join(map(repr, self.values))})"

    printer: ClassVar[Callable[[Node], str]] = staticmethod(plainly)
    """What `repr` makes of a node. `ir.show`, which knows all dialects, puts its `show` here."""

    def __copy__(self: N) -> N:
        return self

    def __deepcopy__(self: N, memo: Any) -> N:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("nodes are not pickled: print them and parse the text")


OPS: dict[str, dict[str, type[Node]]] = {}
"""Every op of every dialect, filled by the class declarations themselves."""


def free_in(nodes: Iterable[Node]) -> frozenset[Any]:
    """The index variables that occur free below any of the nodes: a set that is there already, where one has all."""
    found: frozenset[Any] = frozenset()
    for node in nodes:
        if "free" not in node.__dict__:  # children first, however deep they lie: lookups nest with every step of a loop
            for x in topological([node], stop=lambda x: "free" in x.__dict__):
                x.free  # noqa: B018
        own = node.free
        if not own <= found:
            found = found | own if found else own
    return found


def _collect(values: tuple[Any, ...], found: list[Node]) -> None:
    for value in values:
        kind = type(value)
        if type(kind) is _Interned:
            found.append(value)
        elif kind is tuple:
            _collect(value, found)


def _refill(value: Any, rest: Iterator[Any]) -> Any:
    if type(type(value)) is _Interned:
        return next(rest)
    if type(value) is tuple:
        return tuple(_refill(item, rest) for item in value)
    return value


def topological(roots: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> list[Node]:
    """Every node reachable from `roots`, children first, each once. `stop(n)` keeps n and does not look into it."""
    return _walked(roots, stop) if stop else list(_below(tuple(roots)))


@remembered
def _below(roots: tuple[Node, ...]) -> tuple[Node, ...]:
    """All nodes of some roots, which are asked for several times each: kernels are looked at by many."""
    return tuple(_walked(roots))


def _walked(roots: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    path: list[Node] = []
    rest = [iter(roots)]
    while rest:
        for node in rest[-1]:
            if node in seen:
                continue
            seen.add(node)
            below = node.children
            if below and (stop is None or not stop(node)):
                path.append(node)
                rest.append(iter(below))
                break
            order.append(node)
        else:  # all that is below the last node of the path is done
            rest.pop()
            if path:
                order.append(path.pop())
    return order


def transform(root: Node, visit: Callable[[Node], Any], memo: dict[Node, Any] | None = None) -> Any:
    """Rebuild `root` children first; `visit(node)` gets each rebuilt node and returns what takes its place."""
    memo = {} if memo is None else memo
    for node in topological([root], stop=memo.__contains__ if memo else None):
        if node not in memo:
            memo[node] = visit(rebuilt(node, memo))
    return memo[root]


def transformed(roots: Iterable[N], visit: Callable[[Node], Any]) -> tuple[Any, ...]:
    """Several roots, each as `transform` makes it; what they have in common is rebuilt once."""
    memo: dict[Node, Any] = {}
    return tuple(transform(root, visit, memo) for root in roots)


def rebuilt(node: N, memo: Mapping[Any, Any]) -> N:
    """A node whose children are what `memo` has for them: itself where they are its own."""
    for c in node.children:
        if memo[c] is not c:
            return type(node).make(*mapped(node.values, memo))  # type: ignore[no-any-return]
    return node


def mapped(values: tuple[Any, ...], memo: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Values of fields with what `memo` has for nodes."""
    return tuple([
        memo[v] if type(type(v)) is _Interned else mapped(v, memo) if type(v) is tuple else v for v in values
    ])  # fmt: skip


def replaced(values: tuple[Any, ...], memo: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Values of fields with what `memo` has for nodes, where it has something."""
    return tuple([
        memo.get(v, v) if type(type(v)) is _Interned else replaced(v, memo) if type(v) is tuple else v for v in values
    ])  # fmt: skip


def per_node(fn: Callable[[N], T]) -> Callable[[N], T]:
    """`fn` of a node, computed once for as long as the node lives."""
    key = _kept_as(fn)

    @wraps(fn)
    def call(node: N) -> T:
        known: dict[str, Any] = node.__dict__
        if key not in known:
            known[key] = fn(node)
        found: T = known[key]
        return found

    return call


def _kept_as(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def known_to_be(fn: Callable[[N], T], node: N, value: T) -> None:
    """Say what `fn`, computed once per node, is of one, where that is known."""
    node.__dict__.setdefault(_kept_as(fn), value)


def substitute(root: Any, mapping: Mapping[Any, Any], memo: dict[Any, Any] | None = None) -> Any:
    """Replace nodes by nodes (or ints), everywhere below `root`. The images must not mention `Bound` variables of
    `root`. A `memo`, which begins as the mapping, has what was rebuilt for other roots.
    """
    if not isinstance(root, Node) or not mapping:
        return root
    return _substituted(root, mapping, dict(mapping) if memo is None else memo)


def substituted(roots: Iterable[Any], mapping: Mapping[Any, Any]) -> tuple[Any, ...]:
    """The same below several roots; what they have in common is rebuilt once."""
    memo = dict(mapping)
    return tuple(_substituted(x, mapping, memo) if isinstance(x, Node) and mapping else x for x in roots)


def _substituted(root: Node, mapping: Mapping[Any, Any], memo: dict[Any, Any]) -> Any:
    """A root with what `memo` has for nodes below it, which has more of them then."""
    if root in memo:
        return memo[root]
    only = all(x in x.free for x in mapping)  # variables: what does not mention them stays
    variables = frozenset(mapping)
    if only and variables.isdisjoint(root.free):
        return root
    path = [root]
    while path:
        node = path[-1]
        below: list[Node] = []
        for c in node.children:
            if c not in memo:
                if only and variables.isdisjoint(c.free):
                    memo[c] = c
                else:
                    below.append(c)
        if below:
            path += below
        else:
            if node not in memo:
                memo[node] = rebuilt(node, memo)
            path.pop()
    return memo[root]
