"""How to see a compiler bug again: the program that the failing step was given, in a file, and the command that checks
it.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terrazzo.errors import CompilerBug, Limitation, UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.show import show
from terrazzo.options import Options


@contextmanager
def failing(what: str, program: Any) -> Iterator[None]:
    """Makes a CompilerBug of what was not raised on purpose inside, and has it carry the `program` that was worked
    on.
    """
    try:
        yield
    except (UserError, Limitation, MemoryError, OSError):
        raise
    except CompilerBug as bug:
        bug.program = program if bug.program is None else bug.program
        raise
    except Exception as error:
        found = CompilerBug(f"{what}: {type(error).__name__}: {error}")
        found.program, found.about = program, getattr(error, "about", ())
        raise found from error


@contextmanager
def reproducible(options: Options) -> Iterator[None]:
    """Has a CompilerBug from inside end with the command that shows it again. Its program is dumped, or kept with the
    cache.
    """
    try:
        yield
    except CompilerBug as bug:
        if bug.program is not None and (saved := save(bug.program, options)):
            bug.args = (f"{bug}\nTo see it again:\n    {saved[1]}",)
            bug.program = None  # so that it is told once
        raise


def save(program: Any, options: Options) -> tuple[Path, str] | None:
    """Write a program to a file, and give that with the command line that checks it; None where it cannot be
    written.
    """
    dialect = "loop" if isinstance(program, l.Program) else program.dialect
    try:
        text = show(program)
        folder = options.dump or options.cache_dir / "bugs"
        path = folder / f"{dialect}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except Exception:  # the bug itself must be told, whatever it did to the program
        return None
    words = ["terrazzo", "check", "--from", dialect, str(path), "--target", options.target]
    words += ["--fp32", options.fp32] if options.fp32 != "auto" else []
    words += ["--no-tf32"] if not options.tf32 and options.target.startswith("sm_") and dialect == "torch" else []
    words += [] if options.fuse else ["--no-fuse"]
    words += [word for name in options.materialize for word in ("--materialize", name)]
    words += [word for name in options.frozen for word in ("--frozen", name)]
    words += [word for name in options.updated for word in ("--updated", name)]
    return path, shlex.join(words)
