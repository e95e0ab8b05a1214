"""Rules. A rule looks at one node and returns what should stand in its place, or says why not.

    @rule
    def double_is_shift(x: Mul, ctx):
        '''x * 2 == x << 1 ...'''
        need(x.type.dtype.is_integer, "floats have no shift")
        return Shl(x.a, 1)

The annotation of the first argument says which nodes it looks at. Returning None means "not my pattern" and leaves no
trace; `need(condition, reason)` declines with a reason, which is recorded. A rule with alternatives returns a `Choice`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from terrazzo.ir.node import Node


class Declined(Exception):
    """Raised by `need`: the rule's pattern is here but a condition does not hold."""


def need(condition: Any, reason: str) -> None:
    """Decline the rewrite, with `reason`, unless `condition` holds."""
    if not condition:
        raise Declined(reason)


@dataclass(frozen=True)
class Choice:
    """Alternatives that are all legal. `cost` is the model's estimate for each; what is pinned or measured goes before
    it.
    """

    subject: str
    options: Mapping[str, Any]
    cost: Mapping[str, float]

    def prices(self) -> str:
        """The alternatives with what the model thinks of them, in microseconds."""
        return ", ".join(f"{self.cost[k] / 1000:.1f} us {k}" for k in self.options)


def cheapest(choice: Choice) -> str:
    """The policy that trusts the model; at a tie the first alternative wins."""
    return min(choice.options, key=choice.cost.__getitem__)


@dataclass(frozen=True, eq=False)
class Rule:
    """A named rewrite. `keys` are the node classes (or ATen names) it is tried on; `sorry` exempts it from the
    harness.
    """

    name: str
    keys: tuple[Any, ...]
    rewrite: Callable[..., Any]
    doc: str
    sorry: str | None = None


@dataclass(frozen=True)
class Event:
    """One thing that happened: a rule fired (with the text before and after), or was skipped with a reason."""

    pass_name: str
    rule: str
    subject: str
    fired: bool
    reason: str = ""
    before: str = ""
    after: str = ""

    def line(self) -> str:
        """As the listings show it."""
        mark = ">>>" if self.fired else "---"
        tail = "" if self.fired and not self.reason else f": {self.reason}"
        return f"{mark} {self.pass_name}:{self.rule} {'at' if self.fired else 'skipped at'} {self.subject}{tail}"


@dataclass(frozen=True)
class Application:
    """One use of a rule, for a checker to replay: what stood there, and what took its place. Both are nodes, and mean
    the same.
    """

    pass_name: str
    rule: str
    subject: str
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.pass_name}:{self.rule} at {self.subject}"


@dataclass
class Log:
    """The events of one compilation, in order. `applications` are kept only where a list is given: they keep every node
    alive.
    """

    events: list[Event] = field(default_factory=list)
    skips: set[Event] = field(default_factory=set)
    applications: list[Application] | None = None

    def add(self, event: Event) -> None:
        """Record an event; a skip that was already recorded for the same subject and reason is not repeated."""
        before = len(self.skips)
        if not event.fired:
            self.skips.add(event)
        if event.fired or len(self.skips) > before:
            self.events.append(event)

    def forget(self, passes: Container[str]) -> None:
        """Drop what was recorded of some passes, which run anew."""
        self.events[:] = [e for e in self.events if e.pass_name not in passes]
        self.skips = {e for e in self.skips if e.pass_name not in passes}
        if self.applications is not None:
            self.applications[:] = [a for a in self.applications if a.pass_name not in passes]

    def applied(self, pass_name: str, rule: str, subject: str, before: Iterable[Any], after: Iterable[Any]) -> None:
        """Record that `after` takes the place of `before`, where that is more than nothing and applications are
        kept.
        """
        old, new = tuple(before), tuple(after)
        if self.applications is not None and old != new:
            self.applications.append(Application(pass_name, rule, subject, old, new))


@overload
def rule(fn: Callable[..., Any]) -> Rule: ...
@overload
def rule(*, keys: tuple[Any, ...] = (), sorry: str | None = None) -> Callable[[Callable[..., Any]], Rule]: ...
def rule(fn: Callable[..., Any] | None = None, *, keys: tuple[Any, ...] = (), sorry: str | None = None) -> Any:
    """Make a Rule of a function. Its keys come from the annotation of the first argument unless given."""

    def make(f: Callable[..., Any]) -> Rule:
        parameters = list(inspect.signature(f, eval_str=True).parameters.values())
        subject = keys or _classes(parameters[0].annotation)
        takes_context = len(parameters) > 1
        call = f if takes_context else (lambda node, ctx: f(node))
        return Rule(f.__name__, subject, call, inspect.getdoc(f) or "", sorry)

    return make if fn is None else make(fn)


def _classes(annotation: Any) -> tuple[Any, ...]:
    found = getattr(annotation, "__args__", (annotation,))
    if not all(isinstance(c, type) and issubclass(c, Node) for c in found):
        raise TypeError(f"a rule's first argument is annotated with the nodes it looks at, not {annotation}")
    return tuple(found)
