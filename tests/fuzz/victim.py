"""A process in which hostile texts are tried, with the address sanitizer around every buffer of a kernel.

It reads requests, a JSON line each, and answers each with a line: what every command said of a text, and its exit code.
Temporaries of a program lie apart from each other, and what lies between them is poisoned. Whatever touches memory that
is not its own ends the process, with the sanitizer's report on stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 60
"""How long a command may take."""
GAP = 256


def main() -> None:
    """Answer requests until there are none."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from typer.testing import CliRunner

    from terrazzo.cli.app import app

    _apart()
    if "--trusting" in sys.argv:
        _trusting()
    signal.signal(signal.SIGALRM, _ring)
    runner = CliRunner()
    for line in sys.stdin:
        request = json.loads(line)
        answers = []
        for command in request:
            signal.alarm(SECONDS)
            try:
                found = runner.invoke(app, command, prog_name="terrazzo")
                answers.append((found.exit_code, found.output))
            except TimeoutError:
                answers.append((124, "too long"))
            finally:
                signal.alarm(0)
        print(json.dumps(answers), file=out, flush=True)


def _ring(*_: Any) -> None:
    raise TimeoutError


def _apart() -> None:
    """Gives every temporary memory of its own, and poisons the rest of it."""
    from terrazzo.run import arena, compiled, plan

    sanitizer = ctypes.CDLL(None)
    poison, unpoison = (getattr(sanitizer, f"__asan_{x}poison_memory_region") for x in ("", "un"))
    poison.argtypes = unpoison.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def allocate(program: Any, buffers: Sequence[Any], *_: Any) -> tuple[dict[Any, int], int]:
        offsets, at = {}, 0
        for b in buffers:
            offsets[b] = at
            at += -(-(b.type.span + GAP) // arena.ALIGN) * arena.ALIGN
        return offsets, at

    class Frame(compiled.Frame):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            poison(self.arena.data_ptr(), self.arena.numel())
            for slot in self.plan.slots:
                if slot.kind == "arena" and slot.of is None:
                    unpoison(self.base + slot.offset, slot.bytes)

    plan.allocate = allocate
    compiled.Frame = Frame  # type: ignore[misc]


def _trusting() -> None:
    """Takes the verifier away: so a test can see that the sanitizer finds what it is there for."""
    from terrazzo.ir import operators, parse_loop, verify

    for module, name in (
        *((module, name) for module in (parse_loop, verify) for name in ("store_problem", "term_problem")),
        (operators, "impure"),
    ):
        setattr(module, name, lambda x: "")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
