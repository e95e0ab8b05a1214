"""What tells a term from others in every process: a text, by which the terms of a normal form are sorted.

It has nothing of the process in it: no addresses of objects, and of the names that variables have until they are bound
only which of them is the older one.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Any

from terrazzo.ir.node import Node, topological

LONG = 4096
"""Nodes in the text of a term that is sorted by its text, at most. A term of many uses of few terms may be longer than
any memory, such as that of a binary search in data.
"""

_FRESH = re.compile(r"\$(\d+)")
"""The names of variables that will be bound at once (`loop.fresh_name`)."""


def sorted_as(text: str) -> str:
    """What a text is sorted by: `$9` before `$10`, so that it does not matter how many names were given away before."""
    return _FRESH.sub(lambda m: f"${int(m[1]):012}", text) if "$" in text else text


@lru_cache(maxsize=4096)
def written(node: Node) -> str:
    """What a term is sorted by: its text, or a digest of it where that would be long."""
    sizes: dict[Node, int] = {}
    found = topological([node])
    for n in found:
        sizes[n] = 1 + sum(sizes[c] for c in n.children)
    if sizes[node] <= LONG:
        return sorted_as(repr(node))
    fresh = {x for n in found for x in n.values if isinstance(x, str) and _FRESH.fullmatch(x)}
    names = {name: f"${n}" for n, name in enumerate(sorted(fresh, key=sorted_as))}
    digests: dict[Node, str] = {}

    def told(value: Any) -> str:
        if isinstance(value, tuple):
            return f"({','.join(map(told, value))})"
        if isinstance(value, str):
            return repr(names.get(value, value))
        return digests[value] if isinstance(value, Node) else repr(value)

    for n in found:
        digests[n] = hashlib.sha256(f"{n.dialect}.{n.op}{told(n.values)}".encode()).hexdigest()
    return digests[node]
