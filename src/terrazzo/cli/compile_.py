"""`terrazzo compile`: print any stage, and what the rules did on the way."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from terrazzo.cli.output import as_json, code, say
from terrazzo.cli.request import Json, Request, with_request

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering


class Stage(StrEnum):
    """What `--ir` may name."""

    torch = "torch"
    tensor = "tensor"
    loop = "loop"
    cpp = "cpp"


@with_request
def compile_(
    request: Request,
    ir: Annotated[Stage, typer.Option("--ir", help="The stage to print.")] = Stage.loop,
    json: Json = False,
) -> None:
    """Lower a model, and print it at any stage.

    terrazzo compile -c "torch.softmax(torch.randn(8, 128), -1)" --ir loop -v
    """
    from terrazzo.cli.lowering import lower, show_events
    from terrazzo.cli.subject import load

    done = lower(load(request), request)
    if json:
        as_json(_summary(done, ir))
        return
    show_events(done.log.events, request.options.verbose)
    for heading, text, language in _texts(done, ir):
        if heading:
            say(heading, "bold")
        if text:
            code(text, language)


def _texts(done: Lowering, ir: Stage) -> list[tuple[str, str, str]]:
    """What to print: (heading, text, language)."""
    from terrazzo.cli.lowering import at, heading, listing
    from terrazzo.ir.dialects.loop import Kernel
    from terrazzo.ir.text import show
    from terrazzo.targets.cpu.emit import emit, prelude

    if ir is Stage.loop:
        kernels = listing(done.loop) or [("no kernels: every result is an input", "")]
        return [(head, text, "python") for head, text in kernels]
    if ir is Stage.cpp:
        steps = [(heading(k, step), step) for k, step in enumerate(done.loop.steps) if isinstance(step, Kernel)]
        return [(f"// {head}", emit(kernel)[1].removeprefix(prelude()), "cpp") for head, kernel in steps]
    return [("", show(at(done, ir.value)), "python")]


def _summary(done: Lowering, ir: Stage) -> dict[str, object]:
    from terrazzo.ir.dialects.loop import Call
    from terrazzo.run.dump import event_json

    return {
        "ir": ir.value,
        "text": [{"heading": head, "text": text} for head, text, _ in _texts(done, ir)],
        "kernels": [{"name": s.name, "reads": [b.name for b in s.reads], "writes": [b.name for b in s.writes]} for s in done.loop.steps],
        "fallbacks": [{"op": s.name, "source": s.source} for s in done.loop.steps if isinstance(s, Call)],
        "passes": [{"name": p.name, "seconds": seconds} for p, _, seconds in done.stages],
        "events": [event_json(e) for e in done.log.events],
    }
