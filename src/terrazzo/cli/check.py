"""`terrazzo check`: every rule application of a compilation, replayed on random inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrazzo.cli.output import as_json, code, columns, duration, say
from terrazzo.cli.request import Json, Request, with_request
from terrazzo.progress import working

if TYPE_CHECKING:
    from terrazzo.check.replay import Report, Wrong

Shrink = Annotated[
    bool,
    typer.Option("--shrink/--no-shrink", help="Look for a small program that shows what is wrong, for a bug report."),
]


@with_request
def check(request: Request, shrink: Shrink = True, json: Json = False) -> None:
    """Run every stage of a compilation on random inputs, and name the first rule application that is wrong.

    The exit code is 1 if one is. Results may differ by rounding only, with float64 as the judge.

    Kernels of a GPU are simulated, some of their blocks.

    terrazzo check -c "torch.softmax(torch.randn(8, 128), -1)" --target sm_90a
    """
    from terrazzo.check.replay import check as replay
    from terrazzo.cli.subject import load

    subject = load(request)
    inputs = {name: x.cpu() for name, x in {**subject.bound, **subject.inputs()}.items()}
    with working("checking"):
        report = replay(subject.program, inputs, replace(request.options, verbose=0, dump=None))
    own = report.wrong.error if report.wrong else None  # the text says so itself, and nothing smaller need be found
    file = saved(report.wrong, subject.program, request) if report.wrong and shrink and not own else None
    if report.wrong and own:
        report.wrong = replace(report.wrong, problem=f"cannot run: {request.places[0].tell(own)}")
    if json:
        as_json(_summary(report, file))
    else:
        _tell(report, request.options.verbose)
        tell_file(file)
    if report.wrong:
        raise typer.Exit(1)


def saved(wrong: Wrong, program: Any, request: Request) -> tuple[Path, str] | None:
    """A small program that shows what is wrong: its file (where stages are dumped, else in the cache) and the command
    that checks it.
    """
    from terrazzo.check.shrink import smallest
    from terrazzo.reproduce import save

    quiet = replace(request.options, verbose=0, dump=None)
    with working("shrinking"):
        small = smallest(program, wrong, quiet)
    return None if small is None else save(small, replace(quiet, dump=request.options.dump))


def tell_file(file: tuple[Path, str] | None) -> None:
    """Say where a small program lies, and what shows it again."""
    if file is not None:
        say(f"a small program that shows it is in {file[0]}:")
        code(file[0].read_text(encoding="utf-8"))
        say(f"    {file[1]}")


def tell_wrong(wrong: Wrong, verbose: int) -> None:
    """Say which application is wrong and how; with -v also what it made of what."""
    from terrazzo.ir.show import show

    say(f"wrong: {wrong.application}", "bold red")
    say(f"    {wrong.value} {wrong.problem}")
    for label, nodes in (("before", wrong.application.before), ("after", wrong.application.after)) if verbose else ():
        say(f"{label}:", "bold")
        for node in nodes:
            code(show(node))


def _tell(report: Report, verbose: int) -> None:
    rows = [
        [
            name,
            f"{count} {'kernel' if name == 'emit' else 'application'}{'' if count == 1 else 's'}",
            duration(report.seconds[name] * 1e9),
        ]
        for name, count in report.applications.items()
    ]
    for line in columns(rows, right=(1, 2)):
        say(line)
    if report.blocks:
        ran, grid = sum(b[1] for b in report.blocks), sum(b[2] for b in report.blocks)
        say(f"simulated {ran} of {grid} blocks of {len(report.blocks)} kernels")
    if report.wrong:
        tell_wrong(report.wrong, verbose)
    else:
        say("ok: no rule application moves a result beyond rounding", "green")


def _summary(report: Report, file: tuple[Path, str] | None) -> dict[str, Any]:
    wrong = report.wrong
    return {
        "passes": [
            {"name": n, "applications": c, "seconds": report.seconds[n]} for n, c in report.applications.items()
        ],
        "kernels": [{"name": n, "blocks": ran, "grid": grid} for n, ran, grid in report.blocks],
        "wrong": None if wrong is None else facts(wrong, file),
    }


def facts(wrong: Wrong, file: tuple[Path, str] | None) -> dict[str, Any]:
    """What is wrong, for a script."""
    return {
        "pass": wrong.application.pass_name,
        "rule": wrong.application.rule,
        "subject": wrong.application.subject,
        "value": wrong.value,
        "problem": wrong.problem,
        "file": str(file[0]) if file else None,
        "command": file[1] if file else None,
    }
