"""`terrazzo opt`: passes over a file of IR text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.output import code, unknown


def opt(
    file: Annotated[Path, typer.Argument(help="IR text: a stage that --dump wrote, or one written by hand.")],
    passes: Annotated[
        str, typer.Option("-p", "--passes", metavar="PASS,PASS", help="What to run, in order; a wrong name lists them.")
    ] = "",
    target: Annotated[str, typer.Option(envvar="TERRAZZO_TARGET", help="Whose prices decide.")] = "cpu",
    materialize: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Buffers that are not fused away. Repeatable.")
    ] = None,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="-v: every rule, -vv: with its diff.", show_default=False)
    ] = 0,
) -> None:
    """Run passes over IR text and print the result, which can be read back.

    Without passes, the text is checked and printed tidily.

    terrazzo opt 02-loop.txt -p fuse,store_as_read
    """
    from terrazzo.cli.lowering import show_events
    from terrazzo.cli.subject import read
    from terrazzo.errors import UserError
    from terrazzo.ir.places import Places
    from terrazzo.ir.text import show
    from terrazzo.options import Options
    from terrazzo.pipelines import PASSES, dialect, stages
    from terrazzo.rewrite.rule import Log

    options = Options.from_mapping({"target": target, "materialize": materialize or (), "verbose": verbose})
    known = {p.name: p for p in PASSES}
    chosen = [name.strip() for name in passes.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise UserError(unknown("pass", name, tuple(known)))
    places = Places()
    program = read(file, places=places)
    log = Log()
    for name in chosen:
        if known[name].src != dialect(program):
            raise UserError(f"pass {name} takes {known[name].src} IR; here the program is {dialect(program)} IR")
        with places.told():
            program = stages(program, options, log, (name,))[-1][1]
    show_events(log.events, verbose)
    code(show(program))
