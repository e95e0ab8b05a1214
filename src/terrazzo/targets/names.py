"""What the names and comments of a program become in C++ and CUDA, for all emitters.

A program may call its buffers anything: a word of C++, a macro, a function that the kernel calls, a variable that the
emitter writes itself, in any alphabet. So a name is kept only where it cannot be one of these: it ends in a digit and
is no word of the texts around it. Any other gets an underscore at its end, which nothing else here has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from terrazzo.ir.dialects.scalar import BY_NAME


def comment(text: str) -> str:
    """A line that is a comment whatever it says: a backslash at its end, say, would take in the next one."""
    plain = re.sub(r"[^ -~]", "?", text).replace("\\", "/").replace("??/", "??")
    return f"// {plain}"


def identifier(name: str) -> str:
    """A name for generated code that does not change with the numbers in the program's names, so that equal layers are
    equal text.
    """
    plain = re.sub(r"_*\d+", "", _ascii(name)).strip("_")
    return plain or "t"


@lru_cache(maxsize=64)
def words(*texts: str) -> frozenset[str]:
    """Every word of some texts in C++, and of the scalar functions."""
    functions = (fn.c.replace("{f}", f) for fn in BY_NAME.values() for f in ("", "f"))
    return frozenset(word for text in (*texts, *functions) for word in re.findall(r"[A-Za-z_]\w*", text))


class Names:
    """The names that are taken where a function is being written."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(taken)

    def formal(self, name: str) -> str:
        """A parameter for a buffer: x_p, or x_p2 where there is one."""
        base, k = identifier(name) + "_p", 2
        found = base
        while found in self.taken:
            found, k = f"{base}{k}", k + 1
        self.taken.add(found)
        return found

    def local(self, name: str) -> str:
        """A variable, called as it is in the program where that is possible."""
        found = _ascii(name)
        if not re.fullmatch(r"_?[a-z]\w*\d|[A-Z]\w*[a-z]\w*\d", found):
            found = "v" + found if not found[:1].isalpha() else found
            found += "_"
        while found in self.taken:
            found += "_"
        self.taken.add(found)
        return found

    @contextmanager
    def block(self) -> Iterator[None]:
        """What is called something inside of this may be forgotten after."""
        before = set(self.taken)
        yield
        self.taken = before


def _ascii(name: str) -> str:
    return re.sub(r"\W", "_", name, flags=re.ASCII)
