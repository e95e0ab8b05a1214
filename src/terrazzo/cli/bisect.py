"""`terrazzo bisect`: which kernel of a model is wrong, and which rule made it so."""

from __future__ import annotations

from dataclasses import replace

import typer

from terrazzo.cli.check import Shrink, facts, saved, tell_file, tell_wrong
from terrazzo.cli.output import as_json, say
from terrazzo.cli.request import Json, Request, with_request
from terrazzo.progress import working


@with_request
def bisect(request: Request, shrink: Shrink = True, json: Json = False) -> None:
    """Find the first wrong kernel of a model and the rule application that made it so; exit code 1 if there is one.

    Every kernel is run as it is deployed (on this processor or GPU, else simulated) on the right operands.

    terrazzo bisect openai-community/gpt2 --random-weights --target cpu
    """
    from terrazzo.check.bisect import bisect as find
    from terrazzo.cli.subject import load

    subject = load(request)
    inputs = {name: x.cpu() for name, x in {**subject.bound, **subject.inputs()}.items()}
    with working("looking for a wrong kernel"):
        found = find(subject.program, inputs, replace(request.options, verbose=0, dump=None))
    file = saved(found.wrong, subject.program, request) if found and shrink else None
    if json:
        wrong = {"kernel": found.kernel, "number": found.number, **facts(found.wrong, file)} if found else None
        as_json({"wrong": wrong})
    elif found is None:
        say("ok: every kernel computes what it should", "green")
    else:
        say(f"kernel {found.number}, {found.kernel}: {found.problem}")
        tell_wrong(found.wrong, request.options.verbose)
        tell_file(file)
    if found is not None:
        raise typer.Exit(1)
