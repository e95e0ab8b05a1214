"""`terrazzo run`: compile, run, and compare with PyTorch."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrazzo.cli.output import as_json, duration, say, told_warnings
from terrazzo.cli.request import Json, Request, with_request
from terrazzo.errors import CompilerBug, UserError
from terrazzo.progress import working

if TYPE_CHECKING:
    from terrazzo.bench.harness import Accuracy, Timing


@with_request
def run(
    request: Request,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare with eager, both against float64; simulate some blocks of kernels for a GPU."
        ),
    ] = False,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Run an interpreter: of Loop IR, or of a GPU's kernels.")
    ] = False,
    timed: Annotated[bool, typer.Option("--time", help="Time it beside eager, in turns.")] = False,
    json: Json = False,
) -> None:
    """Compile a model, run it, and say how it compares with PyTorch.

    terrazzo run openai-community/gpt2 --random-weights --check --time
    """
    from terrazzo.cli.lowering import lower, refuse, show_events
    from terrazzo.cli.subject import load
    from terrazzo.pipelines import lowering
    from terrazzo.reproduce import failing, reproducible
    from terrazzo.run.compiled import compile_program
    from terrazzo.run.interpreted import interpreted

    subject = load(request)
    request = replace(request, options=replace(request.options, check=check))
    if check or request.options.verbose or request.options.dump or request.options.materialize:
        done = lower(subject, request)  # compiling may find everything in the cache and lower nothing
        if not json:
            show_events(done.log.events, request.options.verbose)
    start = time.perf_counter()
    with working("compiling"), told_warnings():
        options = replace(request.options, verbose=0, dump=None, check=False)
        run = interpreted(lowering(subject.program, options), subject.bound) if interpret else None
        compiled: Any = run or compile_program(subject.program, subject.bound, options)
    seconds = time.perf_counter() - start
    refuse([(f.op, f.source) for f in compiled.fallbacks if not f.chosen], request)

    inputs = list(subject.inputs().values())
    try:
        with (
            working("running"),
            reproducible(request.options),
            failing("running", None if request.file else subject.program),
        ):
            results = compiled(inputs)
    except CompilerBug as error:
        if request.file is None:
            raise
        # It would be a bug, had the compiler made this program.
        told = request.places[0].tell(error)
        raise UserError(f"{told}" if told.placed else f"{request.file[1]}: {told}") from None
    compared = times = None
    if check:
        with working("checking against float64"):
            compared = _check(results, subject.eager, subject.exact)
    if timed:
        with working("timing"):
            times = _time(lambda: compiled(inputs), subject.eager, request.options.threads)
    if json:
        as_json(_summary(compiled, results, seconds, compared, times))
    else:
        _tell(compiled, results, seconds, compared, times)
    if compared is not None and not compared.ok:
        raise typer.Exit(1)


def _check(results: list[Any], eager: Any, exact: Any) -> Accuracy:
    from terrazzo.bench.harness import accuracy

    return accuracy(results, eager(), exact())


def _time(ours: Any, eager: Any, threads: int | None) -> dict[str, Timing]:
    import torch

    from terrazzo.bench.harness import interleaved

    if threads is not None:
        torch.set_num_threads(threads)  # for eager; a fair comparison uses as many on both sides

    def finished(call: Any) -> Any:
        """The call with all that it started on a GPU."""

        def run() -> None:
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        return run

    return interleaved({"terrazzo": finished(ours), "eager": finished(eager)})


def _tell(
    compiled: Any, results: list[Any], seconds: float, compared: Accuracy | None, times: dict[str, Timing] | None
) -> None:
    for k, r in enumerate(results):
        say(f"result {k}: {_type(r)}")
    say(f"compiled in {duration(seconds * 1e9)}")
    for f in compiled.fallbacks:
        say(f"PyTorch runs {f.op}{f' at {f.source}' if f.source else ''}", "yellow")
    if compared is not None:
        say(f"error against float64 (rmse): ours {compared.ours:.2e}, eager's {compared.eager:.2e}")
        say(f"largest difference from eager: {compared.difference:.2e}")
        say(f"check: {compared.problem or 'ok'}", "green" if compared.ok else "bold red")
    if times is not None:
        ours, eager = times["terrazzo"], times["eager"]
        for name, t in times.items():
            spread = f"{duration(t.low * 1e9)} to {duration(t.high * 1e9)}"
            say(f"{name + ':':<9} {duration(t.median * 1e9)} (median of {t.measurements}; {spread})")
        say(f"speed:    {eager.median / ours.median:.2f}x of eager")


def _summary(
    compiled: Any, results: list[Any], seconds: float, compared: Accuracy | None, times: dict[str, Timing] | None
) -> dict[str, Any]:
    return {
        "results": [_type(r) for r in results],
        "compile_seconds": seconds,
        "fallbacks": [asdict(f) for f in compiled.fallbacks],
        "check": None if compared is None else {**asdict(compared), "ok": compared.ok},
        "times": None if times is None else {name: asdict(t) for name, t in times.items()},
    }


def _type(tensor: Any) -> str:
    from terrazzo.ir.torch_types import type_of

    return str(type_of(tensor))
