"""`terrazzo tune`: candidates measured on this machine's GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrazzo.cli.output import as_json, say
from terrazzo.cli.request import Json, Request, with_request
from terrazzo.errors import UserError

if TYPE_CHECKING:
    from terrazzo.tune.search import Tuned


@with_request
def tune(
    request: Request,
    seconds: Annotated[int, typer.Option(help="How long it may take, about.")] = 120,
    again: Annotated[bool, typer.Option("--again", help="Measure what was measured before, too.")] = False,
    json: Json = False,
) -> None:
    """Measure the best candidates for every kernel, and keep which is the fastest.

    What is compiled later on this kind of GPU takes it. A search that is interrupted keeps what it has measured.

    terrazzo tune -c "torch.nn.Linear(4096, 4096)(torch.randn(512, 4096))" --seconds 60
    """
    from terrazzo.cli.subject import load
    from terrazzo.run.cuda import devices
    from terrazzo.targets import target
    from terrazzo.tune.search import tune

    if seconds < 1:
        raise UserError(f"--seconds {seconds}: it must be at least 1")
    if target(request.options.target).gpu is None or not devices():
        raise UserError("schedules are measured on a GPU, and PyTorch sees none; `terrazzo explain` has the model's")
    subject = load(request)
    found = tune(subject.program, replace(request.options, tune=seconds), "cuda:0", again)
    if json:
        as_json([_summary(x) for x in found])
        return
    rows = [(f"{x.count} x {x.name}" if x.count > 1 else x.name, x) for x in found]
    width = max((len(name) for name, _ in rows), default=0)
    for name, x in rows:
        say(f"{name:{width}}  {_line(x)}")
    first, best = (sum(x.count * getattr(x, what) for x in found) for what in ("first", "best"))
    if best:
        say(f"together {first:.1f} us as the model chose, {best:.1f} us as measured")


def _line(x: Tuned) -> str:
    done = [t for t in x.timings if t.us is not None]
    if not done:
        return "not measured" if not x.timings else f"none of {len(x.timings)} candidates ran: {x.timings[0].why}"
    out = f", {len(x.timings) - len(done)} out" if len(done) < len(x.timings) else ""
    return f"{x.first:9.1f} us by the model's choice, {x.best:9.1f} us the fastest of {len(done)}{out}"


def _summary(x: Tuned) -> dict[str, Any]:
    return {"kernel": x.name, "count": x.count, "candidates": [asdict(t) for t in x.timings]}
