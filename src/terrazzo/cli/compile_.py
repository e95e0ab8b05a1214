"""`terrazzo compile`: print any stage, and what the rules did on the way."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from terrazzo.cli.output import as_json, code, say
from terrazzo.cli.request import Json, Request, with_request
from terrazzo.errors import UserError

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering


class Stage(StrEnum):
    """What `--ir` may name."""

    torch = "torch"
    tensor = "tensor"
    loop = "loop"
    cpp = "cpp"
    tile = "tile"
    kernel = "kernel"
    cuda = "cuda"


@with_request
def compile_(
    request: Request,
    ir: Annotated[Stage, typer.Option("--ir", help="The stage to print.")] = Stage.loop,
    check: Annotated[bool, typer.Option("--check", help="Simulate some blocks of every kernel for a GPU.")] = False,
    json: Json = False,
) -> None:
    """Lower a model, and print it at any stage.

    terrazzo compile -c "torch.softmax(torch.randn(8, 128), -1)" --ir loop -v
    """
    from terrazzo.cli.lowering import lower, show_events
    from terrazzo.cli.subject import load
    from terrazzo.targets import target

    if ir is Stage.cpp and target(request.options.target).gpu is not None:
        raise UserError(
            f"--ir cpp: C++ is what kernels become for a processor, and the target is {request.options.target}; "
            "write --ir cuda, or --target cpu"
        )
    done = lower(load(request), replace(request, options=replace(request.options, check=check)))
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
    from terrazzo.ir.dialects import kernel as k
    from terrazzo.ir.dialects import loop as l
    from terrazzo.ir.show import show
    from terrazzo.ir.show_kernel import show_kernel
    from terrazzo.targets.cpu import emit as cpp
    from terrazzo.targets.cuda import emit as cuda

    if ir is Stage.loop:
        kernels = listing(at(done, "loop")) or [("no kernels: every result is an input", "")]
        return [(head, text, "python") for head, text in kernels]
    if ir is Stage.cpp:
        steps = [(heading(n, step), step) for n, step in enumerate(done.loop.steps) if isinstance(step, l.Kernel)]
        return [(f"// {head}", cpp.emit(kernel)[1].removeprefix(cpp.prelude()), "cpp") for head, kernel in steps]
    if ir is Stage.tile:
        program = at(done, "tile")
        return [
            (head, f"{text}\n{program.beside(n)}".rstrip(), "python")
            for n, (head, text) in enumerate(listing(program.loop))
        ]
    if ir in (Stage.kernel, Stage.cuda):
        launches = [(n, s) for n, s in enumerate(at(done, "kernel").steps) if isinstance(s, k.Kernel)]
        if ir is Stage.kernel:
            return [(heading(n, s), "\n".join(show_kernel(s)), "python") for n, s in launches]
        return [(f"// {heading(n, s)}", cuda.emit(s)[1], "cpp") for n, s in launches]
    return [("", show(at(done, ir.value)), "python")]


def _summary(done: Lowering, ir: Stage) -> dict[str, object]:
    from terrazzo.ir.dialects.loop import Call
    from terrazzo.run.dump import event_json

    steps = (done.at("kernel") or done.loop).steps
    return {
        "ir": ir.value,
        "text": [{"heading": head, "text": text} for head, text, _ in _texts(done, ir)],
        "kernels": [
            {"name": s.name, "reads": [b.name for b in s.reads], "writes": [b.name for b in s.writes]} for s in steps
        ],
        "fallbacks": [{"op": s.name, "source": s.source} for s in steps if isinstance(s, Call)],
        "passes": [{"name": p.name, "seconds": seconds} for p, _, seconds in done.stages],
        "events": [event_json(e) for e in done.log.events],
    }
