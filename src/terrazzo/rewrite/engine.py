"""The one rewrite engine: children first, every rule that looks at a node, to a fixpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.ir.node import Node, topological
from terrazzo.rewrite.rule import Choice, Declined, Event, Log, Rule, cheapest

FUEL = 64
"""How often one node may be rewritten in place before we call the rules circular."""


@lru_cache(maxsize=32)
def index(rules: tuple[Rule, ...]) -> dict[Any, list[Rule]]:
    """The rules by the key they are tried on, in the order given."""
    table: dict[Any, list[Rule]] = {}
    for r in rules:
        for key in r.keys:
            table.setdefault(key, []).append(r)
    return table


def rule_key(node: Node) -> Any:
    """What rules for this node are indexed under: its class, or the ATen name in Torch IR."""
    return getattr(node, "name", None) if type(node).__name__ == "Aten" else type(node)


def rewrite(
    roots: Sequence[Node],
    rules: Sequence[Rule],
    ctx: Any = None,
    *,
    log: Log | None = None,
    pass_name: str = "",
    names: Mapping[Node, str] | None = None,
    decide: Callable[[Choice], str] = cheapest,
    show: Callable[[Any], str] | None = None,
    memo: dict[Node, Any] | None = None,
) -> list[Any]:
    """What `roots` become. `memo` afterwards holds what every node below them became; `show` adds texts to the
    events.
    """
    table = index(tuple(rules))
    memo = {} if memo is None else memo
    log = log or Log()
    for node in topological(roots, stop=memo.__contains__):
        if node in memo:
            continue
        new: Any = node
        children = [memo[c] for c in node.children]
        if any(a is not b for a, b in zip(children, node.children, strict=True)):
            new = node.with_children(children)
        fuel = FUEL
        while isinstance(new, Node):
            after, name = _step(
                new, table.get(rule_key(new), ()), ctx, log, pass_name, (names or {}).get(node, ""), decide, show
            )
            if after is None:
                break
            fuel -= 1
            if fuel == 0:
                raise CompilerBug(f"pass {pass_name}: rule {name} does not settle on {type(node).__name__}")
            new = after
            if isinstance(new, Node) and new is not node:
                inner = [c for c in topological([new], stop=lambda n: n in memo) if c not in memo and c is not new]
                memo.update({c: c for c in inner})  # what a rule builds is already in its final form
        memo[node] = new
    return [memo[r] for r in roots]


def _step(
    node: Node, rules: Sequence[Rule], ctx: Any, log: Log, pass_name: str, subject: str, decide: Any, show: Any
) -> tuple[Any, str]:
    for r in rules:
        subject = subject or getattr(node, "op", "")
        try:
            after = r.rewrite(node, ctx)
        except Declined as why:
            log.add(Event(pass_name, r.name, subject, False, str(why)))
            continue
        reason = ""
        if isinstance(after, Choice):
            pick = decide(after)
            after, reason = after.options[pick], f"{pick}: {after.prices()}"
        if after is None or after is node:
            if reason:
                log.add(Event(pass_name, r.name, subject, False, reason))
            continue
        texts = (show(node), show(after)) if show else ("", "")
        log.add(Event(pass_name, r.name, subject, True, reason, *texts))
        log.applied(pass_name, r.name, subject, [node], after if isinstance(after, tuple) else [after])
        return after, r.name
    return None, ""
